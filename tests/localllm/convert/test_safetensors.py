"""Safetensors: rows read back as written, and an invalid header gives a one-line error."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from localllm.convert import ConvertError
from localllm.convert.safetensors import Shard, open_shards
from tests.localllm.convert.support import blob, save

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def refused(message: str, folder: Path) -> None:
    with pytest.raises(ConvertError, match=message):
        open_shards(folder)


def test_rows_are_the_bytes_of_the_file(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", {"pad": np.zeros(5, np.uint8), "x": X})
    (shard,) = open_shards(tmp_path)
    x = shard.tensors["x"]
    assert (x.format, x.shape, x.rows, x.row_bytes, x.nbytes) == ("F32", (2, 3, 4), 6, 16, 96)
    assert x.read(0, 6).tobytes() == X.tobytes()
    np.testing.assert_array_equal(x.read(2, 4).view(np.float32), X.reshape(6, 4)[2:4])
    assert x.read(3, 3).shape == (0, 16)
    with pytest.raises(ConvertError, match="rows 5 to 7 requested; it has 6"):
        x.read(5, 7)
    shard.close()
    with pytest.raises(ConvertError, match="the file was closed"):
        x.read(0, 1)


def test_the_package_reads_what_this_does(tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy", reason="the safetensors package is not installed")
    numpy.save_file({"x": X, "y": X.astype(np.float16)}, tmp_path / "model.safetensors", {"format": "pt"})
    (shard,) = open_shards(tmp_path)
    assert set(shard.tensors) == {"x", "y"}
    np.testing.assert_array_equal(shard.tensors["x"].read(0, 6).view(np.float32), X.reshape(6, 4))


def test_shards_by_index_and_without(tmp_path: Path) -> None:
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    save(tmp_path / names[0], {"a": X})
    save(tmp_path / names[1], {"b": X})
    for shard in open_shards(tmp_path):
        shard.close()
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": names[0], "b": names[1]}}))
    assert [sorted(shard.tensors) for shard in open_shards(tmp_path)] == [["a"], ["b"]]
    index.write_text(json.dumps({"weight_map": {"a": names[0], "b": names[0]}}))
    refused(r"00001-of-00002.safetensors: tensor 'b' is missing", tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": names[0], "b": "../" + names[1]}}))
    refused("is not the name of a safetensors file", tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": names[0], "c": "model-00003-of-00003.safetensors"}}))
    refused(r"model-00003-of-00003.safetensors is missing, but .* lists it; download", tmp_path)
    index.write_text("[]")
    refused("is not a JSON object", tmp_path)
    index.unlink()
    save(tmp_path / names[1], {"a": X})
    refused(r"tensor 'a' is also in model-00001-of-00002.safetensors", tmp_path)


def test_a_folder_without_safetensors(tmp_path: Path) -> None:
    refused(r"no \*.safetensors file", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refused(r"pytorch_model.bin, a pickle, which can run code; save", tmp_path)
    (tmp_path / "consolidated.safetensors").write_bytes(b"")
    refused(r"has consolidated.safetensors but no model.safetensors", tmp_path)


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HOSTILE = {
    "empty file": b"",
    "length beyond the file": blob({}, length=1 << 60),
    "no JSON": blob(b"{{"),
    "no object": blob([]),
    "nested": blob(b"[" * 100_000),
    "a name twice": blob(b'{"x": {}, "x": {}}'),
    "no entry": blob({"x": 1}),
    "no dtype": blob({"x": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)),
    "dtype": blob({"x": GOOD | {"dtype": "F3"}}, bytes(8)),
    "dtype list": blob({"x": GOOD | {"dtype": []}}, bytes(8)),
    "three offsets": blob({"x": GOOD | {"data_offsets": [0, 4, 8]}}, bytes(8)),
    "negative": blob({"x": GOOD | {"shape": [-2]}}, bytes(8)),
    "fraction": blob({"x": GOOD | {"shape": [2.0]}}, bytes(8)),
    "truth": blob({"x": GOOD | {"shape": [True], "data_offsets": [0, 4]}}, bytes(8)),
    "huge": blob({"x": GOOD | {"shape": [1 << 61, 8]}}, bytes(8)),
    "size": blob({"x": GOOD | {"shape": [3]}}, bytes(12)),
    "backwards": blob({"x": GOOD | {"data_offsets": [8, 0]}}, bytes(8)),
    "after the end": blob({"x": GOOD | {"data_offsets": [4, 12]}}, bytes(8)),
    "dimensions": blob({"x": GOOD | {"shape": [1] * 9 + [2]}}, bytes(8)),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_header_is_one_line(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(ConvertError) as error:
        Shard(path)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_a_header_that_is_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save(path, {"x": X, "y": X})
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ConvertError):
            Shard(path)


@pytest.mark.parametrize("header", [b"{" + b"," * 3_000_000 + b"}", b'{"a":' + b"[" * 600_000, b'{"a":' * 600_000])
def test_headers_of_too_many_tensors_are_refused_before_they_are_read(header: bytes, tmp_path: Path) -> None:
    """A 90 MB header with 1.4 million tensors used to take 33 s and 1.9 GB. It is refused before parsing."""
    (tmp_path / "model.safetensors").write_bytes(blob(header))
    refused("the header names more than 131072 tensors", tmp_path)


def test_names_that_no_tensor_has(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    name = f"model.layers.{'1' * 5000}.self_attn.q_proj.weight"
    (tmp_path / "model.safetensors").write_bytes(blob({name: entry}, bytes(4)))
    refused(r"the name of tensor 'model\.layers\.1+\.\.\.' has 50[0-9]+ characters", tmp_path)

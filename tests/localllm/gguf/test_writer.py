"""gguf-py and localllm read the values that were written to a GGUF. Files are complete or absent, and writing
needs little memory.
"""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.base.files.outputs import OutputError
from localllm.gguf import GGUFError, StringArray, open_gguf, write_gguf
from tests.conftest import full_disk

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "general.name": "tëst\nmodel",
    "a.count": 7,
    "a.rate": 0.1,
    "a.flag": True,
    "a.uint64": np.uint64(1 << 40),
    "a.int32": np.int32(-5),
    "a.int8": np.int8(-5),
    "a.uint16": np.uint16(65535),
    "a.float64": np.float64(0.1),
    "a.strings": ["", "Ġthe", "日本"],
    "a.none": [],
    "a.bools": np.array([True, False]),
    "a.int32s": np.array([1, -2, 3], np.int32),
    "a.float32s": np.array([0.5, -1e30], np.float32),
    "a.int64s": np.arange(4),
    "a.uint8s": np.zeros(0, np.uint8),
}


def _tensors() -> list[tuple[str, str, tuple[int, ...], Any]]:
    random = np.random.default_rng(1)

    def block(*shape: int) -> np.ndarray:
        return random.integers(0, 256, shape, dtype=np.uint8)

    rows = block(6, 68)
    return [
        ("token_embd.weight", "Q8_0", (6, 64), rows),
        ("norm.weight", "F32", (5,), random.standard_normal(5).astype(np.float32).tobytes()),
        ("experts.weight", "Q4_0", (2, 3, 4, 32), lambda: (block(2, 18) for _ in range(12))),
        ("half.weight", "F16", (3, 2), [b"ab", bytearray(4), memoryview(b"cdefgh")]),
        ("last.weight", "I8", (3,), lambda: b"xyz"),
    ]


@pytest.mark.parametrize("alignment", [None, 8, 32, 256])
def test_gguf_py_reads_what_we_write(tmp_path: Path, alignment: int | None) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "m.gguf"
    write_gguf(path, METADATA, _tensors(), alignment=alignment)
    oracle = gguf.GGUFReader(path)
    fields = {key: field for key, field in oracle.fields.items() if not key.startswith("GGUF.")}
    types = {key: [kind.name for kind in field.types] for key, field in fields.items()}
    values = {key: field.contents() for key, field in fields.items()}
    if alignment:
        assert values.pop("general.alignment") == alignment
        assert types.pop("general.alignment") == ["UINT32"]
    assert list(values) == list(METADATA)
    assert types.pop("a.count") == ["UINT32"]
    assert types.pop("a.rate") == ["FLOAT32"]
    assert types.pop("a.flag") == ["BOOL"]
    assert types.pop("a.strings") == ["ARRAY", "STRING"]
    assert types["a.int64s"] == ["ARRAY", "INT64"]
    for key, want in METADATA.items():
        if key == "a.none" or key == "a.uint8s":  # gguf-py reports no element type for an empty array
            assert values[key] == []
        elif isinstance(want, np.ndarray):
            assert values[key] == want.tolist()
            assert types[key] == ["ARRAY", want.dtype.name.upper()]
        elif isinstance(want, np.generic):
            assert values[key] == want.item()
            assert types[key] == [want.dtype.name.upper()]
        else:
            assert values[key] == (float(np.float32(0.1)) if key == "a.rate" else want)
    assert [tensor.name for tensor in oracle.tensors] == [tensor[0] for tensor in _tensors()]
    place = 0
    for tensor, (_, kind, shape, data) in zip(oracle.tensors, _tensors(), strict=True):
        data = data() if callable(data) else data
        chunks = [data] if isinstance(data, bytes | np.ndarray) else data
        assert tensor.tensor_type.name == kind
        assert tuple(tensor.shape.tolist()[::-1]) == shape
        assert tensor.data.tobytes() == b"".join(bytes(chunk) for chunk in chunks)
        assert tensor.data_offset - oracle.data_offset == place  # no gaps between tensors, as in llama.cpp
        place += -(-int(tensor.n_bytes) // (alignment or 32)) * (alignment or 32)
    assert path.stat().st_size == oracle.data_offset + place


def test_a_copy_of_what_was_stored_is_the_same_file(tmp_path: Path) -> None:
    metadata = {**METADATA, "broken": "\udcff\udc80", "more": ["\udcffx", "\0"], "general.alignment": 64}
    write_gguf(tmp_path / "a.gguf", metadata, _tensors())
    with open_gguf(tmp_path / "a.gguf") as file:
        copy = [
            (t.name, t.format, t.shape, lambda t=t: (t.read(i, i + 1) for i in range(t.rows)))
            for t in file.tensors.values()
        ]
        assert isinstance(file.stored["a.strings"], StringArray)
        assert isinstance(file.stored["a.int8"], np.int8)
        assert file.metadata["a.int8"] == -5
        write_gguf(tmp_path / "b.gguf", file.stored, copy)
        assert file.metadata["broken"] == "\udcff\udc80"
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_our_reader_gives_back_what_was_written(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", METADATA, _tensors())
    with open_gguf(tmp_path / "m.gguf") as file:
        for key, want in METADATA.items():
            value: Any = file.metadata[key]
            if isinstance(want, np.ndarray):
                assert value.dtype == want.dtype
                assert np.array_equal(value, want)
            elif isinstance(want, list):
                assert value.to_list() == want
            else:
                assert value == (float(np.float32(0.1)) if key == "a.rate" else want)
                assert type(value) is type(want.item() if isinstance(want, np.generic) else want)
        assert file.tensors["half.weight"].read(0, 3).tobytes() == b"ab\0\0\0\0cdefgh"


def test_metadata_without_tensors(tmp_path: Path) -> None:
    write_gguf(tmp_path / "v.gguf", {"a": 1}, [])
    with open_gguf(tmp_path / "v.gguf") as file:
        assert (dict(file.metadata), file.tensors) == ({"a": 1}, {})


def test_a_large_tensor_streams(tmp_path: Path) -> None:
    def rows() -> Iterator[np.ndarray]:
        for i in range(64):
            yield np.full((256, 1024), i, np.uint8)

    tracemalloc.start()
    write_gguf(tmp_path / "big.gguf", {}, [("w", "I8", (64 * 256, 1024), rows)])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20  # a small part of the 16 MiB file
    with open_gguf(tmp_path / "big.gguf") as file:
        assert file.tensors["w"].read(0, 64 * 256)[::256, 0].tolist() == list(range(64))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (bytes(33), r"tensor 'w': Q8_0 \(1, 32\) takes 34 bytes, but its data has 33$"),
        ([bytes(34), bytes(1)], r"takes 34 bytes, but its data has at least 35$"),
        ([], r"takes 34 bytes, but its data has 0$"),
        (np.zeros(34, np.int8), r"tensor 'w': data of type int8; supported: uint8"),
    ],
)
def test_wrong_data_leaves_nothing_behind(tmp_path: Path, data: Any, message: str) -> None:
    with pytest.raises(GGUFError, match=message):
        write_gguf(tmp_path / "m.gguf", {}, [("w", "Q8_0", (1, 32), data)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, OSError])
def test_a_failing_source_leaves_nothing_behind_and_keeps_what_was_there(
    tmp_path: Path, error: type[BaseException]
) -> None:
    def failing() -> Iterator[bytes]:
        yield bytes(17)
        raise error("source")

    (tmp_path / "m.gguf").write_bytes(b"before")
    with pytest.raises(error, match="source"):
        write_gguf(tmp_path / "m.gguf", {}, [("w", "Q8_0", (1, 32), failing)], overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
    assert (tmp_path / "m.gguf").read_bytes() == b"before"


def test_overwrites_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, {"a": 1}, [])
    with pytest.raises(OutputError, match=r"m\.gguf: exists; give another name, or force=True"):
        write_gguf(path, {"a": 2}, [])

    def meanwhile() -> bytes:
        (tmp_path / "n.gguf").write_bytes(b"theirs")
        return b"x"

    with pytest.raises(OutputError, match="exists"):
        write_gguf(tmp_path / "n.gguf", {}, [("w", "I8", (1,), meanwhile)])
    assert (tmp_path / "n.gguf").read_bytes() == b"theirs"
    write_gguf(path, {"a": 2}, [], overwrite=True)
    with open_gguf(path) as file:
        assert file.metadata["a"] == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf", "n.gguf"]


def test_a_file_can_replace_the_one_it_is_made_from(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, {}, [("w", "I8", (2, 3), b"abcdef")])
    with open_gguf(path) as file:
        tensor = file.tensors["w"]
        write_gguf(path, {"new": True}, [("w", "I8", (2, 3), lambda: tensor.read(0, 2))], overwrite=True)
    with open_gguf(path) as file:
        assert file.tensors["w"].read(0, 2).tobytes() == b"abcdef"


def test_a_new_file_has_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    write_gguf(tmp_path / "m.gguf", {}, [])
    assert os.stat(tmp_path / "m.gguf").st_mode == os.stat(tmp_path / "plain").st_mode


@pytest.mark.parametrize(
    ("metadata", "tensors", "message"),
    [
        ({"a": -1}, [], r"key 'a': -1 does not fit uint32; give it as np.int32"),
        ({"a": 1 << 32}, [], r"key 'a': 4294967296 does not fit uint32"),
        ({"a": 1e39}, [], r"key 'a': 1e\+39 does not fit float32; give it as np.float64"),
        ({"a": np.float16(1)}, [], r"key 'a': float16 cannot be stored; supported: bool, uint8"),
        ({"a": np.zeros(2, np.complex64)}, [], r"key 'a': complex64 cannot be stored"),
        ({"a": np.array(["x"])}, [], r"key 'a': <U1 cannot be stored"),
        ({"a": np.zeros((2, 2))}, [], r"key 'a': array of shape \(2, 2\); supported: one dimension"),
        ({"a": [1, 2]}, [], r"key 'a': list cannot be stored; supported: bool, int"),
        ({"a": None}, [], r"key 'a': NoneType cannot be stored"),
        ({"a": "\ud800"}, [], r"key 'a': '\\ud800' cannot be stored as UTF-8"),
        ({"a": ["x"] * ((1 << 22) + 1)}, [], r"counts: 4194305 strings in arrays given; supported: at most 4194304"),
        ({str(i): 1 for i in range(65537)}, [], r"counts: 65537 keys given; supported: at most 65536"),
        ({"": 1}, [], r"key '': a name of 0 bytes; supported: 1 to 65535"),
        ({"k" * 65536: 1}, [], r"a name of 65536 bytes; supported: 1 to 65535"),
        ({"\udcff": 1}, [], r"key '\\udcff': the name is not UTF-8"),
        ({"general.alignment": 48}, [], r"key 'general.alignment': 48 found; supported: powers of two from 8 up"),
        ({"general.alignment": 4}, [], r"key 'general.alignment': 4 found"),
        ({"general.alignment": "x"}, [], r"key 'general.alignment': str given; supported: uint32"),
        ({}, [("n" * 64, "I8", (1,), b"x")], r"tensor 'n+': a name of 64 bytes; supported: 1 to 63"),
        ({}, [("w", "I8", (1,), b"x")] * 2, r"tensor 'w': given twice"),
        ({}, [("w", "Q9_9", (1,), b"x")], r"tensor 'w': format 'Q9_9' is unknown; supported: F32, F16"),
        ({}, [("w", "I8", (1,) * 5, b"x")], r"tensor 'w': 5 dimensions; supported: 1 to 4"),
        ({}, [("w", "I8", (), b"x")], r"tensor 'w': 0 dimensions"),
        ({}, [("w", "I8", (0, 1), b"")], r"tensor 'w': shape \(0, 1\) has no elements"),
        ({}, [("w", "Q4_0", (1, 33), b"")], r"tensor 'w': rows of 33 values; Q4_0 needs a multiple of its block of 32"),
        ({}, [("w", "I8", (2**32, 2**31), b"")], r"tensor 'w': .* elements; supported: fewer than 2\^63"),
    ],
)
def test_what_cannot_be_stored_is_refused(tmp_path: Path, metadata: Any, tensors: Any, message: str) -> None:
    with pytest.raises(GGUFError, match=message) as caught:
        write_gguf(tmp_path / "m.gguf", metadata, tensors)
    assert str(caught.value).startswith(f"{tmp_path / 'm.gguf'}: ")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=rf"no such folder: {tmp_path}/none; create it first$"):
        write_gguf(tmp_path / "none" / "m.gguf", {}, [])
    with pytest.raises(OutputError, match=r"is a folder"):
        write_gguf(tmp_path, {}, [], overwrite=True)


@pytest.mark.parametrize("size", [150_000, 100_001])  # sizes that fail inside a write, and when the buffer is flushed
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, size: int) -> None:
    with full_disk(100_050), pytest.raises(OutputError, match=r"m\.gguf: cannot be written: File too large"):
        write_gguf(tmp_path / "m.gguf", {}, [("w", "I8", (size,), [bytes(size - 1), b"x"])])
    assert list(tmp_path.iterdir()) == []

"""Split models: opening the first part opens all parts. Inconsistent parts give a one-line error."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.gguf import GGUFError, open_gguf, write_gguf

NAMES = [f"m-{i:05d}-of-00003.gguf" for i in (1, 2, 3)]


def _write_part(folder: Path, index: int, tensor: str | None = None, **changes: Any) -> None:
    """Write part `index` of three, like llama.cpp's gguf-split: one tensor per part, metadata only in the first part.

    A change to None removes the key. Two underscores in a key become a dot.
    """
    split = {"split.no": np.uint16(index), "split.count": np.uint16(3), "split.tensors.count": np.int32(3)}
    for key, value in changes.items():
        split[key.replace("__", ".")] = value
    metadata = {"general.architecture": "llama", **split} if index == 0 else split
    metadata = {key: value for key, value in metadata.items() if value is not None}
    name = tensor or f"t{index}"
    data = bytes([index] * 64)
    write_gguf(folder / NAMES[index], metadata, [(name, "I8", (2, 32), data)], overwrite=True)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for index in range(3):
        _write_part(tmp_path, index)
    return tmp_path / NAMES[0]


def test_the_first_part_opens_all(model: Path) -> None:
    with open_gguf(model) as file:
        assert dict(file.metadata) == {"general.architecture": "llama"}  # the split keys are removed
        assert [path.name for path in file.paths] == NAMES
        assert file.size == sum(path.stat().st_size for path in file.paths)
        assert list(file.tensors) == ["t0", "t1", "t2"]
        for index, tensor in enumerate(file.tensors.values()):
            assert tensor.read(1, 2).tobytes() == bytes([index] * 32)
            assert (tensor.read(0, tensor.rows) == index).all()


def test_links_may_lead_elsewhere(model: Path, tmp_path: Path) -> None:
    """Parts may be links to files with other names. The Hugging Face cache names files by hash and links to them."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for i, name in enumerate(NAMES):
        shutil.move(tmp_path / name, blobs / f"{i}f00")
        (snapshot / name).symlink_to(blobs / f"{i}f00")
    with open_gguf(snapshot / NAMES[0]) as file:
        assert len(file.tensors) == 3


def test_a_model_in_one_part_may_say_so(tmp_path: Path) -> None:
    counts = {"split.no": np.uint16(0), "split.count": np.uint16(1), "split.tensors.count": np.int32(0)}
    write_gguf(tmp_path / "any name.gguf", counts, [])
    with open_gguf(tmp_path / "any name.gguf") as file:
        assert file.metadata["split.count"] == 1


def _message(path: Path) -> str:
    with pytest.raises(GGUFError) as caught:
        open_gguf(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_another_part_points_to_the_first(model: Path) -> None:
    for number in (2, 3):
        path = model.with_name(NAMES[number - 1])
        want = f"{path}: key 'split.no': this is part {number} of 3; open the first part instead: {NAMES[0]}"
        assert _message(path) == want


def test_a_missing_part_is_named(model: Path) -> None:
    model.with_name(NAMES[1]).unlink()
    assert _message(model) == (
        f"{model}: key 'split.count': the model has 3 parts, and part 2 is missing: put {NAMES[1]} next to it"
    )


def test_a_damaged_part_is_named(model: Path) -> None:
    part = model.with_name(NAMES[2])
    part.write_bytes(part.read_bytes()[:-1])
    assert _message(model).startswith(f"{part}: tensor 't2': 64 bytes at offset 0 of the data")


@pytest.mark.parametrize(
    ("index", "changes", "file", "message"),
    [
        (1, {"split__no": np.uint16(2)}, 1, "key 'split.no': 2 found; supported by this file's name: 1"),
        (1, {"split__no": None}, 1, "key 'split.no': missing; supported in 3 parts: 0 to 2"),
        (1, {"split__no": np.uint16(3)}, 1, "key 'split.no': 3 found; supported in 3 parts: 0 to 2"),
        (1, {"split__count": np.uint16(4)}, 1, "key 'split.count': 4 found; supported: 3, as in the first part"),
        (1, {"split__count": None}, 1, "key 'split.count': 1 found; supported: 3, as in the first part"),
        (0, {"split__count": np.uint64(2**63)}, 0, "key 'split.count': 9223372036854775808 found; supported: at most"),
        (0, {"split__count": "3"}, 0, "key 'split.count': str found; supported: an integer from 0 up"),
        (0, {"split__no": np.int32(-1)}, 0, "key 'split.no': -1 found; supported: an integer from 0 up"),
        (0, {"split__count": np.uint16(1), "split__no": np.uint16(1)}, 0, "key 'split.no': 1 found; supported in 1"),
        (0, {"split__count": np.uint16(2)}, 0, "key 'split.count': 2 parts, but the file's name does not end in '-000"),
        (0, {"split__tensors__count": np.int32(4)}, 0, "key 'split.tensors.count': 4 tensors announced, 3 found in 3"),
        (2, {"tensor": "t0"}, 2, "tensor 't0': is already in an earlier part"),
    ],
)
def test_parts_that_do_not_fit(model: Path, index: int, changes: dict[str, Any], file: int, message: str) -> None:
    _write_part(model.parent, index, **changes)
    assert _message(model).startswith(f"{model.with_name(NAMES[file])}: {message}")


def test_a_renamed_first_part_is_told_its_name(model: Path) -> None:
    renamed = model.rename(model.with_name("model.gguf"))
    assert _message(renamed) == (
        f"{renamed}: key 'split.count': 3 parts, but the file's name does not end in '-00001-of-00003.gguf'; "
        "give all parts their names"
    )

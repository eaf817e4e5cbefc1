"""Read safetensors files, single or sharded with an index: list the tensors, and read rows on demand.

A file is a 64-bit length, a JSON header {name: {dtype, shape, data_offsets}} of that length, and the data. The
`safetensors` package has no NumPy support for BF16 and FP8 and cannot read single rows, so this module does not use it.
A header is untrusted until it is checked: every range must be inside the file and match its shape.
"""

from __future__ import annotations

import os
import re
import struct
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from localllm.base.files.positioned import read_at
from localllm.base.printable import printable
from localllm.convert.errors import ConvertError
from localllm.convert.files import open_file
from localllm.convert.jsonfile import parse_json, read_json
from localllm.convert.tensor import U8, LazyTensor

_MAX_HEADER = 100_000_000  # bytes; the same limit as in the safetensors package
_MAX_DIMENSIONS = 8
# Maximum tensors per file. Parsing a header of this size takes 3 s; DeepSeek V3 has 91,991 tensors in 163 files.
_MAX_TENSORS = 1 << 17
_MAX_NAME = 512  # characters; the longest known name has about 120
_BYTES = {
    **dict.fromkeys(("F8_E5M2", "F8_E4M3", "F8_E8M0", "BOOL", "U8", "I8"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
}
_INDEX = "model.safetensors.index.json"
_CARD = re.compile(r"-TP-(?:(\d{3})|common)\.safetensors$")  # file name of a tensor-parallel shard, as in Grok 2


class Shard:
    """An open safetensors file. Several threads can read it at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = open_file(path)
        try:
            self.size = os.fstat(self.file.fileno()).st_size
            self.tensors = self._tensors()
        except BaseException:
            self.file.close()
            raise

    def _tensors(self) -> dict[str, LazyTensor]:
        length = struct.unpack("<Q", self._read(0, 8))[0] if self.size >= 8 else 0
        if not 2 <= length <= min(_MAX_HEADER, self.size - 8):
            raise self._error("the header's length does not fit the file; not a safetensors file, or truncated")
        text = self._read(8, length)
        # Per tensor, the header has one object and two lists, with commas between values; __metadata__ gets the rest.
        if text.count(b"{") + text.count(b"[") > 4 * _MAX_TENSORS or text.count(b",") > 16 * _MAX_TENSORS:
            raise self._error(f"the header names more than {_MAX_TENSORS} tensors; save the model in several files")
        header = parse_json(text, str(self.path))
        if not isinstance(header, dict):
            raise self._error("the header is not a JSON object")
        header.pop("__metadata__", None)
        if long := next((name for name in header if len(name) > _MAX_NAME), None):
            raise self._error(
                f"the name of tensor '{printable(long)}' has {len(long)} characters; no model has such names"
            )
        return {name: self._tensor(name, entry, 8 + length) for name, entry in header.items()}

    def _tensor(self, name: str, entry: Any, data: int) -> LazyTensor:
        shown = printable(name)
        try:
            dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            numbers = (*shape, begin, end)
        except (TypeError, KeyError, ValueError):
            raise self._error(f"tensor '{shown}' has no dtype, shape and data_offsets") from None
        if not isinstance(dtype, str) or dtype not in _BYTES:
            raise self._error(f"tensor '{shown}' is of dtype {printable(str(dtype))}; known: {', '.join(_BYTES)}")
        if not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers) or len(shape) > _MAX_DIMENSIONS:
            raise self._error(f"tensor '{shown}' has a shape or data_offsets that no tensor can have")
        if begin > end or end > self.size - data or end - begin != prod(shape) * _BYTES[dtype]:
            raise self._error(
                f"tensor '{shown}', {dtype} {shape}, does not fit its place in the file; download the file again"
            )
        if not shape:
            shape = (1,)
        width = shape[-1] * _BYTES[dtype]

        def read(start: int, stop: int) -> U8:
            raw = self._read(data + begin + start * width, (stop - start) * width)
            return np.frombuffer(raw, np.uint8).reshape(stop - start, width)

        return LazyTensor(name, dtype, shape, width, read)

    def _read(self, offset: int, size: int) -> bytearray:
        out = bytearray(size)
        view = memoryview(out)
        while view:
            try:
                count = read_at(self.file, view, offset)
            except ValueError:
                raise self._error("cannot be read: the file was closed") from None
            except OSError as error:
                raise self._error(f"cannot be read: {error.strerror}") from None
            if not count:
                raise self._error("was truncated while in use")
            view, offset = view[count:], offset + count
        return out

    def _error(self, problem: str) -> ConvertError:
        return ConvertError(f"{self.path}: {problem}")

    def close(self) -> None:
        self.file.close()


def open_shards(folder: Path) -> list[Shard]:
    """Open all shards of a checkpoint and check them against the index; raise ConvertError without any shard."""
    places = _index(folder) if (folder / _INDEX).exists() else None
    names = sorted(set(places.values())) if places is not None else _without_index(folder)
    shards: list[Shard] = []
    try:
        for name in names:
            if not (folder / name).is_file():
                raise ConvertError(f"{folder}: {name} is missing, but {_INDEX} lists it; download it again")
            shards.append(Shard(folder / name))
        _check(folder, shards, places)
    except BaseException:
        for shard in shards:
            shard.close()
        raise
    return shards


def _check(folder: Path, shards: list[Shard], places: dict[str, str] | None) -> None:
    seen: dict[str, str] = {}
    for shard in shards:
        for name in shard.tensors:
            if name in seen and not _pieces(seen[name], shard.path.name):
                raise ConvertError(f"{shard.path}: tensor '{printable(name)}' is also in {seen[name]}")
            seen[name] = shard.path.name
    for name, file in (places or {}).items():
        if seen.get(name) != file:
            raise ConvertError(f"{folder / file}: tensor '{printable(name)}' is missing, but {_INDEX} lists it")


def _card(file: str) -> int:
    """Return the tensor-parallel rank that a file belongs to, or -1 for all ranks."""
    found = _CARD.search(file)
    return int(found[1]) if found and found[1] else -1


def _pieces(one: str, other: str) -> bool:
    """Return whether two files belong to different tensor-parallel ranks."""
    return -1 < _card(one) < _card(other)


def _index(folder: Path) -> dict[str, str]:
    places = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(file, str) for file in places.values()):
        raise ConvertError(f"{folder / _INDEX}: weight_map is not a table from tensors to files; download it again")
    for file in set(places.values()):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ConvertError(f"{folder / _INDEX}: '{printable(file)}' is not the name of a safetensors file")
    return places


def _without_index(folder: Path) -> list[str]:
    if (folder / "model.safetensors").exists():
        return ["model.safetensors"]
    if found := sorted(path.name for path in folder.glob("model-*-of-*.safetensors")):
        return found
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if others and all(map(_CARD.search, others)):
        return sorted(others, key=lambda file: (_card(file), file))
    if others:
        raise ConvertError(
            f"{folder}: has {others[0]} but no model.safetensors; give a model folder as saved by transformers"
        )
    if pickles := sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern)):
        raise ConvertError(
            f"{folder}: its weights are only in {pickles[0]}, a pickle, which can run code; save the model as "
            "safetensors (transformers: save_pretrained)"
        )
    raise ConvertError(f"{folder}: no *.safetensors file; download the model's weights into it")

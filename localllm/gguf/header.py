"""Reads the header of one GGUF shard: version, metadata, and the location of every tensor.

The file is untrusted: every count, length and offset is compared with the file size before memory is allocated or a
loop runs, so a damaged file can only cause a `GGUFError`. The header is copied into memory piece by piece, and strings
are decoded from the copy, so a file that shrinks later does no harm.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm import quant
from localllm.base.printable import printable
from localllm.gguf import layout
from localllm.gguf.layout import GGUFError
from localllm.gguf.strings import StringArray, decode, scan_strings

ReadInto = Callable[[memoryview, int, str], None]  # (view to fill, offset, field for the error)
Stored = bool | str | np.generic | NDArray[Any] | StringArray

_PIECE = 1 << 18  # size of the first copy in bytes; each further copy doubles
_STRING = 24  # assumed maximum mean size of a string in a vocabulary or its merges, in bytes, including the length
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_SMALLEST_KEY = 8 + 1 + 4 + 1  # minimum size of a key in bytes: length, one letter, type, a value of one byte
_SMALLEST_TENSOR = 8 + 1 + 4 + 8 + 4 + 8  # of a tensor: length, one letter, dimensions, one size, type, offset


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The location of a tensor: `shape` is row-major, `offset` is in bytes from the start of the file."""

    name: str
    format: str
    shape: tuple[int, ...]
    row_bytes: int
    nbytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class Header:
    version: int
    metadata: dict[str, Stored]
    tensors: tuple[TensorInfo, ...]  # in file order


class _Cursor:
    """A position in the header that moves forward. Every read names the field, for error messages."""

    def __init__(self, path: Path, size: int, read: ReadInto) -> None:
        self.path = path
        self.size = size  # size of the file
        self.position = 0
        self.end = min(size, layout.MAX_HEAD_BYTES)
        self.data = mmap.mmap(-1, self.end, **_PRIVATE)  # pages take memory only once written
        self.copied = 0  # bytes of the header copied to `data` so far
        self._read = read
        self.strings_left = layout.MAX_STRINGS

    def error(self, field: str, problem: str) -> GGUFError:
        return GGUFError(self.path, field, problem)

    @property
    def ends(self) -> str:
        """The reason why no data can be read after `end`."""
        if self.end < self.size:
            return f"the header may take at most {self.end} bytes; the file is damaged"
        return f"the file ends at {self.end}; it is truncated or damaged: download it again"

    def skip(self, size: int, field: str) -> int:
        """Skip `size` bytes and return their start position."""
        if size > self.end - self.position:
            raise self.error(field, f"needs {size} bytes at offset {self.position}, but {self.ends}")
        start = self.position
        self.position += size
        self.copy(self.position, field)
        return start

    def copy(self, stop: int, field: str) -> None:
        """Copy the header to memory at least up to `stop`, or up to the end of the file."""
        if stop <= self.copied:
            return
        stop = min(max(stop, 2 * self.copied, _PIECE), self.end)
        with memoryview(self.data) as view, view[self.copied : stop] as target:
            self._read(target, self.copied, field)
        self.copied = stop

    def u32(self, field: str) -> int:
        value: int = _U32.unpack_from(self.data, self.skip(4, field))[0]
        return value

    def u64(self, field: str) -> int:
        value: int = _U64.unpack_from(self.data, self.skip(8, field))[0]
        return value

    def count(self, field: str, smallest: int, limit: int | None = None) -> int:
        """Read a count of items that each take at least `smallest` bytes."""
        value = self.u64(field)
        if limit is not None and value > limit:
            raise self.error(field, f"{value} found; supported: at most {limit}")
        if value * smallest > self.end - self.position:
            raise self.error(
                field, f"{value} found, which need {value * smallest} bytes at offset {self.position}, but {self.ends}"
            )
        return value

    def string(self, field: str) -> str:
        size = self.u64(field)
        start = self.skip(size, field)
        return decode(self.data[start : start + size])

    def name(self, field: str, limit: int) -> str:
        """Read a name: UTF-8, not empty, and of at most `limit` bytes."""
        size = self.u64(field)
        if not 1 <= size <= limit:
            raise self.error(field, f"length {size} found; supported: 1 to {limit} bytes")
        start = self.skip(size, field)
        text = decode(self.data[start : start + size])
        if any("\udc80" <= c <= "\udcff" for c in text):
            raise self.error(field, f"'{printable(text)}' found, which is not UTF-8")
        return text


def read_header(path: Path, size: int, read: ReadInto) -> Header:
    """Read and validate the header of a file of `size` bytes. `path` is for messages. Raise
    GGUFError for any problem."""
    cursor = _Cursor(path, size, read)
    version = _version(cursor)
    tensor_count = cursor.count("tensor count", _SMALLEST_TENSOR, layout.MAX_TENSORS)
    key_count = cursor.count("key count", _SMALLEST_KEY, layout.MAX_KEYS)
    metadata: dict[str, Stored] = {}
    for i in range(key_count):
        key = cursor.name(f"name of key {i}", layout.MAX_KEY_BYTES)
        field = f"key '{printable(key)}'"
        if key in metadata:
            raise cursor.error(field, "found twice; a key may appear once")
        metadata[key] = _value(cursor, field)
    tensors = _tensors(cursor, tensor_count, _alignment(cursor, metadata))
    return Header(version, metadata, tensors)


def _version(cursor: _Cursor) -> int:
    start = cursor.skip(4, "magic")
    magic = cursor.data[start : start + 4]
    if magic != layout.MAGIC:
        raise cursor.error("magic", f"{magic!r} found; supported: {layout.MAGIC!r}; this is not a GGUF file")
    version = cursor.u32("version")
    if version and not version & 0xFFFF:
        raise cursor.error(
            "version", f"{version:#010x} found: a big-endian file; supported: little-endian; convert the model again"
        )
    if version not in layout.VERSIONS:
        supported = " and ".join(map(str, layout.VERSIONS))
        raise cursor.error(
            "version", f"{version} found; supported: {supported}; convert the model again with a current converter"
        )
    return version


def _value(cursor: _Cursor, field: str) -> Stored:
    kind = cursor.u32(field)
    if kind == layout.ARRAY:
        return _array(cursor, field)
    if kind == layout.STRING:
        return cursor.string(field)
    if kind == layout.BOOL:
        return cursor.data[cursor.skip(1, field)] != 0
    if kind in layout.NUMBER_TYPES:
        number: np.generic = _numbers(cursor, layout.NUMBER_TYPES[kind], 1, field)[0]
        return number
    raise cursor.error(field, f"value type {kind} found; supported: {_types(layout.TYPE_NAMES)}")


def _array(cursor: _Cursor, field: str) -> Stored:
    kind = cursor.u32(field)
    if kind == layout.STRING:
        count = cursor.count(f"{field}: array length", 8, cursor.strings_left)
        cursor.strings_left -= count
        cursor.copy(cursor.position + _STRING * count, field)  # nearly always enough; the exact size needs a scan
        bounds = scan_strings(cursor.data, cursor.position, cursor.copied, count)
        while isinstance(bounds, int) and cursor.copied < cursor.end:
            cursor.copy(cursor.copied + 1, field)
            bounds = scan_strings(cursor.data, cursor.position, cursor.copied, count)
        if isinstance(bounds, int):
            raise cursor.error(f"{field}[{bounds}]", f"does not fit: {cursor.ends}")
        cursor.position = int(bounds[-1])
        return StringArray(cursor.data, bounds)
    if kind == layout.BOOL:
        count = cursor.count(f"{field}: array length", 1)
        flags: NDArray[np.bool_] = _numbers(cursor, np.dtype("u1"), count, field) != 0
        flags.flags.writeable = False
        return flags
    if kind in layout.NUMBER_TYPES:
        dtype = layout.NUMBER_TYPES[kind]
        count = cursor.count(f"{field}: array length", dtype.itemsize)
        return _numbers(cursor, dtype, count, field)
    inner = {k: name for k, name in layout.TYPE_NAMES.items() if k != layout.ARRAY}  # as in llama.cpp, no nested arrays
    raise cursor.error(field, f"array of value type {kind} found; supported: arrays of {_types(inner)}")


def _numbers(cursor: _Cursor, dtype: np.dtype[Any], count: int, field: str) -> NDArray[Any]:
    start = cursor.skip(count * dtype.itemsize, field)
    return np.frombuffer(cursor.data[start : cursor.position], dtype)  # a copy: numbers in the file are unaligned


def _types(names: dict[int, str]) -> str:
    return ", ".join(f"{k} {names[k]}" for k in sorted(names))


def _alignment(cursor: _Cursor, metadata: dict[str, Stored]) -> int:
    value = metadata.get(layout.ALIGNMENT_KEY, np.uint32(layout.DEFAULT_ALIGNMENT))
    field = f"key '{layout.ALIGNMENT_KEY}'"
    if not isinstance(value, np.uint32):
        raise cursor.error(field, f"{type(value).__name__} found; supported: uint32")
    problem = layout.alignment_problem(int(value))
    if problem:
        raise cursor.error(field, problem)
    return int(value)


def _tensors(cursor: _Cursor, count: int, alignment: int) -> tuple[TensorInfo, ...]:
    infos: dict[str, TensorInfo] = {}
    for i in range(count):
        info = _tensor(cursor, i)
        if info.name in infos:
            raise cursor.error(f"tensor '{printable(info.name)}'", "found twice; a name may appear once")
        infos[info.name] = info
    begin = layout.aligned(cursor.position, alignment)  # tensor offsets are relative to this position
    placed = tuple(_place(cursor, info, begin, alignment) for info in infos.values())
    previous: TensorInfo | None = None
    for info in sorted(placed, key=lambda info: info.offset):
        if previous and info.offset < previous.offset + previous.nbytes:
            raise cursor.error(
                f"tensor '{printable(info.name)}'",
                f"offset {info.offset - begin} lies inside tensor '{printable(previous.name)}', "
                f"which takes bytes {previous.offset - begin} to {previous.offset - begin + previous.nbytes}",
            )
        previous = info
    return placed


def _tensor(cursor: _Cursor, index: int) -> TensorInfo:
    """Read the next tensor's description; its offset is still relative to the start of the data."""
    name = cursor.name(f"name of tensor {index}", layout.MAX_NAME_BYTES)
    field = f"tensor '{printable(name)}'"
    dimensions = cursor.u32(field)
    if not 1 <= dimensions <= layout.MAX_DIMENSIONS:
        raise cursor.error(field, f"{dimensions} dimensions; supported: 1 to {layout.MAX_DIMENSIONS}")
    shape = tuple(cursor.u64(field) for _ in range(dimensions))[::-1]  # GGUF stores dimensions innermost first
    type_id = cursor.u32(field)
    try:
        fmt = quant.by_type_id(type_id)
    except KeyError:
        known = ", ".join(quant.FORMATS)
        raise cursor.error(field, f"tensor type {type_id} found, which is unsupported; supported: {known}") from None
    offset = cursor.u64(field)
    problem = layout.shape_problem(shape, fmt)
    if problem:
        raise cursor.error(field, problem)
    row_bytes, nbytes = layout.tensor_bytes(shape, fmt)
    return TensorInfo(name, fmt.name, shape, row_bytes, nbytes, offset)


def _place(cursor: _Cursor, info: TensorInfo, begin: int, alignment: int) -> TensorInfo:
    field = f"tensor '{printable(info.name)}'"
    if info.offset % alignment:
        raise cursor.error(field, f"offset {info.offset} is not a multiple of the file's alignment of {alignment}")
    if begin + info.offset + info.nbytes > cursor.size:
        raise cursor.error(
            field,
            f"{info.nbytes} bytes at offset {info.offset} of the data, which begins at {begin}, "
            f"do not fit: the file ends at {cursor.size}; it is truncated or damaged: download it again",
        )
    offset = begin + info.offset
    return TensorInfo(info.name, info.format, info.shape, info.row_bytes, info.nbytes, offset)

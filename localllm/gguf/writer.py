"""Writes GGUF version 3: one file, with tensors streamed in chunks, through `localllm.base.files.outputs`.

The writer follows the reader's rules and llama.cpp's order: tensors without gaps, each padded to the alignment.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from localllm import quant
from localllm.base.files.outputs import new_file
from localllm.base.printable import printable
from localllm.gguf import layout
from localllm.gguf.layout import GGUFError
from localllm.gguf.strings import StringArray, encode

Chunk = bytes | bytearray | memoryview | NDArray[np.uint8]
Chunks = Chunk | Iterable[Chunk]
Metadata = Mapping[str, bool | int | float | str | np.generic | NDArray[Any] | Sequence[str]]

_TYPE_IDS = {dtype: kind for kind, dtype in layout.NUMBER_TYPES.items()}
_VERSION = 3


class Digest(Protocol):
    """The interface of `hashlib.sha256()`."""

    def update(self, data: Any, /) -> None: ...


class NewTensor(NamedTuple):
    """A tensor to write. `shape` is row-major. `data` is all its bytes, an iterable of chunks in order, or a function
    that returns either on demand, so that a model larger than memory can be written.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    data: Chunks | Callable[[], Chunks]


def write_gguf(
    path: str | os.PathLike[str],
    metadata: Metadata,
    tensors: Iterable[NewTensor | tuple[str, str, tuple[int, ...], Chunks | Callable[[], Chunks]]],
    *,
    alignment: int | None = None,
    overwrite: bool = False,
    digest: Digest | None = None,
) -> None:
    """Write a GGUF, which is durable on return. On any error, no new file is left and an old file is kept.

    An int is stored as uint32 and a float as float32; a NumPy scalar or one-dimensional array keeps its type; a
    sequence of str is an array of strings. `alignment` sets general.alignment (default: the metadata's, or 32).
    `digest` receives every byte of the file. Raises GGUFError for values that cannot be stored, and for a tensor whose
    data does not match its shape; OutputError for an existing file without `overwrite`, and if the disk fails.
    """
    target = Path(path)
    if alignment is not None:
        metadata = {**metadata, layout.ALIGNMENT_KEY: np.uint32(min(max(alignment, 0), 0xFFFFFFFF))}
    align = _alignment(target, metadata)
    new = [NewTensor(*tensor) for tensor in tensors]
    head, sizes = _head(target, metadata, new, align)
    with new_file(target, overwrite) as file:

        def write(data: bytes | memoryview) -> None:
            file.write(data)
            if digest is not None:
                digest.update(data)

        write(head)
        if new:
            write(bytes(-len(head) % align))
        for tensor, size in zip(new, sizes, strict=True):
            _write_tensor(target, write, tensor, size)
            write(bytes(-size % align))


def file_size(path: str | os.PathLike[str], metadata: Metadata, tensors: Iterable[NewTensor]) -> int:
    """Return the size in bytes of the GGUF that `write_gguf` would write; reads no tensor data."""
    target = Path(path)
    align = _alignment(target, metadata)
    head, sizes = _head(target, metadata, list(tensors), align)
    return (layout.aligned(len(head), align) if sizes else len(head)) + sum(layout.aligned(s, align) for s in sizes)


def _alignment(path: Path, metadata: Metadata) -> int:
    value = metadata.get(layout.ALIGNMENT_KEY, layout.DEFAULT_ALIGNMENT)
    if isinstance(value, np.uint32):
        value = int(value)
    if type(value) is not int:
        raise GGUFError(path, f"key '{layout.ALIGNMENT_KEY}'", f"{type(value).__name__} given; supported: uint32")
    problem = layout.alignment_problem(value)
    if problem:
        raise GGUFError(path, f"key '{layout.ALIGNMENT_KEY}'", problem)
    return value


def _head(path: Path, metadata: Metadata, tensors: list[NewTensor], alignment: int) -> tuple[bytes, list[int]]:
    """Return everything before the tensor data, unpadded, and the size in bytes of each tensor."""
    head = bytearray(layout.MAGIC + struct.pack("<IQQ", _VERSION, len(tensors), len(metadata)))
    strings = sum(len(value) for value in metadata.values() if isinstance(value, list | tuple | StringArray))
    for count, limit, what in (
        (len(tensors), layout.MAX_TENSORS, "tensors"),
        (len(metadata), layout.MAX_KEYS, "keys"),
        (strings, layout.MAX_STRINGS, "strings in arrays"),
    ):
        if count > limit:
            raise GGUFError(path, "counts", f"{count} {what} given; supported: at most {limit}")
    for key, value in metadata.items():
        field = f"key '{printable(key)}'"
        head += _name(path, field, key, layout.MAX_KEY_BYTES)
        head += _value(path, field, value)
    names: set[str] = set()
    sizes: list[int] = []
    offset = 0
    for tensor in tensors:
        field = f"tensor '{printable(tensor.name)}'"
        head += _name(path, field, tensor.name, layout.MAX_NAME_BYTES)
        if tensor.name in names:
            raise GGUFError(path, field, "given twice; a name may appear once")
        names.add(tensor.name)
        if tensor.format not in quant.FORMATS:
            known = ", ".join(quant.FORMATS)
            raise GGUFError(path, field, f"format '{printable(tensor.format)}' is unknown; supported: {known}")
        fmt = quant.FORMATS[tensor.format]
        problem = layout.shape_problem(tensor.shape, fmt)
        if problem:
            raise GGUFError(path, field, problem)
        dimensions = len(tensor.shape)
        head += struct.pack(f"<I{dimensions}QIQ", dimensions, *tensor.shape[::-1], fmt.type_id, offset)
        sizes.append(layout.tensor_bytes(tensor.shape, fmt)[1])
        offset += layout.aligned(sizes[-1], alignment)
    if len(head) > layout.MAX_HEAD_BYTES:
        raise GGUFError(path, "metadata", f"takes {len(head)} bytes; supported: at most {layout.MAX_HEAD_BYTES}")
    return bytes(head), sizes


def _name(path: Path, field: str, name: str, limit: int) -> bytes:
    data = _text(path, field, name)
    if not 1 <= len(data) - 8 <= limit:
        raise GGUFError(path, field, f"a name of {len(data) - 8} bytes; supported: 1 to {limit}")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise GGUFError(path, field, "the name is not UTF-8") from None
    return data


def _text(path: Path, field: str, text: str) -> bytes:
    try:
        data = encode(text)
    except UnicodeEncodeError as error:
        raise GGUFError(path, field, f"'{printable(text)}' cannot be stored as UTF-8: {error.reason}") from None
    return struct.pack("<Q", len(data)) + data


def _value(path: Path, field: str, value: object) -> bytes:
    """Return the GGUF value type and the value to store for a key."""
    match value:
        case bool() | np.bool_():
            return struct.pack("<I?", layout.BOOL, bool(value))
        case str():
            return struct.pack("<I", layout.STRING) + _text(path, field, value)
        case np.generic():
            return struct.pack("<I", _type_id(path, field, value.dtype)) + _little(value)
        case int():
            if not 0 <= value < 1 << 32:
                raise GGUFError(path, field, f"{value} does not fit uint32; give it as np.int32, np.int64 or np.uint64")
            return struct.pack("<II", _TYPE_IDS[np.dtype("<u4")], value)
        case float():
            try:
                return struct.pack("<If", _TYPE_IDS[np.dtype("<f4")], value)
            except OverflowError:
                raise GGUFError(path, field, f"{value} does not fit float32; give it as np.float64") from None
        case np.ndarray():
            return _array(path, field, value)
        case StringArray():
            return struct.pack("<IIQ", layout.ARRAY, layout.STRING, len(value)) + value.stored()
        case list() | tuple() if all(isinstance(item, str) for item in value):
            items = b"".join(_text(path, field, item) for item in value)
            return struct.pack("<IIQ", layout.ARRAY, layout.STRING, len(value)) + items
    raise GGUFError(
        path,
        field,
        f"{type(value).__name__} cannot be stored; supported: bool, int, float, str, NumPy numbers, "
        "one-dimensional NumPy arrays of numbers, lists of str",
    )


def _array(path: Path, field: str, value: NDArray[Any]) -> bytes:
    if value.ndim != 1:
        raise GGUFError(path, field, f"array of shape {value.shape}; supported: one dimension")
    kind = layout.BOOL if value.dtype == np.bool_ else _type_id(path, field, value.dtype)
    return struct.pack("<IIQ", layout.ARRAY, kind, len(value)) + _little(value)


def _type_id(path: Path, field: str, dtype: np.dtype[Any]) -> int:
    try:
        return _TYPE_IDS[dtype.newbyteorder("<")]
    except KeyError:
        known = ", ".join(t.name for t in _TYPE_IDS)
        raise GGUFError(path, field, f"{dtype} cannot be stored; supported: bool, {known}") from None


def _little(value: np.generic | NDArray[Any]) -> bytes:
    return value.astype(value.dtype.newbyteorder("<")).tobytes()


def _write_tensor(path: Path, write: Callable[[memoryview], None], tensor: NewTensor, size: int) -> None:
    field = f"tensor '{printable(tensor.name)}'"
    written = 0
    for view in _chunks(path, field, tensor.data() if callable(tensor.data) else tensor.data):
        written += len(view)
        if written > size:
            break
        write(view)
    if written != size:
        more = "at least " if written > size else ""
        raise GGUFError(
            path, field, f"{tensor.format} {tensor.shape} takes {size} bytes, but its data has {more}{written}"
        )


def _chunks(path: Path, field: str, data: Chunks) -> Iterator[memoryview]:
    """Yield flat views of the bytes to write."""
    chunks: Iterable[Chunk] = (data,) if isinstance(data, bytes | bytearray | memoryview | np.ndarray) else data
    for chunk in chunks:
        array = chunk if isinstance(chunk, np.ndarray) else np.frombuffer(chunk, np.uint8)
        if array.dtype != np.uint8:
            raise GGUFError(path, field, f"data of type {array.dtype}; supported: uint8 (use .view(np.uint8)) or bytes")
        yield np.ascontiguousarray(array).reshape(-1).data

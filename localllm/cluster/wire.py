"""Messages between stages, and their bytes: a fixed header, integers, and raw arrays. Nothing is unpickled.

    header   magic, version, kind, number of integers, number of arrays, request number, length of the message
    integers int64 each
    arrays   each with a dtype code, its dimensions and its values, padded to 8 bytes

`decode` treats its input as hostile: it checks every size before it uses it, and returns views into the buffer.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.cluster.errors import MessageError
from localllm.plan import F32, Batch

VERSION = 2
MOST_INTEGERS, MOST_ARRAYS = 16, 250
_MAGIC = b"LLMS"
_HEADER = struct.Struct("<4sBBBBQQ")
_ARRAY = struct.Struct("<BB6xQQ")
_DTYPES = tuple(np.dtype(name) for name in ("<f4", "<i4", "u1", "<i8", "<f8"))
_ALIGNMENT = 8


class Kind(IntEnum):
    """What a message asks for; a RESULT or an ERROR answers it."""

    HELLO = 1  # check that the stages fit together, and describe each
    STEP = 2
    DRAFT = 3
    VALUE = 4
    COPY = 5  # has no answer
    READ = 6
    WRITE = 7
    BANDWIDTH = 8
    RESULT = 9
    ERROR = 10
    PROMPT = 11  # evaluate a prompt, and send its cache blocks (`distributed/prompts.py`)
    DROP = 12  # the prompt is no longer wanted; has no answer


@dataclass(slots=True)
class Message:
    """A message. `number` is the front's number of the request, which the answer repeats."""

    kind: Kind
    number: int
    integers: tuple[int, ...] = ()
    arrays: tuple[NDArray[Any], ...] = ()


def encode(message: Message) -> bytes:
    """Return a message as bytes."""
    parts: list[Any] = [b"", struct.pack(f"<{len(message.integers)}q", *message.integers)]
    for array in message.arrays:
        code = _DTYPES.index(array.dtype)
        assert 1 <= array.ndim <= 2, f"arrays have one or two dimensions, found {array.shape}"
        parts.append(_ARRAY.pack(code, array.ndim, *array.shape, *([0] * (2 - array.ndim))))
        parts.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        parts.append(bytes(-array.nbytes % _ALIGNMENT))
    assert len(message.integers) <= MOST_INTEGERS, "the message has too many integers"
    assert len(message.arrays) <= MOST_ARRAYS, "the message has too many arrays"
    length = _HEADER.size + sum(map(len, parts))
    counts = len(message.integers), len(message.arrays)
    parts[0] = _HEADER.pack(_MAGIC, VERSION, message.kind, *counts, message.number, length)
    return b"".join(parts)


def decode(data: bytes | memoryview) -> Message:
    """Return the message in `data`, with arrays that are read-only views. Raises MessageError if it is damaged."""
    view = memoryview(data).toreadonly()
    if len(view) < _HEADER.size:
        raise MessageError(f"message: {len(view)} bytes are shorter than a header")
    magic, version, kind, integer_count, array_count, number, length = _HEADER.unpack_from(view)
    if magic != _MAGIC or version != VERSION:
        raise MessageError("message: another program or version sent it; use the same version on every machine")
    if kind not in Kind.__members__.values() or integer_count > MOST_INTEGERS or array_count > MOST_ARRAYS:
        raise MessageError(f"message: unknown kind {kind}, or too many parts ({integer_count}, {array_count})")
    if length != len(view):
        raise MessageError(f"message: {length} bytes announced, {len(view)} received")
    at = _HEADER.size + 8 * integer_count
    if at > length:
        raise MessageError("message: ends within its integers")
    integers = struct.unpack_from(f"<{integer_count}q", view, _HEADER.size)
    arrays = []
    for _ in range(array_count):
        array, at = _array(view, at)
        arrays.append(array)
    if at != length:
        raise MessageError(f"message: {length - at} bytes follow its arrays")
    return Message(Kind(kind), number, integers, tuple(arrays))


def _array(view: memoryview, at: int) -> tuple[NDArray[Any], int]:
    """Return the array that begins at `at`, and where the next one begins."""
    if at + _ARRAY.size > len(view):
        raise MessageError("message: ends within the description of an array")
    code, ndim, *dimensions = _ARRAY.unpack_from(view, at)
    if code >= len(_DTYPES) or ndim not in (1, 2) or (ndim == 1 and dimensions[1]):
        raise MessageError(f"message: an array has dtype {code} and {ndim} dimensions")
    at, dtype, shape = at + _ARRAY.size, _DTYPES[code], tuple(dimensions[:ndim])
    size = prod(shape) * dtype.itemsize  # exact: Python integers do not overflow
    if size > len(view) - at or max(shape) >= 1 << 40:
        raise MessageError(f"message: an array of shape {shape} does not fit in {len(view)} bytes")
    stop = at + size
    array = np.frombuffer(view[at:stop], dtype).reshape(shape) if size else np.empty(shape, dtype)
    return array, min(stop + -size % _ALIGNMENT, len(view) + 1)


# -- batches ---------------------------------------------------------------------------------------------------------

_VECTORS = ("tokens", "positions", "slots", "sequence")
_FURTHER = (("window_slots", "window_tables"), ("axes",), ("span_ends",))  # optional arrays
_TABLES = ("tables", "window_tables", "axes")  # arrays of two dimensions


def batch_parts(batch: Batch) -> int:
    """Return which optional arrays a batch has, one bit each."""
    given = batch.window_slots, batch.axes, batch.span_ends
    return sum(1 << bit for bit, array in enumerate(given) if array is not None)


def batch_arrays(batch: Batch) -> tuple[NDArray[Any], ...]:
    """Return the arrays of a batch: without histories and media embeddings, which only the first stage reads."""
    assert batch.borders is None, "encoder-decoder models are not split"
    arrays = [batch.tokens, batch.positions, batch.slots, batch.sequence, batch.tables, batch.logit_rows]
    further = batch.window_slots, batch.window_tables, batch.axes, batch.span_ends
    return (*arrays, *(array for array in further if array is not None))


def batch_of(arrays: tuple[NDArray[Any], ...], parts: int) -> tuple[Batch, tuple[NDArray[Any], ...]]:
    """Return the batch at the beginning of a message's arrays, and the other arrays. `parts`: see `batch_parts`.

    The executable checks shapes and numbers (`backends.checks`); this function checks dtypes and dimensions.
    """
    names = [*_VECTORS, "tables", "logit_rows"]
    names += [name for bit, further in enumerate(_FURTHER) if parts >> bit & 1 for name in further]
    own = arrays[: len(names)]
    if parts >> len(_FURTHER) or len(own) < len(names) or any(array.dtype != np.int32 for array in own):
        raise MessageError(f"message: a batch needs {len(names)} arrays of int32")
    if any(array.ndim != (2 if name in _TABLES else 1) for name, array in zip(names, own, strict=True)):
        raise MessageError("message: the arrays of a batch are vectors, and tables of two dimensions")
    tokens, positions, slots, sequence, tables, logit_rows = own[:6]
    batch = Batch(tokens, positions, slots, sequence, tables, logit_rows)
    for name, array in zip(names[6:], own[6:], strict=True):
        setattr(batch, name, array)
    return batch, arrays[len(names) :]


def check_rows(values: tuple[NDArray[Any], ...], shapes: list[tuple[int, int]]) -> tuple[F32, ...]:
    """Return `values`. Raise MessageError unless they are float32 arrays with these shapes."""
    found = [value.shape for value in values]
    if found != shapes or any(value.dtype != np.float32 for value in values):
        raise MessageError(f"message: expected float32 values of shapes {shapes}, found {found}")
    return values


# -- texts -----------------------------------------------------------------------------------------------------------


def text_array(text: str, most: int = 2000) -> NDArray[np.uint8]:
    """Return a text as an array of at most `most` bytes."""
    return np.frombuffer(text.encode("utf-8", "replace")[:most], np.uint8)


def text_of(array: NDArray[Any]) -> str:
    """Return the text of an array; bytes that are not UTF-8 are replaced."""
    return array.astype(np.uint8).tobytes().decode("utf-8", "replace")

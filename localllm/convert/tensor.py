"""Tensors that are read row by row, and their conversions: pick, stack, transpose, repack.

A converted tensor is a function that reads its source tensors on demand. No data is kept, so a model larger than memory
can be converted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm import quant
from localllm.convert.errors import ConvertError

U8 = NDArray[np.uint8]

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "F8_E4M3": 1, "U8": 1}  # unquantized formats
FLOATS = ("F32", "F16", "BF16", "F64")
_MOST_REORDERED = 1 << 30  # bytes; the kernels over pixels of known models have a few MB
# Weights and bytes per block: one byte for the scale, 16 for the codes.
MXFP4_BLOCK, MXFP4_BYTES = 32, 17


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """`rows` rows of `row_bytes` bytes, with all leading dimensions flattened, like `localllm.gguf.GGUFTensor`."""

    name: str
    format: str  # a key of quant.FORMATS; in this package also F8_E4M3 and U8
    shape: tuple[int, ...]  # row-major: (..., rows, columns), or (columns,) for a single row
    row_bytes: int
    _read: Callable[[int, int], U8] = field(repr=False, compare=False)

    @property
    def rows(self) -> int:
        return prod(self.shape[:-1])

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    def read(self, start: int, stop: int) -> U8:
        """Return rows start..stop as a contiguous uint8 array (stop - start, row_bytes). Threads may call it
        concurrently."""
        if not 0 <= start <= stop <= self.rows:
            raise ConvertError(f"{self.name}: rows {start} to {stop} requested; it has {self.rows}")
        if start == stop:
            return np.empty((0, self.row_bytes), np.uint8)
        return np.ascontiguousarray(self._read(start, stop))


def array_tensor(name: str, values: NDArray[np.float32]) -> LazyTensor:
    """Return a small float32 tensor held in memory."""
    rows = np.ascontiguousarray(values, np.float32).reshape(-1, values.shape[-1]).view(np.uint8)
    return LazyTensor(name, "F32", values.shape, rows.shape[1], lambda start, stop: rows[start:stop])


def renamed(tensor: LazyTensor, name: str) -> LazyTensor:
    return replace(tensor, name=name)


def _reshaped(tensor: LazyTensor, *shape: int) -> LazyTensor:
    """Return the values of a small unquantized tensor, which is read as a whole, in another shape."""
    if tensor.format not in ITEM_BYTES:
        raise ConvertError(f"{tensor.name}: is stored as {tensor.format}; expected {', '.join(FLOATS)}")
    size = ITEM_BYTES[tensor.format] * shape[-1]

    def read(start: int, stop: int) -> U8:
        return tensor.read(0, tensor.rows).reshape(-1, size)[start:stop]

    return replace(tensor, shape=shape, row_bytes=size, _read=read)


def rearranged(tensor: LazyTensor, change: Callable[[NDArray[Any]], NDArray[Any]]) -> LazyTensor:
    """Reorder the values of a small unquantized tensor, which is read as a whole. `change` takes and returns arrays of
    values of any type."""
    if tensor.format not in ITEM_BYTES:
        raise ConvertError(f"{tensor.name}: is stored as {tensor.format}; expected {', '.join(FLOATS)}")
    if tensor.nbytes > _MOST_REORDERED:
        raise ConvertError(f"{tensor.name}: has {tensor.nbytes} bytes, more than any model's; download it again")
    dtype = np.dtype(f"u{ITEM_BYTES[tensor.format]}")
    try:
        shape = change(np.broadcast_to(np.zeros((), dtype), tensor.shape)).shape
    except (ValueError, IndexError):
        raise ConvertError(
            f"{tensor.name}: has an unexpected shape, {tensor.shape}; config.json does not fit"
        ) from None

    def read(start: int, stop: int) -> U8:
        values = change(tensor.read(0, tensor.rows).view(dtype).reshape(tensor.shape))
        return np.ascontiguousarray(values).reshape(-1, shape[-1])[start:stop].view(np.uint8)

    return replace(tensor, shape=shape, row_bytes=dtype.itemsize * shape[-1], _read=read)


def flattened(tensor: LazyTensor) -> LazyTensor:
    """Return a small tensor flattened to one vector."""
    return _reshaped(tensor, prod(tensor.shape))


def squeezed(tensor: LazyTensor) -> LazyTensor:
    """Remove the second-last dimension, which must be 1."""
    if len(tensor.shape) < 3 or tensor.shape[-2] != 1:
        raise ConvertError(f"{tensor.name}: is {tensor.shape}; expected (..., 1, n)")
    return replace(tensor, shape=(*tensor.shape[:-2], tensor.shape[-1]))


def column(tensor: LazyTensor) -> LazyTensor:
    """Return the values of a small tensor as a column (n, 1)."""
    return _reshaped(tensor, prod(tensor.shape), 1)


def shaped(tensor: LazyTensor, width: int) -> LazyTensor:
    """Reshape a vector to rows of `width` values."""
    count = tensor.shape[-1]
    if len(tensor.shape) != 1 or not width or count % width:
        raise ConvertError(f"{tensor.name}: is {tensor.shape}; expected a vector of rows of {width} values")
    return _reshaped(tensor, count // width, width)


def scaled(tensor: LazyTensor, factors: NDArray[np.float32]) -> LazyTensor:
    """Multiply every row by its factor, and keep the format."""

    def read(start: int, stop: int) -> U8:
        values = quant.dequantize(tensor.read(start, stop), tensor.format)
        return quant.quantize(values * factors[start:stop, None], tensor.format)

    return replace(tensor, _read=read)


def padded_rows(tensor: LazyTensor, rows: int) -> LazyTensor:
    """Append zero rows to a matrix until it has `rows` rows."""
    _check_matrix(tensor)
    zeros = replace(
        tensor,
        shape=(rows - tensor.shape[0], tensor.shape[1]),
        _read=lambda start, stop: np.zeros((stop - start, tensor.row_bytes), np.uint8),
    )
    return concatenated([tensor, zeros])


def divided(tensor: LazyTensor, count: int) -> LazyTensor:
    """Split a matrix into `count` matrices of equal height."""
    _check_matrix(tensor)
    return replace(tensor, shape=(count, tensor.shape[0] // count, tensor.shape[1]))


def _check_matrix(tensor: LazyTensor) -> None:
    if len(tensor.shape) != 2:
        raise ConvertError(f"{tensor.name}: is {tensor.shape}; expected a matrix")


def _mapped(tensor: LazyTensor, function: Callable[[U8], NDArray[Any]], format: str = "F32") -> LazyTensor:
    """Apply a function from bytes of rows to numbers of 32 bits."""

    def read(start: int, stop: int) -> U8:
        return function(tensor.read(start, stop)).view(np.uint8)

    return replace(tensor, format=format, row_bytes=4 * tensor.shape[-1], _read=read)


def computed(tensor: LazyTensor, function: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> LazyTensor:
    """Apply a function to all values; the result is F32."""
    if tensor.format not in FLOATS:
        raise ConvertError(f"{tensor.name}: is stored as {tensor.format}; expected {', '.join(FLOATS)}")
    return _mapped(tensor, lambda rows: function(quant.dequantize(rows, tensor.format)).astype(np.float32, copy=False))


def multiplied(one: LazyTensor, other: LazyTensor) -> LazyTensor:
    """Multiply two F32 tensors of the same shape elementwise."""
    if (one.shape, one.format) != (other.shape, other.format):
        raise ConvertError(f"{other.name}: is {other.shape}, but {one.name} is {one.shape}; expected the same")

    def read(start: int, stop: int) -> U8:
        return (one.read(start, stop).view(np.float32) * other.read(start, stop).view(np.float32)).view(np.uint8)

    return replace(one, _read=read)


def stacked(tensors: Sequence[LazyTensor]) -> LazyTensor:
    """Stack tensors (rows, columns) to (count, rows, columns), or (n,) to (count, n)."""
    first = tensors[0]
    _check_alike(tensors, lambda shape: shape, "of the same shape and format to form one tensor")
    return replace(first, shape=(len(tensors), *first.shape), _read=_in_turn(tensors))


def _in_turn(tensors: Sequence[LazyTensor]) -> Callable[[int, int], U8]:
    """Return a function that reads the rows of all tensors, one tensor after another."""
    starts = np.cumsum([0, *(tensor.rows for tensor in tensors)])

    def read(start: int, stop: int) -> U8:
        spans = [(max(start - at, 0), min(stop - at, each.rows)) for each, at in zip(tensors, starts, strict=False)]
        parts = [each.read(*span) for each, span in zip(tensors, spans, strict=True) if span[0] < span[1]]
        return np.concatenate(parts)

    return read


def _check_alike(
    tensors: Sequence[LazyTensor], part: Callable[[tuple[int, ...]], object], what: str, matrices: bool = False
) -> None:
    """Raise ConvertError if formats, or these parts of the shapes, differ."""
    first = tensors[0]
    for other in tensors:
        if matrices:
            _check_matrix(other)
        if (part(other.shape), other.format) != (part(first.shape), first.format):
            raise ConvertError(
                f"{other.name}: {other.format} {other.shape}, but {first.name} is {first.format} {first.shape}; "
                f"they must be {what}"
            )


def concatenated(tensors: Sequence[LazyTensor]) -> LazyTensor:
    """Concatenate the rows of matrices of equal width."""
    _check_alike(tensors, lambda shape: shape[1:], "equally wide to form one matrix", matrices=True)
    height = sum(each.shape[0] for each in tensors)
    return replace(tensors[0], shape=(height, tensors[0].shape[1]), _read=_in_turn(tensors))


def side_by_side(tensors: Sequence[LazyTensor]) -> LazyTensor:
    """Concatenate the columns of matrices of equal height."""
    first = tensors[0]
    _check_alike(tensors, lambda shape: shape[:1], "equally high to form one matrix", matrices=True)
    columns, width = sum(each.shape[1] for each in tensors), sum(each.row_bytes for each in tensors)

    def read(start: int, stop: int) -> U8:
        return np.concatenate([each.read(start, stop) for each in tensors], axis=1)

    return replace(first, shape=(first.shape[0], columns), row_bytes=width, _read=read)


def picked(tensor: LazyTensor, index: NDArray[np.int64], rows: int) -> LazyTensor:
    """Pick the rows `index`, counted over all matrices, and return them as matrices of `rows` rows. For a vector, pick
    values."""
    if len(tensor.shape) == 1:
        return picked_columns(tensor, index)

    def read(start: int, stop: int) -> U8:
        wanted = index[start:stop]
        low = int(wanted.min())
        return tensor.read(low, int(wanted.max()) + 1)[wanted - low]

    return replace(tensor, shape=(*tensor.shape[:-2], rows, tensor.shape[-1]), _read=read)


def strided(tensor: LazyTensor, start: int, stop: int, step: int = 1) -> LazyTensor:
    """Pick rows start, start + step, ... of every matrix, or the values at these indices of a vector."""
    height = tensor.shape[-2] if len(tensor.shape) > 1 else tensor.shape[0]
    matrices = prod(tensor.shape[:-2])
    wanted = np.arange(start, min(stop, height), step)
    return picked(tensor, (np.arange(matrices)[:, None] * height + wanted).reshape(-1), len(wanted))


def picked_columns(tensor: LazyTensor, index: NDArray[np.int64]) -> LazyTensor:
    """Pick the columns `index` of every row."""
    size = ITEM_BYTES[tensor.format]

    def read(first: int, last: int) -> U8:
        return tensor.read(first, last).reshape(last - first, -1, size)[:, index].reshape(last - first, -1)

    return replace(tensor, shape=(*tensor.shape[:-1], len(index)), row_bytes=len(index) * size, _read=read)


def transposed(tensor: LazyTensor) -> LazyTensor:
    """Transpose (..., a, b) to (..., b, a). Reading any row of a matrix loads the whole matrix."""
    a, b = tensor.shape[-2:]
    size = ITEM_BYTES[tensor.format]

    def read(start: int, stop: int) -> U8:
        parts = []
        for i in range(start // b, -(-stop // b)):
            matrix = tensor.read(i * a, (i + 1) * a).reshape(a, b, size)
            part = matrix[:, max(start - i * b, 0) : min(stop - i * b, b)].transpose(1, 0, 2)
            parts.append(part.reshape(-1, a * size))
        return np.concatenate(parts)

    return replace(tensor, shape=(*tensor.shape[:-2], b, a), row_bytes=a * size, _read=read)


def alike(one: LazyTensor, other: LazyTensor) -> bool:
    """Return whether two tensors have equal bytes. The comparison stops at the first difference."""
    if (one.shape, one.format) != (other.shape, other.format):
        return False
    step = max(1, (1 << 22) // one.row_bytes)
    starts = range(0, one.rows, step)
    return all(
        np.array_equal(one.read(i, min(i + step, one.rows)), other.read(i, min(i + step, one.rows))) for i in starts
    )


def as_float32(tensor: LazyTensor, offset: float = 0.0) -> LazyTensor:
    """Convert to F32 and add `offset`."""
    if tensor.format == "F32" and not offset:
        return tensor
    return computed(tensor, lambda values: values + np.float32(offset))


def as_int32(tensor: LazyTensor) -> LazyTensor:
    """Convert I64 to I32. Reading raises ConvertError if a value is out of range."""
    if tensor.format == "I32":
        return tensor
    if tensor.format != "I64":
        raise ConvertError(f"{tensor.name}: is stored as {tensor.format}; expected I32 or I64")

    def narrowed(rows: U8) -> NDArray[np.int32]:
        numbers = rows.view(np.int64)
        small = numbers.astype(np.int32)
        if (small != numbers).any():
            raise ConvertError(f"{tensor.name}: holds {numbers[small != numbers][0]}, which does not fit in 32 bits")
        return small

    return _mapped(tensor, narrowed, "I32")


def powers(tensor: LazyTensor) -> LazyTensor:
    """Convert F8_E8M0 to F32. A byte is the exponent of 2 plus 127; 255 is NaN."""
    return _mapped(tensor, lambda rows: _E8M0[rows])


def expanded(tensor: LazyTensor) -> LazyTensor:
    """Dequantize a tensor to F32."""
    return _mapped(tensor, lambda rows: quant.dequantize(rows, tensor.format))


def mxfp4(blocks: LazyTensor, scales: LazyTensor) -> LazyTensor:
    """Repack bytes (..., rows, n, 16) or (..., rows, 16 n) and scales (..., rows, n) to MXFP4 (..., rows, 32 n).

    A byte of the checkpoint holds two neighbouring weights, the first in its low half. A byte of ggml holds weights i
    and i + 16.
    """
    n, half = scales.shape[-1], MXFP4_BLOCK // 2
    joined = blocks.shape == (*scales.shape[:-1], n * half)
    known = blocks.format in ("U8", "I8") and scales.format in ("U8", "F8_E8M0")
    if not known or not (joined or blocks.shape == (*scales.shape, half)):
        raise ConvertError(
            f"{blocks.name}: {blocks.format} {blocks.shape} with scales {scales.format} {scales.shape}; expected "
            "bytes of two codes, and one byte of scale for each 16 of them"
        )
    each = 1 if joined else n  # rows of codes per row of weights

    def read(start: int, stop: int) -> U8:
        codes = blocks.read(start * each, stop * each).reshape(-1, half)  # (blocks, 16)
        weights = np.stack([codes & 15, codes >> 4], axis=-1).reshape(-1, MXFP4_BLOCK)
        packed = weights[:, :16] | weights[:, 16:] << 4
        out = np.concatenate([scales.read(start, stop).reshape(-1, 1), packed], axis=1)
        return out.reshape(stop - start, n * MXFP4_BYTES)

    return LazyTensor(blocks.name, "MXFP4", (*scales.shape[:-1], n * MXFP4_BLOCK), n * MXFP4_BYTES, read)


def scaled_fp8(
    tensor: LazyTensor,
    scales: LazyTensor,
    blocks: tuple[int, int] | None = None,
    places: NDArray[np.int64] | None = None,
) -> LazyTensor:
    """Dequantize FP8 (rows, columns) to F32 with its scales: one, one per row, or one per block.

    `blocks` is the (rows, columns) of a block. If it is missing, the number of scales determines the block size, and
    the last blocks are smaller. `places` (rows) gives the scale row of each weight row, if the scales are not in
    regular blocks.
    """
    rows, width = tensor.shape[-2:]
    values = quant.dequantize(scales.read(0, scales.rows), scales.format).reshape(scales.shape or (1,))
    grid = values.reshape(1, 1) if values.size == 1 else values.reshape(len(values), -1)
    if len(tensor.shape) != 2 or len(grid) > rows or grid.shape[1] > width:
        raise ConvertError(f"{scales.name}: {scales.shape} scales do not divide {tensor.name} {tensor.shape}")
    height, step = (
        told if told and -(-n // told) == parts else _block(n, parts)
        for n, parts, told in zip((rows, width), grid.shape, blocks or (0, 0), strict=True)
    )
    by_column = np.repeat(grid, step, axis=1)[:, :width]

    def read(start: int, stop: int) -> U8:
        numbers = _E4M3[tensor.read(start, stop)]
        which = np.arange(start, stop) // height if places is None else places[start:stop]
        return (numbers * by_column[which]).view(np.uint8)

    return LazyTensor(tensor.name, "F32", tensor.shape, 4 * width, read)


def _block(size: int, parts: int) -> int:
    """Return the block size: 128 if that gives the right number of blocks, else the size of equal blocks."""
    return 128 if -(-size // 128) == parts else -(-size // parts)


def _e4m3() -> NDArray[np.float32]:
    """Return the values of all 256 E4M3 bytes (arXiv:2209.05433): sign, 4 exponent bits (bias 7), 3 mantissa bits.

    0x7F and 0xFF are NaN.
    """
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    values = np.where(code & 128, -size, size)
    values[(code & 127) == 127] = np.nan
    return values.astype(np.float32)


_E4M3 = _e4m3()
_E8M0 = np.append(np.ldexp(np.float32(1), np.arange(-127, 128)), np.float32(np.nan)).astype(np.float32)

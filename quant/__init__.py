"""The block formats of GGUF and their exact conversions, in NumPy and, for searches, Numba.

`FORMATS` lists the supported formats. `dequantize` and `quantize` convert whole rows by format name. They validate
their input and work in chunks, so temporary memory stays small for any tensor.

May import: base (printable, notices, files).
Begin with: table.py (the formats), then formats/q4_q5.py.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from localllm.quant.format import F32, U8, Format, QuantError
from localllm.quant.table import BY_TYPE_ID, CACHE_FORMATS, FORMATS

__all__ = ["CACHE_FORMATS", "FORMATS", "Format", "QuantError", "by_type_id", "dequantize", "quantize", "row_bytes"]

_CHUNK_VALUES = 1 << 17  # values per chunk: temporaries of half a megabyte fit into the L2 cache

_LARGEST_IMPORTANCE = 1e15  # far above real importances, but sums of weighted squares stay finite


def _format(name: str) -> Format:
    try:
        return FORMATS[name]
    except KeyError:
        raise QuantError(f"unknown format {name!r}; known: {', '.join(FORMATS)}") from None


def by_type_id(type_id: int) -> Format:
    """Return the format with this GGUF tensor type number; raise KeyError for an unknown number."""
    return BY_TYPE_ID[type_id]


def row_bytes(name: str, values: int) -> int:
    """Return the size in bytes of a row of `values` values; raise QuantError if they do not fill whole blocks."""
    fmt = _format(name)
    if values < 0 or values % fmt.block_values:
        raise QuantError(f"{name}: a row of {values} values does not fill whole blocks of {fmt.block_values}")
    return values // fmt.block_values * fmt.block_bytes


def dequantize(rows: U8, name: str) -> F32:
    """Dequantize stored rows uint8 (n, bytes) to float32 (n, values), bit-equal to ggml.

    Bytes are not validated: a damaged scale gives infinities or NaN, never an error. Raises QuantError for an unknown
    format, another dtype or shape, or a row that is not a whole number of blocks.
    """
    fmt = _format(name)
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.ndim != 2:
        raise QuantError(f"{name}: dequantize needs a uint8 array (rows, bytes), got {_describe(rows)}")
    if rows.shape[1] % fmt.block_bytes:
        raise QuantError(f"{name}: a row of {rows.shape[1]} bytes is not a multiple of the block of {fmt.block_bytes}")
    blocks = np.ascontiguousarray(rows).reshape(-1, fmt.block_bytes)
    out = np.empty((len(blocks), fmt.block_values), np.float32)
    step = max(1, _CHUNK_VALUES // fmt.block_values)
    with np.errstate(all="ignore"):  # with a damaged scale, infinity times zero is NaN, as in C
        for start in range(0, len(blocks), step):
            out[start : start + step] = fmt.dequantize(blocks[start : start + step])
    return out.reshape(len(rows), rows.shape[1] // fmt.block_bytes * fmt.block_values)


def quantize(x: F32, name: str, importance: F32 | None = None, threads: int = 1) -> U8:
    """Quantize rows float32 (n, values) to stored bytes uint8 (n, bytes), byte-equal to ggml for any number of
    `threads`.

    Two formats deviate, with smaller errors. IQ3_S: ggml misplaces the groups that follow a group of 32 zeros. NVFP4:
    ggml stores scales of 256 to 448 as 448.

    `importance` float32 (values,) is the mean square of the activations of each column (a row of an importance matrix).
    Formats that search for their scales weight errors by importance, as ggml does. Other formats ignore it, as in ggml.

    Raises QuantError for a format that cannot be written, another dtype or shape, values that do not fill whole blocks,
    importance that is negative or not finite, and, in block formats, for NaN, infinity and blocks whose scale is too
    large for f16. F32, F16 and BF16 keep NaN and infinity; F16 rounds larger values to infinity.
    """
    fmt = _format(name)
    if fmt.quantize is None:
        writable = ", ".join(f.name for f in FORMATS.values() if f.quantize)
        raise QuantError(f"{name} cannot be written yet; writable formats: {writable}")
    if not isinstance(x, np.ndarray) or x.dtype != np.float32 or x.ndim != 2:
        raise QuantError(f"{name}: quantize needs a float32 array (rows, values), got {_describe(x)}")
    n, values = x.shape
    out = np.empty((n, row_bytes(name, values)), np.uint8)
    _check_importance(importance, values, name)
    step = max(1, _CHUNK_VALUES // max(1, values))
    write = fmt.quantize

    def convert(start: int) -> None:
        rows = np.ascontiguousarray(x[start : start + step])
        if fmt.block_values > 1 and not np.isfinite(rows).all():
            row = start + int(np.argmin(np.isfinite(rows).all(axis=1)))
            raise QuantError(f"{name}: row {row} holds NaN or infinity; only F32, F16 and BF16 can store them")
        with np.errstate(all="ignore"):  # zero and subnormal blocks divide by zero and are corrected afterwards
            out[start : start + step] = write(rows, importance)

    _for_each(convert, range(0, n, step), threads)
    return out


def _for_each(convert: Callable[[int], None], starts: range, threads: int) -> None:
    """Call `convert` for every start on several threads. If several calls fail, raise the error
    with the first start."""
    if threads <= 1 or len(starts) <= 1:
        for start in starts:
            convert(start)
        return
    with ThreadPoolExecutor(min(threads, len(starts))) as pool:
        for _ in pool.map(convert, starts):
            pass


def _check_importance(importance: F32 | None, values: int, name: str) -> None:
    if importance is None:
        return
    if not isinstance(importance, np.ndarray) or importance.dtype != np.float32 or importance.shape != (values,):
        raise QuantError(f"{name}: importance must be float32 ({values},), got {_describe(importance)}")
    if not ((importance >= 0) & (importance <= _LARGEST_IMPORTANCE)).all():  # false for NaN
        raise QuantError(f"{name}: importance holds NaN, negative numbers or some above {_LARGEST_IMPORTANCE:.0e}")


def _describe(x: object) -> str:
    return f"{x.dtype} {x.shape}" if isinstance(x, np.ndarray) else type(x).__name__

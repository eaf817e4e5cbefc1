"""The layout of weight formats on a device, and the macros of their kernels, by format.

A GGUF block is split so that kernels can read words. The body is a byte range that allows 4-byte reads; the head is the
few remaining bytes. A matrix stores all bodies, row by row, then all heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import BackendError
from localllm.plan import Tensor
from localllm.quant import FORMATS as FILE_FORMATS
from localllm.quant.formats import fp4, iq4
from localllm.quant.formats.grids import grid

PIECE = 32 << 20  # bytes read from the GGUF at a time


@dataclass(frozen=True, slots=True)
class BlockPacking:
    """The block layout of a format on the device, as `unpack.cl` or `plain.cl` reads it."""

    body: tuple[int, int]  # byte range within the GGUF block
    head: tuple[int, int] = (0, 0)
    halves: int = 1  # number of scales per 32 values
    minimum: bool = False
    levels: tuple[int, ...] = ()  # the int8 values that the nibbles index
    points: Callable[[], NDArray[np.uint32]] | None = None  # the codebook, four coordinates per word


def _points(name: str, factor: int, bias: int) -> Callable[[], NDArray[np.uint32]]:
    return lambda: np.ascontiguousarray((grid(name) * factor + bias).astype(np.uint8)).view("<u4").reshape(-1)


def _bytes(levels: NDArray[np.float32]) -> tuple[int, ...]:
    return tuple(int(level) & 255 for level in levels)


_IQ4, _FP4 = _bytes(iq4.LEVELS), _bytes(fp4.LEVELS)

PLAIN = ("F32", "F16", "BF16")
QUANTIZED: dict[str, BlockPacking] = {
    "Q4_0": BlockPacking((2, 18), (0, 2)),
    "Q4_1": BlockPacking((0, 20), minimum=True),
    "Q5_0": BlockPacking((2, 22), (0, 2)),
    "Q5_1": BlockPacking((0, 24), minimum=True),
    "Q8_0": BlockPacking((2, 34), (0, 2)),
    "Q2_K": BlockPacking((0, 84), halves=2, minimum=True),
    "Q3_K": BlockPacking((0, 108), (108, 110), halves=2),
    "Q4_K": BlockPacking((0, 144), minimum=True),
    "Q5_K": BlockPacking((0, 176), minimum=True),
    "Q6_K": BlockPacking((0, 208), (208, 210), halves=2),
    "IQ1_S": BlockPacking((2, 50), (0, 2), points=_points("IQ1S", 8, 128)),
    "IQ1_M": BlockPacking((0, 56), halves=2, points=_points("IQ1S", 8, 128)),
    "IQ2_XXS": BlockPacking((2, 66), (0, 2), points=_points("IQ2XXS", 1, 0)),
    "IQ2_XS": BlockPacking((2, 74), (0, 2), halves=2, points=_points("IQ2XS", 1, 0)),
    "IQ2_S": BlockPacking((2, 82), (0, 2), halves=2, points=_points("IQ2S", 1, 0)),
    "IQ3_XXS": BlockPacking((2, 98), (0, 2), points=_points("IQ3XXS", 1, 0)),
    "IQ3_S": BlockPacking((2, 110), (0, 2), points=_points("IQ3S", 1, 0)),
    "IQ4_NL": BlockPacking((2, 18), (0, 2), levels=_IQ4),
    "IQ4_XS": BlockPacking((0, 136), levels=_IQ4),
    "TQ1_0": BlockPacking((0, 52), (52, 54)),
    "TQ2_0": BlockPacking((0, 64), (64, 66)),
    "MXFP4": BlockPacking((1, 17), (0, 1), levels=_FP4),
    "NVFP4": BlockPacking((0, 36), halves=2, levels=_FP4),
    "Q1_0": BlockPacking((2, 18), (0, 2)),
    "Q2_0": BlockPacking((2, 18), (0, 2)),
}
FORMATS = (*PLAIN, *QUANTIZED)


def check_format(weight: Tensor) -> None:
    """Raise BackendError if the GPU has no kernels for the format of the matrix."""
    if weight.format not in FORMATS:
        raise BackendError(f"{weight.name}: no GPU kernels for {weight.format}; supported: {', '.join(FORMATS)}")


def defines(name: str) -> dict[str, object]:
    """Return the macros for the kernels of a format."""
    if name in PLAIN:
        return {f"FORMAT_{name}": 1}
    packing = QUANTIZED[name]
    found: dict[str, object] = {
        f"FORMAT_{name}": 1, "QUANTIZED": 1, "BLOCK_VALUES": FILE_FORMATS[name].block_values,
        "BODY": packing.body[1] - packing.body[0], "HEAD_BYTES": packing.head[1] - packing.head[0],
        "HALVES": packing.halves, "MINIMUM": int(packing.minimum),
    }  # fmt: skip
    if packing.levels:
        found["LEVELS"] = ", ".join(map(str, packing.levels))
    if packing.points:
        found["POINTS"] = 1
    return found


def tables(name: str) -> str:
    """Return the source of the codebook for the kernels of a format."""
    packing = QUANTIZED.get(name)
    if packing is None or packing.points is None:
        return ""
    points = packing.points()
    return f"TABLE uint points[{len(points)}] = {{{', '.join(f'{int(n)}u' for n in points)}}};\n"


def size_of(weight: Tensor) -> int:
    """Return the bytes of a matrix on the device: as in the GGUF, plus 16, because kernels read past the end."""
    rows = math.prod(weight.shape[:-1])
    fmt = FILE_FORMATS[weight.format]
    return rows * (weight.shape[-1] // fmt.block_values) * fmt.block_bytes + 16


def pieces(weight: Tensor) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Yield (offset, bytes) of a matrix in the device's layout, some rows at a time."""
    rows, fmt = math.prod(weight.shape[:-1]), FILE_FORMATS[weight.format]
    blocks = weight.shape[-1] // fmt.block_values  # blocks per row
    step = max(1, PIECE // max(1, blocks * fmt.block_bytes))
    packing = QUANTIZED.get(weight.format)
    for start in range(0, rows, step):
        data = np.ascontiguousarray(weight.read(start, min(start + step, rows)))
        if packing is None:
            yield start * data.shape[1], data.reshape(-1)
            continue
        found = data.reshape(-1, fmt.block_bytes)
        body, head = packing.body[1] - packing.body[0], packing.head[1] - packing.head[0]
        yield start * blocks * body, np.ascontiguousarray(found[:, slice(*packing.body)]).reshape(-1)
        if head:
            at = rows * blocks * body + start * blocks * head
            yield at, np.ascontiguousarray(found[:, slice(*packing.head)]).reshape(-1)

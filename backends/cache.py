"""The KV cache formats by name, and the NumPy reference of storing and loading a head.

A head is stored as a row of its format, padded with zeros to whole quantization blocks. The 4-bit and 5-bit types first
apply a Hadamard rotation, which spreads outliers over the whole head (QuaRot, Ashkboos et al. 2024). Queries are
rotated too, so dot products with the keys do not change. Rotating the attention output back undoes the rotation of the
values. If keys are in a block format, queries are quantized to int8 with a scale per 32 values, like activations for
quantized weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from localllm.quant import CACHE_FORMATS, Format

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
T = TypeVar("T", np.float32, np.float64)

F32_LARGEST, BFLOAT_LARGEST = float.fromhex("0x1.fffffep127"), float.fromhex("0x1.fep127")
HALF_LARGEST, FP8_LARGEST = 65504.0, 448.0
QUERY_BLOCK = 32


@dataclass(frozen=True, slots=True)
class CacheType:
    """The storage format of a head. Values beyond +-`largest` are clamped; NaN is stored as `largest`."""

    name: str
    format: Format
    largest: float
    rotated: bool = False

    @property
    def blocks(self) -> bool:
        """Whether the format stores integers with a scale per block, not floats."""
        return self.format.block_values > 1

    def padded(self, head_dim: int) -> int:
        size = self.format.block_values
        return -(-head_dim // size) * size

    def head_bytes(self, head_dim: int) -> int:
        """Return the bytes of one head of one token."""
        return self.padded(head_dim) // self.format.block_values * self.format.block_bytes


_LARGEST = {"f32": F32_LARGEST, "bf16": BFLOAT_LARGEST, "fp8": FP8_LARGEST}
_ROTATED = ("q5_1", "q5_0", "q4_1", "q4_0")
CACHE_TYPES: dict[str, CacheType] = {
    name: CacheType(name, format, _LARGEST.get(name, HALF_LARGEST), name in _ROTATED)
    for name, format in CACHE_FORMATS.items()
}


def rotation(head_dim: int) -> int:
    """Return the number of values that are rotated together: the largest power of two that divides `head_dim`."""
    return head_dim & -head_dim


def rotate_heads(x: NDArray[T], head_dim: int) -> NDArray[T]:
    """Apply the Hadamard rotation to every head (..., head_dim). The rotation is its own inverse.

    Butterflies have spans 1, 2, 4, ... Each sum is rounded to x's type, and the last step multiplies by 1 / sqrt(number
    of values rotated together).
    """
    size = rotation(head_dim)
    y, span = x.reshape(-1, size), 1
    while span < size:
        pairs = y.reshape(-1, 2, span)
        y = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).reshape(-1, size)
        span *= 2
    return np.asarray(y * x.dtype.type(size**-0.5)).reshape(x.shape)


def _within(x: F32, largest: float) -> F32:
    limit = np.float32(largest)
    x = np.where(x < limit, x, limit)
    return np.where(x > -limit, x, -limit)


def store(x: F32, type_: CacheType) -> U8:
    """Convert float32 heads (..., head_dim) to stored bytes (..., head_bytes)."""
    head_dim = x.shape[-1]
    x = _within(x, type_.largest)
    if type_.rotated:
        x = _within(rotate_heads(x, head_dim), type_.largest)
    padded = np.zeros((x.size // head_dim, type_.padded(head_dim)), np.float32)
    padded[:, :head_dim] = x.reshape(-1, head_dim)
    assert type_.format.quantize is not None
    with np.errstate(all="ignore"):  # all-zero blocks divide by zero
        rows = type_.format.quantize(padded, None)
    return rows.reshape(*x.shape[:-1], -1)


def load_rows(rows: U8, head_dim: int, type_: CacheType) -> NDArray[np.float64]:
    """Dequantize stored heads (..., head_bytes), still rotated, to float64 (..., head_dim)."""
    blocks = np.ascontiguousarray(rows).reshape(-1, type_.format.block_bytes)
    values = type_.format.dequantize(blocks).astype(np.float64)
    return values.reshape(*rows.shape[:-1], -1)[..., :head_dim]


def query(q: F32, keys: CacheType) -> NDArray[np.float64]:
    """Prepare queries (..., head_dim) for stored keys: rotate them, and for block formats quantize them to int8."""
    head_dim = q.shape[-1]
    if keys.rotated:
        q = rotate_heads(q, head_dim)
    if not keys.blocks:
        return q.astype(np.float64)
    padded = np.zeros((q.size // head_dim, -(-head_dim // QUERY_BLOCK) * QUERY_BLOCK), np.float32)
    padded[:, :head_dim] = q.reshape(-1, head_dim)
    blocks = padded.reshape(-1, QUERY_BLOCK)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        inverse = np.where(largest > 0, np.float32(127) / largest, np.float32(0))
    inverse[inverse >= np.float32(3e38)] = 0
    scale = (largest / np.float32(127)).astype(np.float64)
    rounded = (np.rint(blocks * inverse) * scale).reshape(len(padded), -1)
    return np.asarray(rounded[:, :head_dim].reshape(q.shape))

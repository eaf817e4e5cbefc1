"""Helpers shared by the formats: half-precision scales, bit fields in bytes, and rounding.

A *plane* is the same bit field of every byte: `planes` splits bytes, `join_bits` combines them.
"""

from __future__ import annotations

import numpy as np

from localllm.quant.format import F32, U8, QuantError

HALF_AWAY = np.float32(0.49999997)  # the largest float below one half, so that 0.49999997 does not round up


def half_scale(blocks: U8, at: int) -> F32:
    """Return the half-precision number at byte `at` of every block: float32 (n, 1)."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def half_bytes(d: F32) -> U8:
    """Round scales float32 (n, 1) to stored halves uint8 (n, 2), ties to even; QuantError if one is too large."""
    halves = d.astype("<f2")
    if not np.isfinite(halves).all():
        raise QuantError(
            f"a block scale of {np.abs(d).max():.4g} is above the largest half, 65504: the weights are too big"
        )
    return halves.view(np.uint8)


def planes(q: U8, bits: int) -> U8:
    """Split bytes into fields of `bits` bits, lowest first: uint8 (..., k) -> (..., 8 // bits, k)."""
    count = 8 // bits
    out = np.empty((*q.shape[:-1], count, q.shape[-1]), np.uint8)
    for i in range(count):
        np.right_shift(q, i * bits, out=out[..., i, :])
    out &= (1 << bits) - 1
    return out


def join_bits(q: U8, bits: int) -> U8:
    """Combine fields uint8 (..., 8 // bits, k) into bytes (..., k): the inverse of `planes`. Fields must fit in `bits`
    bits.
    """
    out = q[..., 0, :].copy()
    for i in range(1, 8 // bits):
        out |= q[..., i, :] << (i * bits)
    return out


def bits_of(q: U8) -> U8:
    """Return the bits of every byte, lowest first: uint8 (..., k) -> (..., 8 * k)."""
    return np.unpackbits(q, axis=-1, bitorder="little")


def reciprocal(d: F32) -> F32:
    """Return 1 / d, or 0 where d is zero or so small that 1 / d overflows (such a scale is stored as zero)."""
    r = np.float32(1) / d
    r[~np.isfinite(r)] = 0
    return r


def round_away(x: F32) -> F32:
    """Round to the nearest integer, halves away from zero (C's roundf), as float32; |x| < 2**22."""
    return np.trunc(x + np.copysign(HALF_AWAY, x))


def peak(x: F32) -> F32:
    """Return each block's value of largest magnitude, with sign, the first on ties, never -0: (n, k) -> (n, 1)."""
    return np.take_along_axis(x, np.abs(x).argmax(axis=-1, keepdims=True), axis=-1) + np.float32(0)


def lowest(x: F32) -> F32:
    """Return each block's least value, the first on ties, so that a zero has the same sign as in ggml: (n, k) -> (n,
    1).
    """
    low: F32 = x.min(axis=-1, keepdims=True)
    zero = np.flatnonzero(low == 0)  # -0 and 0 are equal; `min` returns either
    low[zero, 0] = x[zero, x[zero].argmin(axis=-1)]
    return low


def sequential_sum(x: F32) -> F32:
    """Sum the last axis in order, one float32 addition at a time, like a plain C loop: (n, k) -> (n, 1)."""
    return np.add.accumulate(x, axis=-1)[..., -1:]

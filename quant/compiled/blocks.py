"""Processes sixteen blocks at a time, one per lane: loads blocks with their weights, and converts half-precision
values.
"""

from __future__ import annotations

import numpy as np

from localllm.quant.compiled.jit import compiled
from localllm.quant.compiled.simd import LANES, Lanes, absolute, load_lanes, pick, root, splat, store
from localllm.quant.format import F32, U8


@compiled
def take(x: F32, first: int, xt: F32) -> None:
    """Load blocks first ... of x (n, k) into the lanes of xt (k, 16); past the end, repeat the last block."""
    n, k = x.shape
    for lane in range(LANES):
        block = min(first + lane, n - 1)
        for i in range(k):
            xt[i, lane] = x[block, i]


@compiled
def take_importance(importance: F32, first: int, n: int, wt: F32) -> None:
    """Load the importance (blocks in a row, k) for blocks first ... of n into the lanes of wt (k, 16)."""
    columns, k = importance.shape
    for lane in range(LANES):
        block = min(first + lane, n - 1) % columns
        for i in range(k):
            wt[i, lane] = importance[block, i]


@compiled
def square_sum(xt: F32, at: int, size: int) -> Lanes:
    total = splat(np.float32(0))
    for i in range(at, at + size):
        value = load_lanes(xt, i)
        total = total + value * value
    return total


@compiled
def weigh_block(xt: F32, wt: F32, mean: Lanes) -> None:
    """Multiply wt (k, 16) by sqrt(mean + x * x), which combines importance and magnitude."""
    for i in range(len(xt)):
        value = load_lanes(xt, i)
        store(wt, i, load_lanes(wt, i) * root(mean + value * value))


@compiled
def total(wt: F32, at: int, size: int) -> Lanes:
    result = splat(np.float32(0))
    for i in range(at, at + size):
        result = result + load_lanes(wt, i)
    return result


@compiled
def larger(a: Lanes, kept: Lanes) -> Lanes:
    """Return the value of larger magnitude, `kept` on a tie; NaN if any value so far was NaN."""
    return pick((absolute(a) > absolute(kept)) | ~(a == a), a, kept)


@compiled
def half_bits(x: np.float32) -> np.int64:
    """Return the bits of the nearest half-precision value, ties to even."""
    bits = np.int64(np.float32(x).view(np.uint32))
    sign, magnitude = (bits >> 16) & 0x8000, bits & 0x7FFFFFFF
    if magnitude > 0x7F800000:
        half = np.int64(0x7E00)
    elif magnitude < 0x38800000:  # below 2**-14: a multiple of 2**-24
        half = np.int64(np.rint(abs(x) * np.float32(2**24)))
    elif magnitude >= 0x477FF000:
        half = np.int64(0x7C00)
    else:
        half = (magnitude + 0xFFF + ((magnitude >> 13) & 1) - 0x38000000) >> 13
    return sign | half


@compiled
def half_value(bits: np.int64) -> np.float32:
    """Return the value of 16 half-precision bits; it must be finite."""
    exponent, mantissa = (bits >> 10) & 31, bits & 0x3FF
    if exponent == 0:
        value = np.float32(mantissa) * np.float32(2**-24)
    else:
        value = np.uint32((exponent + 112) << 23 | mantissa << 13).view(np.float32)
    return -value if bits & 0x8000 else value


@compiled
def round_halves(d: F32) -> None:
    """Round row 0 of d (1, 16) to half precision; leave NaN and values out of range unchanged."""
    for lane in range(LANES):
        bits = half_bits(d[0, lane])
        if bits & 0x7C00 != 0x7C00:
            d[0, lane] = half_value(bits)


@compiled
def put_half(d: np.float32, row: U8, at: int, worst: np.float32) -> np.float32:
    """Write d in half precision to bytes `at` and `at` + 1. Return the larger of `worst` and |d|; NaN is passed on."""
    bits = half_bits(d)
    row[at] = bits & 255
    row[at + 1] = bits >> 8
    magnitude = abs(d)
    return worst if magnitude <= worst or worst != worst else magnitude

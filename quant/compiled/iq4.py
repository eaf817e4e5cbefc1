"""IQ4_NL and IQ4_XS: 4-bit indices into sixteen unevenly spaced levels.

The call signatures are as in k_quants; the layouts are in quant/formats. The search follows ggml's
(quantize_row_iq4_nl_impl) operation by operation.
"""

from __future__ import annotations

import numpy as np

from localllm.quant.compiled.blocks import larger, put_half, square_sum, take, take_importance, weigh_block
from localllm.quant.compiled.jit import compiled
from localllm.quant.compiled.search import TINY, clamp_level, peak, ratio
from localllm.quant.compiled.simd import LANES, Lanes, absolute, load_lanes, pick, rint, splat, store, store_bytes
from localllm.quant.format import F32, U8

# Midpoints between adjacent levels, and the levels except the lowest one.
BETWEEN = (-115.5, -93.5, -74.0, -57.0, -42.0, -28.5, -16.0, -4.5, 7.0, 19.0, 31.5, 45.5, 61.0, 79.0, 101.0)
LEVELS = (-104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0)
LOWEST = np.float32(-127)


@compiled
def _level(x: Lanes) -> Lanes:
    """Return the level nearest to x; on a tie, the upper one."""
    level = splat(LOWEST)
    for k in range(15):
        level = pick(x >= splat(np.float32(BETWEEN[k])), splat(np.float32(LEVELS[k])), level)
    return level


@compiled
def _index(x: Lanes) -> Lanes:
    """Return the index 0 ... 15 of the level nearest to x."""
    index, one = splat(np.float32(0)), splat(np.float32(1))
    for k in range(15):
        index = pick(x >= splat(np.float32(BETWEEN[k])), index + one, index)
    return index


@compiled
def _scale(xt: F32, wt: F32, at: int) -> Lanes:
    """Return the best of 16 scales for the 32 values at `at`; each maps the peak to near the lowest level."""
    top = peak(xt, at, 32)
    nothing, one = splat(np.float32(0)), splat(np.float32(1))
    scale, best = nothing, nothing
    for attempt in range(-8, 8):  # the first attempt is kept until a later one is better
        inverse = one / (top / splat(-LOWEST)) if attempt == -8 else splat(np.float32(attempt) + LOWEST) / top
        sum_qx = sum_qq = nothing
        for i in range(at, at + 32):
            value, weight = load_lanes(xt, i), load_lanes(wt, i)
            level = _level(inverse * value)
            sum_qx, sum_qq = sum_qx + weight * level * value, sum_qq + weight * level * level
        new = ratio(sum_qx, sum_qq)
        if attempt == -8:
            scale, best = new, new * sum_qx
        else:
            better = (sum_qq > nothing) & (sum_qx * sum_qx > best * sum_qq)
            scale, best = pick(better, new, scale), pick(better, new * sum_qx, best)
    return pick(absolute(top) < splat(TINY), nothing, scale)


@compiled
def _weights(x: F32, importance: F32, first: int, xt: F32, wt: F32) -> None:
    take(x, first, xt)
    if len(importance):
        take_importance(importance, first, len(x), wt)
        weigh_block(xt, wt, square_sum(xt, 0, len(xt)) * splat(np.float32(2 / len(xt))))
    else:
        for i in range(len(xt)):
            store(wt, i, load_lanes(xt, i) * load_lanes(xt, i))


@compiled
def _pack(q: U8, lane: int, row: U8, at: int) -> None:
    for i in range(len(q) // 2):
        j = i // 16 * 32 + i % 16
        row[at + i] = q[j, lane] | q[j + 16, lane] << 4


@compiled
def iq4_nl(x: F32, importance: F32, out: U8) -> np.float32:
    xt, wt, q = np.empty((32, LANES), np.float32), np.empty((32, LANES), np.float32), np.empty((32, LANES), np.uint8)
    d, worst = np.empty((1, LANES), np.float32), np.float32(0)
    for first in range(0, len(x), LANES):
        _weights(x, importance, first, xt, wt)
        scale = _scale(xt, wt, 0)
        inverse = ratio(splat(np.float32(1)), scale)
        for i in range(32):
            store_bytes(q, i, _index(inverse * load_lanes(xt, i)))
        store(d, 0, scale)
        for lane in range(min(LANES, len(x) - first)):
            worst = put_half(d[0, lane], out[first + lane], 0, worst)
            _pack(q, lane, out[first + lane], 2)
    return worst


@compiled
def iq4_xs(x: F32, importance: F32, out: U8) -> np.float32:
    xt, wt, q = np.empty((256, LANES), np.float32), np.empty((256, LANES), np.float32), np.empty((256, LANES), np.uint8)
    scales, s = np.empty((8, LANES), np.float32), np.empty((8, LANES), np.uint8)
    halves, worst = np.empty((1, LANES), np.float32), np.float32(0)
    low, high, middle = splat(np.float32(-32)), splat(np.float32(31)), splat(np.float32(32))
    one = splat(np.float32(1))
    for first in range(0, len(x), LANES):
        _weights(x, importance, first, xt, wt)
        largest = splat(np.float32(0))
        for group in range(8):
            scale = _scale(xt, wt, 32 * group)
            store(scales, group, scale)
            largest = larger(scale, largest)
        d = -largest / middle
        store(halves, 0, d)
        back = ratio(one, d)
        for group in range(8):
            level = clamp_level(rint(back * load_lanes(scales, group)), low, high)
            store_bytes(s, group, level + middle)
            inverse = ratio(one, d * level)
            for i in range(32 * group, 32 * group + 32):
                store_bytes(q, i, _index(inverse * load_lanes(xt, i)))
        for lane in range(min(LANES, len(x) - first)):
            row = out[first + lane]
            worst = put_half(halves[0, lane], row, 0, worst)
            for i in range(2):
                row[2 + i] = 0
                for k in range(4):
                    row[2 + i] |= s[4 * i + k, lane] >> 4 << 2 * k
            for i in range(4):
                row[4 + i] = (s[2 * i, lane] & 15) | (s[2 * i + 1, lane] & 15) << 4
            _pack(q, lane, row, 8)
    return worst

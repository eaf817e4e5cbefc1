"""Q2_K ... Q6_K: super-blocks of 256 values; each group of 16 or 32 has a small integer scale.

Every function quantizes blocks x (n, 256) to out (n, bytes); importance is (blocks in a row, 256), or (0, 256) for
none. The function returns the largest magnitude of the half-precision scales, or NaN if one is NaN. If the magnitude
exceeds 65504, the output is invalid. The layouts are in quant/formats.
"""

from __future__ import annotations

import numpy as np

from localllm.quant.compiled.blocks import (
    larger,
    put_half,
    round_halves,
    square_sum,
    take,
    take_importance,
    total,
    weigh_block,
)
from localllm.quant.compiled.jit import compiled
from localllm.quant.compiled.search import NAN, TINY, affine, clamp_level, descent, positive, symmetric
from localllm.quant.compiled.simd import (
    LANES,
    Lanes,
    absolute,
    least,
    load_lanes,
    most,
    pick,
    rint,
    root,
    splat,
    store,
    store_bytes,
)
from localllm.quant.format import F32, U8


@compiled
def _symmetric_integers(xt: F32, at: int, size: int, d: Lanes, inverse: Lanes, zero: int, q: U8) -> None:
    """Compute a group's integers 0 ... 2 * zero - 1 for its stored scale; keep the integers of the search if the scale
    is 0.
    """
    low, high, middle = splat(np.float32(-zero)), splat(np.float32(zero - 1)), splat(np.float32(zero))
    for i in range(at, at + size):
        value = load_lanes(xt, i)
        level = pick(d == splat(np.float32(0)), rint(inverse * value), rint(value / d))
        store_bytes(q, i, clamp_level(level, low, high) + middle)


@compiled
def _affine_integers(
    xt: F32, at: int, size: int, d: Lanes, m: Lanes, inverse: Lanes, base: Lanes, top: int, q: U8
) -> None:
    """Compute a group's integers 0 ... top for its stored scale and minimum; keep the integers of the search if the
    scale is 0.
    """
    nothing, limit = splat(np.float32(0)), splat(np.float32(top))
    for i in range(at, at + size):
        value = load_lanes(xt, i)
        level = pick(d == nothing, rint(inverse * (value - base)), rint((value + m) / d))
        store_bytes(q, i, clamp_level(level, nothing, limit))


@compiled
def _affine_weights(xt: F32, wt: F32, size: int, weighted: bool) -> None:
    """Compute weights (256, 16) from importance, or from magnitudes only, as ggml does for groups of 32 and of 16."""
    if weighted:
        spread = splat(np.float32(1 / 128 if size == 32 else 1 / 256))
        weigh_block(xt, wt, square_sum(xt, 0, 256) * spread)
        return
    for at in range(0, 256, size):
        mean = root(square_sum(xt, at, size) / splat(np.float32(32))) if size == 32 else splat(np.float32(0))
        for i in range(at, at + size):
            store(wt, i, mean + absolute(load_lanes(xt, i)))


@compiled
def _levels(values: F32, weights: F32, weighted: bool, top: int, levels: F32, half: F32) -> None:
    """Quantize values >= 0 of groups (groups, 16) to integers `levels` up to top, with a shared scale in `half`."""
    nothing, limit = splat(np.float32(0)), splat(np.float32(top))
    if weighted:
        store(half, 0, positive(values, weights, len(values), top, levels))
        return
    largest = nothing
    for group in range(len(values)):
        largest = most(load_lanes(values, group), largest)
    back = pick(largest > nothing, limit / largest, nothing)
    for group in range(len(values)):
        store(levels, group, least(rint(back * load_lanes(values, group)), limit))
    store(half, 0, largest / limit)


@compiled
def _affine_blocks(
    x: F32, importance: F32, first: int, size: int, top: int, scale_top: int, q: U8, s: U8, t: U8, d: F32, m: F32
) -> None:
    """Quantize 16 super-blocks to integers q (256, 16), with scales and minimums.

    Scales s and minimums t are (groups, 16), block scales d and m (1, 16). d and m are representable as halves, unless
    they are too large.
    """
    groups, weighted = 256 // size, len(importance) > 0
    xt, wt, scratch = (
        np.empty((256, LANES), np.float32),
        np.empty((256, LANES), np.float32),
        np.empty((size, LANES), np.float32),
    )
    parts = np.empty((7, groups, LANES), np.float32)
    scales, lows, inverses, bases = parts[0], parts[1], parts[2], parts[3]
    sums, levels, depths = parts[4], parts[5], parts[6]
    take(x, first, xt)
    if weighted:
        take_importance(importance, first, len(x), wt)
    _affine_weights(xt, wt, size, weighted)
    start, step, steps = np.float32(-0.5), np.float32(0.1), 16
    if weighted:
        start, step, steps = np.float32(-0.9), np.float32(0.05), 37
    elif top == 15:
        start, steps = np.float32(-1), 21
    squared = weighted or size == 32
    for group in range(groups):
        scale, low, inverse, base = affine(xt, wt, size * group, size, top, start, step, steps, squared, scratch)
        store(scales, group, scale)
        store(lows, group, -low)
        store(inverses, group, inverse)
        store(bases, group, base)
        store(sums, group, total(wt, size * group, size))
    _levels(scales, sums, weighted, scale_top, levels, d)
    _levels(lows, sums, weighted, scale_top, depths, m)
    round_halves(d)
    round_halves(m)
    for group in range(groups):
        level, depth = load_lanes(levels, group), load_lanes(depths, group)
        store_bytes(s, group, level)
        store_bytes(t, group, depth)
        scale, low = load_lanes(d, 0) * level, load_lanes(m, 0) * depth
        _affine_integers(
            xt, size * group, size, scale, low, load_lanes(inverses, group), load_lanes(bases, group), top, q
        )


@compiled
def q4_k(x: F32, importance: F32, out: U8) -> np.float32:
    return _affine_k(x, importance, out, 15)


@compiled
def q5_k(x: F32, importance: F32, out: U8) -> np.float32:
    return _affine_k(x, importance, out, 31)


@compiled
def _affine_k(x: F32, importance: F32, out: U8, top: int) -> np.float32:
    q, s, t = np.empty((256, LANES), np.uint8), np.empty((8, LANES), np.uint8), np.empty((8, LANES), np.uint8)
    d, m, worst = np.empty((1, LANES), np.float32), np.empty((1, LANES), np.float32), np.float32(0)
    low_at = 16 if top == 15 else 48
    for first in range(0, len(x), LANES):
        _affine_blocks(x, importance, first, 32, top, 63, q, s, t, d, m)
        for lane in range(min(LANES, len(x) - first)):
            row = out[first + lane]
            worst = put_half(d[0, lane], row, 0, worst)
            worst = put_half(m[0, lane], row, 2, worst)
            for j in range(4):
                row[4 + j] = s[j, lane] | s[j + 4, lane] >> 4 << 6
                row[8 + j] = t[j, lane] | t[j + 4, lane] >> 4 << 6
                row[12 + j] = (s[j + 4, lane] & 15) | (t[j + 4, lane] & 15) << 4
            for i in range(128):
                at = i // 32 * 64 + i % 32
                row[low_at + i] = (q[at, lane] & 15) | (q[at + 32, lane] & 15) << 4
            if top == 31:
                for i in range(32):
                    fifth = 0
                    for k in range(8):
                        fifth |= q[32 * k + i, lane] >> 4 << k
                    row[16 + i] = fifth
    return worst


@compiled
def q2_k(x: F32, importance: F32, out: U8) -> np.float32:
    q, s, t = np.empty((256, LANES), np.uint8), np.empty((16, LANES), np.uint8), np.empty((16, LANES), np.uint8)
    d, m, worst = np.empty((1, LANES), np.float32), np.empty((1, LANES), np.float32), np.float32(0)
    for first in range(0, len(x), LANES):
        _affine_blocks(x, importance, first, 16, 3, 15, q, s, t, d, m)
        for lane in range(min(LANES, len(x) - first)):
            row = out[first + lane]
            for group in range(16):
                row[group] = s[group, lane] | t[group, lane] << 4
            pack_pairs(q, lane, row, 16)
            worst = put_half(d[0, lane], row, 80, worst)
            worst = put_half(m[0, lane], row, 82, worst)
    return worst


@compiled
def pack_pairs(q: U8, lane: int, row: U8, at: int) -> None:
    """Pack the low two bits of q (256, .) into 64 bytes: values 32 apart share a byte."""
    for i in range(64):
        j = i // 32 * 128 + i % 32
        low, high = (q[j, lane] & 3) | (q[j + 32, lane] & 3) << 2, (q[j + 64, lane] & 3) | (q[j + 96, lane] & 3) << 2
        row[at + i] = low | high << 4


@compiled
def q3_k(x: F32, importance: F32, out: U8) -> np.float32:
    xt, wt = np.empty((256, LANES), np.float32), np.empty((256, LANES), np.float32)
    q, s = np.empty((256, LANES), np.uint8), np.empty((16, LANES), np.uint8)
    d, worst = np.empty((1, LANES), np.float32), np.float32(0)
    for first in range(0, len(x), LANES):
        take(x, first, xt)
        if len(importance):
            take_importance(importance, first, len(x), wt)
            _q3_k_weighted(xt, wt, q, s, d)
        else:
            _q3_k_plain(xt, wt, q, s, d)
        for lane in range(min(LANES, len(x) - first)):
            row = out[first + lane]
            for i in range(32):
                high = 0
                for k in range(8):
                    high |= q[32 * k + i, lane] >> 2 << k
                row[i] = high
            pack_pairs(q, lane, row, 32)
            for j in range(8):
                row[96 + j] = (s[j, lane] & 15) | (s[j + 8, lane] & 15) << 4
            for j in range(4):
                low = s[j, lane] >> 4 | s[j + 4, lane] >> 4 << 2
                row[104 + j] = low | (s[j + 8, lane] >> 4 | s[j + 12, lane] >> 4 << 2) << 4
            worst = put_half(d[0, lane], row, 108, worst)
    return worst


@compiled
def _q3_k_weighted(xt: F32, wt: F32, q: U8, s: U8, d: F32) -> None:
    parts = np.empty((3, 16, LANES), np.float32)
    scales, inverses, sums = parts[0], parts[1], parts[2]
    weigh_block(xt, wt, square_sum(xt, 0, 256) * splat(np.float32(1 / 128)))
    for group in range(16):
        scale, inverse = symmetric(xt, wt, 16 * group, 16, 4)
        store(scales, group, scale)
        store(inverses, group, inverse)
        store(sums, group, total(wt, 16 * group, 16))
    scale, back = symmetric(scales, sums, 0, 16, 32)
    store(d, 0, scale)
    round_halves(d)
    low, high, middle = splat(np.float32(-32)), splat(np.float32(31)), splat(np.float32(32))
    for group in range(16):
        level = clamp_level(rint(back * load_lanes(scales, group)), low, high)
        store_bytes(s, group, level + middle)
        _symmetric_integers(xt, 16 * group, 16, load_lanes(d, 0) * level, load_lanes(inverses, group), 4, q)


@compiled
def _q3_k_plain(xt: F32, found: F32, q: U8, s: U8, d: F32) -> None:
    """Quantize without importance; `found` (256, 16) is scratch memory for the integers of the search."""
    scales = np.empty((16, LANES), np.float32)
    nothing, largest = splat(np.float32(0)), splat(np.float32(0))
    for group in range(16):
        scale = descent(xt, 16 * group, 16, 4, found)
        store(scales, group, scale)
        largest = larger(scale, largest)
    empty = largest == nothing
    back = splat(np.float32(-32)) / largest
    store(d, 0, pick(empty, nothing, splat(np.float32(1)) / back))
    round_halves(d)
    low, high, middle = splat(np.float32(-32)), splat(np.float32(31)), splat(np.float32(32))
    for group in range(16):
        level = clamp_level(
            rint(back * load_lanes(scales, group)), low, high
        )  # the lowest level for an empty block, as with NaN
        store_bytes(s, group, level + middle)
        scale = load_lanes(d, 0) * level
        for i in range(16 * group, 16 * group + 16):
            new = clamp_level(rint(load_lanes(xt, i) / scale), splat(np.float32(-4)), splat(np.float32(3))) + splat(
                np.float32(4)
            )
            store_bytes(q, i, pick(scale == nothing, load_lanes(found, i), new))


@compiled
def q6_k(x: F32, importance: F32, out: U8) -> np.float32:
    xt, wt = np.empty((256, LANES), np.float32), np.empty((256, LANES), np.float32)
    scales, inverses = np.empty((16, LANES), np.float32), np.empty((16, LANES), np.float32)
    half, q, s = np.empty((1, LANES), np.float32), np.empty((256, LANES), np.uint8), np.empty((16, LANES), np.uint8)
    nothing, one, worst = splat(np.float32(0)), splat(np.float32(1)), np.float32(0)
    for first in range(0, len(x), LANES):
        take(x, first, xt)
        if len(importance):
            take_importance(importance, first, len(x), wt)
        else:
            for i in range(256):
                store(wt, i, load_lanes(xt, i) * load_lanes(xt, i))
        largest = nothing
        for group in range(16):
            scale, inverse = symmetric(xt, wt, 16 * group, 16, 32)
            store(scales, group, scale)
            store(inverses, group, inverse)
            largest = larger(scale, largest)
        empty = absolute(largest) < splat(TINY)
        back = splat(np.float32(-128)) / largest
        store(half, 0, pick(empty, nothing, one / back))
        round_halves(half)
        for group in range(16):
            level = pick(empty, nothing, least(rint(back * load_lanes(scales, group)), splat(np.float32(127))))
            store_bytes(s, group, level)
            inverse = pick(empty, splat(NAN), load_lanes(inverses, group))
            _symmetric_integers(xt, 16 * group, 16, load_lanes(half, 0) * level, inverse, 32, q)
        for lane in range(min(LANES, len(x) - first)):
            row = out[first + lane]
            _pack_q6_k(q, lane, row)
            for group in range(16):
                row[192 + group] = s[group, lane]
            worst = put_half(half[0, lane], row, 208, worst)
    return worst


@compiled
def _pack_q6_k(q: U8, lane: int, row: U8) -> None:
    for half in range(2):
        at = 128 * half
        for i in range(64):
            row[64 * half + i] = (q[at + i, lane] & 15) | (q[at + 64 + i, lane] & 15) << 4
        for i in range(at, at + 32):
            low = q[i, lane] >> 4 | q[i + 32, lane] >> 4 << 2
            row[128 - 96 * half + i] = low | (q[i + 64, lane] >> 4 | q[i + 96, lane] >> 4 << 2) << 4

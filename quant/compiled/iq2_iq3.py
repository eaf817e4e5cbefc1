"""IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS and IQ3_S: runs of 8 or 4 magnitudes are points of a codebook, signs stand apart.

Calls as in k_quants, followed by the codebook (quant.compiled.codebook). The searches follow ggml's operation by
operation, one block after the other: what takes their time is comparing neighbours in the codebook.
"""

from __future__ import annotations

import numpy as np

from quant.compiled.blocks import put_half
from quant.compiled.codebook import I32
from quant.compiled.jit import compiled
from quant.compiled.search import positive
from quant.compiled.simd import LANES, store
from quant.format import F32, U8

TOO_LARGE = np.float32(1e9)  # no scale in these formats reaches such a value, and sums of its powers overflow
OFF, ANY, ALL = 0, 1, 2  # which runs are looked up again for the final scale: those between points, all if any is, all


@compiled
def nearest(x: np.float32) -> np.int64:
    """`quant.compiled.simd.nearest`, for one number."""
    bits = np.int64(np.float32(x + np.float32(12582912.0)).view(np.int32))
    return (bits & 0x7FFFFF) - 0x400000


@compiled
def weigh_block(x: F32, importance: F32, spread: np.float32, floor: np.float32, weight: F32) -> np.float32:
    """Weights of a block: importance (256,) by size; where it is (0,), the square and `floor` of the mean square.

    Returns the largest magnitude of x.
    """
    total = top = np.float32(0)
    for i in range(len(x)):
        total += x[i] * x[i]
        top = max(top, abs(x[i]))
    mean = spread * total / np.float32(len(x))
    for i in range(len(x)):
        if len(importance):
            weight[i] = importance[i] * np.sqrt(mean + x[i] * x[i])
        else:
            weight[i] = floor * mean + x[i] * x[i]
    return top


@compiled
def split_signs(x: F32, weight: F32, even: bool, value: F32, signs: U8) -> None:
    """Magnitudes and, for every 8, a byte of signs. `even`: the least loss makes the number of minus signs even."""
    for run in range(len(x) // 8):
        at, bits, odd = 8 * run, 0, False
        for i in range(8):
            negative = not x[at + i] >= 0
            value[at + i] = -x[at + i] if negative else x[at + i]
            bits |= negative << i
            odd = odd != negative
        if even and odd:
            flip = 0
            least = weight[at] * x[at] * x[at]
            for i in range(1, 8):
                loss = weight[at + i] * x[at + i] * x[at + i]
                if loss < least:
                    least, flip = loss, i
            value[at + flip] = -value[at + flip]
            bits ^= 1 << flip
        signs[run] = bits


@compiled
def _look_up(
    value: F32, root: F32, at: int, inverse: np.float32, scale: np.float32, points: F32, places: I32, near: I32
) -> tuple[int, bool]:
    """The point for the run at `at`, and whether the rounded run is a point itself."""
    width = points.shape[1]
    bits, top = (2, 2) if width == 8 else (3, 7)
    key = 0
    for i in range(width):
        level = nearest(np.float32(0.5) * (inverse * value[at + i] - np.float32(1)))
        key |= max(0, min(top, level)) << bits * i
    place = places[key]
    if place >= 0:
        return place, True
    start = -1 - place
    found, best = near[start + 1], np.float32(3.4028235e38)
    for j in range(start + 1, start + 1 + near[start]):
        loss = np.float32(0)
        for i in range(width):
            miss = scale * points[near[j], i] - value[at + i]
            loss += root[at + i] * miss * miss
        if loss < best:
            best, found = loss, near[j]
    return found, False


@compiled
def _sums(value: F32, weight: F32, at: int, size: int, chosen: I32, points: F32) -> tuple[np.float32, np.float32]:
    """Sums of weight * value * q and weight * q * q over a group whose runs are the points `chosen`."""
    sum_xq = sum_qq = np.float32(0)
    width = points.shape[1]
    for run in range(size // width):
        for i in range(width):
            j, q = at + width * run + i, points[chosen[run], i]
            sum_xq += weight[j] * value[j] * q
            sum_qq += weight[j] * q * q
    return sum_xq, sum_qq


@compiled
def search_group(
    value: F32,
    weight: F32,
    root: F32,
    at: int,
    size: int,
    top: np.float32,
    scale: np.float32,
    tries: int,
    step: np.float32,
    again: int,
    points: F32,
    places: I32,
    near: I32,
    chosen: I32,
) -> np.float32:
    """The scale of a group and, in `chosen`, the points of its runs; `top` is what the highest level is tried for."""
    runs, width = size // points.shape[1], points.shape[1]
    highest = np.float32(5 if width == 8 else 15)
    aux, exact, exact_aux = np.empty(runs, np.int32), np.empty(runs, np.bool_), np.empty(runs, np.bool_)
    chosen[:runs] = 0
    exact[:] = again == OFF
    best = np.float32(0)
    for attempt in range(-tries, tries + 1):
        inverse = (highest + np.float32(attempt) * step) / top
        here = np.float32(1) / inverse
        for run in range(runs):
            aux[run], exact_aux[run] = _look_up(value, root, at + width * run, inverse, here, points, places, near)
        sum_xq, sum_qq = _sums(value, weight, at, size, aux, points)
        if sum_qq > 0 and sum_xq * sum_xq > best * sum_qq:
            scale = sum_xq / sum_qq
            best = scale * sum_xq
            chosen[:runs] = aux
            exact[:] = exact_aux
    if (again == ALL or not exact.all()) and scale > 0:
        for run in range(runs):
            if again != OFF or not exact[run]:
                inverse = np.float32(1) / scale
                chosen[run], _ = _look_up(value, root, at + width * run, inverse, scale, points, places, near)
        sum_xq, sum_qq = _sums(value, weight, at, size, chosen, points)
        if sum_qq > 0:
            scale = sum_xq / sum_qq
    return scale


@compiled
def _positive_scales(value: F32, weight: F32, top: int, scales: F32) -> None:
    """Scales (8,) of the groups of 32 for integers up to `top`, the groups side by side in lanes."""
    xt, wt, qt = np.empty((32, LANES), np.float32), np.empty((32, LANES), np.float32), np.empty((32, LANES), np.float32)
    for lane in range(LANES):
        for i in range(32):
            xt[i, lane], wt[i, lane] = value[lane % 8 * 32 + i], weight[lane % 8 * 32 + i]
    store(qt, 0, positive(xt, wt, 32, top, qt))
    for group in range(8):
        scales[group] = qt[0, group]


@compiled
def search_block(
    x: F32,
    importance: F32,
    spread: np.float32,
    floor: np.float32,
    size: int,
    even: bool,
    tiny: np.float32,
    tries: int,
    step: np.float32,
    again: int,
    points: F32,
    places: I32,
    near: I32,
    chosen: I32,
    signs: U8,
    s: U8,
) -> np.float32:
    """A block of 256: points of its runs, signs (32,), 4-bit scales s of its groups; returns the scale of the block."""
    weight, value, width = np.empty(256, np.float32), np.empty(256, np.float32), points.shape[1]
    peak = weigh_block(x, importance, spread, floor, weight)
    if peak > TOO_LARGE:
        return peak
    split_signs(x, weight, even, value, signs)
    root, scales, guesses, largest = np.sqrt(weight), np.empty(16, np.float32), np.empty(8, np.float32), np.float32(0)
    if again == ALL:
        _positive_scales(value, weight, 4, guesses)
    for group in range(256 // size):
        at = size * group
        mine = chosen[at // width : (at + size) // width]
        mine[:] = 0
        top = value[at : at + size].max()
        scale = top / np.float32(5 if width == 8 else 15)
        scales[group] = 0
        empty = top < tiny or top == 0
        if again == ALL and not empty:
            scale = guesses[group]
            top = scale * np.float32(3)
            empty = top <= 0
        if empty:
            signs[at // 8 : (at + size) // 8] = 0
            continue
        scale = search_group(value, weight, root, at, size, top, scale, tries, step, again, points, places, near, mine)
        if scale < 0:
            scale = -scale
            for run in range(at // 8, (at + size) // 8):
                signs[run] = ~signs[run]
        scales[group] = scale
        largest = scale if not scale <= largest and largest == largest else largest
    d = largest / np.float32(31)
    for group in range(256 // size):
        level = nearest(np.float32(0.5) * (np.float32(1) / d * scales[group] - np.float32(1))) if d > 0 else 0
        s[group] = max(0, min(15, level))
    if largest == 0:
        chosen[:] = 0
        signs[:] = 0
    return d


@compiled
def weights_of(importance: F32, block: int) -> F32:
    """The importance (256,) that a block meets; (0,) where there is none."""
    return importance[block % len(importance)] if len(importance) else np.empty(0, np.float32)


@compiled
def put_nibbles(s: U8, count: int, row: U8, at: int) -> None:
    for i in range(count // 2):
        row[at + i] = s[2 * i] | s[2 * i + 1] << 4


@compiled
def put_word(word: int, count: int, row: U8, at: int) -> None:
    """The low `count` bytes of a word, lowest first."""
    for i in range(count):
        row[at + i] = word >> 8 * i & 255


@compiled
def iq2_xxs(x: F32, importance: F32, out: U8, points: F32, places: I32, near: I32) -> np.float32:
    chosen, signs, s, worst = np.empty(32, np.int32), np.empty(32, np.uint8), np.empty(16, np.uint8), np.float32(0)
    for block in range(len(x)):
        weights, row = weights_of(importance, block), out[block]
        d = search_block(
            x[block], weights, np.float32(1), np.float32(0), 32, True, np.float32(1e-15), 6, np.float32(0.1), ALL,
            points, places, near, chosen, signs, s,
        )  # fmt: skip
        for group in range(8):
            word = np.int64(s[group]) << 28
            for k in range(4):
                row[2 + 8 * group + k] = chosen[4 * group + k]
                word |= np.int64(signs[4 * group + k] & 127) << 7 * k
            put_word(word, 4, row, 6 + 8 * group)
        worst = put_half(d, row, 0, worst)
    return worst


@compiled
def iq2_xs(x: F32, importance: F32, out: U8, points: F32, places: I32, near: I32) -> np.float32:
    chosen, signs, s, worst = np.empty(32, np.int32), np.empty(32, np.uint8), np.empty(16, np.uint8), np.float32(0)
    for block in range(len(x)):
        weights, row = weights_of(importance, block), out[block]
        d = search_block(
            x[block], weights, np.float32(1), np.float32(0), 16, True, np.float32(1e-15), 9, np.float32(0.1), OFF,
            points, places, near, chosen, signs, s,
        )  # fmt: skip
        for run in range(32):
            put_word(chosen[run] | np.int64(signs[run] & 127) << 9, 2, row, 2 + 2 * run)
        put_nibbles(s, 16, row, 66)
        worst = put_half(d, row, 0, worst)
    return worst


@compiled
def iq2_s(x: F32, importance: F32, out: U8, points: F32, places: I32, near: I32) -> np.float32:
    chosen, signs, s, worst = np.empty(32, np.int32), np.empty(32, np.uint8), np.empty(16, np.uint8), np.float32(0)
    for block in range(len(x)):
        weights, row = weights_of(importance, block), out[block]
        d = search_block(
            x[block], weights, np.float32(2), np.float32(0.25), 16, False, np.float32(1e-8), 9, np.float32(0.1), OFF,
            points, places, near, chosen, signs, s,
        )  # fmt: skip
        for run in range(32):
            row[2 + run] = chosen[run] & 255
            row[34 + run] = signs[run]
        for i in range(8):
            high = 0
            for k in range(4):
                high |= chosen[4 * i + k] >> 8 << 2 * k
            row[66 + i] = high
        put_nibbles(s, 16, row, 74)
        worst = put_half(d * np.float32(0.9875), row, 0, worst)
    return worst


@compiled
def iq3_xxs(x: F32, importance: F32, out: U8, points: F32, places: I32, near: I32) -> np.float32:
    chosen, signs, s, worst = np.empty(64, np.int32), np.empty(32, np.uint8), np.empty(16, np.uint8), np.float32(0)
    for block in range(len(x)):
        weights, row = weights_of(importance, block), out[block]
        d = search_block(
            x[block], weights, np.float32(2), np.float32(0), 32, True, np.float32(1e-8), 15, np.float32(0.2), OFF,
            points, places, near, chosen, signs, s,
        )  # fmt: skip
        for run in range(64):
            row[2 + run] = chosen[run]
        for group in range(8):
            word = np.int64(s[group]) << 28
            for k in range(4):
                word |= np.int64(signs[4 * group + k] & 127) << 7 * k
            put_word(word, 4, row, 66 + 4 * group)
        worst = put_half(d * np.float32(1.0125), row, 0, worst)
    return worst


@compiled
def iq3_s(x: F32, importance: F32, out: U8, points: F32, places: I32, near: I32) -> np.float32:
    chosen, signs, s, worst = np.empty(64, np.int32), np.empty(32, np.uint8), np.empty(16, np.uint8), np.float32(0)
    for block in range(len(x)):
        weights, row = weights_of(importance, block), out[block]
        d = search_block(
            x[block], weights, np.float32(2), np.float32(0), 32, False, np.float32(0), 9, np.float32(0.2), ANY,
            points, places, near, chosen, signs, s,
        )  # fmt: skip
        for run in range(64):
            row[2 + run] = chosen[run] & 255
        for i in range(8):
            high = 0
            for k in range(8):
                high |= chosen[8 * i + k] >> 8 << k
            row[66 + i] = high
        row[74:106] = signs
        put_nibbles(s, 8, row, 106)
        worst = put_half(d * np.float32(1.033), row, 0, worst)
    return worst

"""IQ1_S and IQ1_M: runs of 8 are points of a ternary codebook, shifted by +-1/8.

The call signatures are as in iq2_iq3. The searches follow ggml operation by operation. They sort the values of a group,
try every cut into -1, 0 and 1 with either shift, and look up the runs of the best cut in the codebook.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from localllm.quant.compiled.blocks import half_bits, put_half
from localllm.quant.compiled.codebook import I32, Codebook
from localllm.quant.compiled.iq2_iq3 import TOO_LARGE, put_word, weigh_block, weights_of
from localllm.quant.compiled.jit import compiled
from localllm.quant.compiled.runs import nearest
from localllm.quant.format import F32, U8

I64 = NDArray[np.int64]
_LOWEST = np.float32(-3.4028235e38)
_EIGHTH = np.float32(0.125)


@compiled
def _order(x: F32, at: int, size: int, order: I64) -> None:
    """Sort a group stably: write the positions of its values (from `at`), smallest first, to `order` (size,)."""
    for i in range(size):
        j = i
        while j > 0 and x[at + order[j - 1]] > x[at + i]:
            order[j] = order[j - 1]
            j -= 1
        order[j] = i


@compiled
def _look_up(
    x: F32, weight: F32, at: int, levels: U8, scale: np.float32, shift: np.float32, book: Codebook
) -> tuple[int, bool]:
    """Return the index of the point for the run of levels 0 ... 2 (8,) at `at`, and whether it matches exactly."""
    key = 0
    for i in range(8):
        key |= int(levels[i]) << 2 * i
    place = book.places[key]
    if place >= 0:
        return place, True
    start = -1 - place
    near = book.near
    found, best = near[start + 1], np.float32(3.4028235e38)
    for j in range(start + 1, start + 1 + near[start]):
        loss = np.float32(0)
        for i in range(8):
            miss = scale * _value(book.points, near[j], i, shift) - x[at + i]
            loss += weight[at + i] * miss * miss
        if loss < best:
            best, found = loss, near[j]
    return found, False


@compiled
def _value(points: F32, point: int, i: int, shift: np.float32) -> np.float32:
    """Return coordinate -1, 0 or 1 of a point plus the shift."""
    return (points[point, i] - np.float32(3)) * np.float32(0.5) + shift


@compiled
def _refit(
    x: F32, weight: F32, at: int, runs: int, chosen: I32, shifts: F32, scale: np.float32, points: F32
) -> np.float32:
    """Return the least-squares scale for the chosen points, or `scale` if the fit is not positive."""
    sum_xq = sum_qq = np.float32(0)
    for run in range(runs):
        for i in range(8):
            j, q = at + 8 * run + i, _value(points, chosen[run], i, shifts[run])
            sum_xq += weight[j] * q * x[j]
            sum_qq += weight[j] * q * q
    return sum_xq / sum_qq if sum_xq > 0 and sum_qq > 0 else scale


@compiled
def _cut(levels: U8, order: I64, first: int, second: int, mirrored: bool) -> None:
    for j in range(len(order)):
        level = 0 if j < first else 1 if j < second else 2
        levels[order[j]] = 2 - level if mirrored else level


@compiled
def _best_cut(x: F32, weight: F32, at: int, order: I64) -> tuple[int, int, np.float32, np.float32]:
    """Return the best cut of 32 sorted values, its scale and shift; a cut of -1 if all weights are 0."""
    sums, weights = np.zeros(33, np.float32), np.zeros(33, np.float32)
    for j in range(32):
        i = at + order[j]
        sums[j + 1], weights[j + 1] = sums[j] + weight[i] * x[i], weights[j] + weight[i]
    best, scale, shift, first, second = _LOWEST, np.float32(0), _EIGHTH, -1, -1
    for i in range(33):
        for j in range(i, 33):
            for sign in range(2):
                move = -_EIGHTH if sign else _EIGHTH
                low, high = np.float32(-1) + move, np.float32(1) + move
                sum_xq = (sums[i] - sums[0]) * low + (sums[j] - sums[i]) * move + (sums[32] - sums[j]) * high
                sum_qq = (weights[i] - weights[0]) * low * low + (weights[j] - weights[i]) * move * move
                sum_qq += (weights[32] - weights[j]) * high * high
                if sum_qq > 0 and sum_xq * sum_xq > best * sum_qq:
                    scale = sum_xq / sum_qq
                    best, shift, first, second = scale * sum_xq, move, i, j
    return first, second, scale, shift


@compiled
def _scale_level(scale: np.float32, d: np.float32) -> int:
    return max(0, min(7, nearest(np.float32(0.5) * (np.float32(1) / d * scale - np.float32(1)))))


@compiled
def iq1_s(x: F32, importance: F32, out: U8, book: Codebook) -> np.float32:
    weight, scales, words = np.empty(256, np.float32), np.empty(8, np.float32), np.empty(8, np.int64)
    order, levels, chosen, shifts = (
        np.empty(32, np.int64),
        np.empty(32, np.uint8),
        np.empty(4, np.int32),
        np.empty(4, np.float32),
    )
    worst = np.float32(0)
    for block in range(len(x)):
        value, row, largest = x[block], out[block], np.float32(0)
        top = weigh_block(value, weights_of(importance, block), np.float32(2), np.float32(0), weight)
        if top > TOO_LARGE:
            return top
        row[:] = 0
        for group in range(8):
            at, first = 32 * group, -1
            scales[group], words[group] = 0, 0
            if np.abs(value[at : at + 32]).max() >= np.float32(1e-12):
                _order(value, at, 32, order)
                first, second, scale, shift = _best_cut(value, weight, at, order)
            if first < 0:
                continue
            _cut(levels, order, first, second, scale < 0)
            if scale < 0:
                scale, shift = -scale, -shift
            exact = True
            for run in range(4):
                chosen[run], here = _look_up(
                    value, weight, at + 8 * run, levels[8 * run : 8 * run + 8], scale, shift, book
                )
                exact = exact and here
                row[2 + 4 * group + run] = chosen[run] & 255
                words[group] |= np.int64(chosen[run] >> 8) << 3 * run
            if not exact:
                shifts[:] = shift
                scale = _refit(value, weight, at, 4, chosen, shifts, scale, book.points)
            words[group] |= np.int64(shift < 0) << 15
            scales[group] = scale
            largest = scale if not scale <= largest and largest == largest else largest
        d = largest / np.float32(15)
        if largest != 0:
            for group in range(8):
                put_word(words[group] | _scale_level(scales[group], d) << 12, 2, row, 34 + 2 * group)
        worst = put_half(d * np.float32(1.125), row, 0, worst)
    return worst


@compiled
def _best_cut_halves(x: F32, weight: F32, at: int, order: I64) -> tuple[int, int, np.float32, int]:
    """Return the best cut of 16 sorted values, its scale, and the shifts of its runs, the first run's in bit 1."""
    sums, weights = np.zeros((2, 17), np.float32), np.zeros((2, 17), np.float32)
    for j in range(16):
        i = at + order[j]
        for half in range(2):
            sums[half, j + 1], weights[half, j + 1] = sums[half, j], weights[half, j]
        half = order[j] // 8
        sums[half, j + 1] = sums[half, j] + weight[i] * x[i]
        weights[half, j + 1] = weights[half, j] + weight[i]
    best, scale, kept, first, second = _LOWEST, np.float32(0), -1, -1, -1
    one, xq, qq = np.float32(1), np.empty((2, 2), np.float32), np.empty((2, 2), np.float32)
    for i in range(17):
        for j in range(i, 17):
            for half in range(2):
                both = sums[half, i] + sums[half, j]
                for sign in range(2):
                    move = -_EIGHTH if sign else _EIGHTH
                    low, high = move - one, move + one
                    xq[half, sign] = sums[half, 16] * high - both
                    square = weights[half, 16] * high * high + weights[half, i] * (low * low - move * move)
                    qq[half, sign] = square + weights[half, j] * (move * move - high * high)
            for k in range(4):
                sum_xq, sum_qq = xq[0, k >> 1] + xq[1, k & 1], qq[0, k >> 1] + qq[1, k & 1]
                if sum_qq > 0 and sum_xq * sum_xq > best * sum_qq:
                    scale = sum_xq / sum_qq
                    best, kept, first, second = scale * sum_xq, k, i, j
    return first, second, scale, kept


@compiled
def iq1_m(x: F32, importance: F32, out: U8, book: Codebook) -> np.float32:
    weight, scales, moved = np.empty(256, np.float32), np.empty(16, np.float32), np.empty(32, np.float32)
    order, levels, chosen = np.empty(16, np.int64), np.empty(16, np.uint8), np.empty(32, np.int32)
    worst = np.float32(0)
    for block in range(len(x)):
        value, row, largest = x[block], out[block], np.float32(0)
        top = weigh_block(value, weights_of(importance, block), np.float32(2), np.float32(0), weight)
        if top > TOO_LARGE:
            return top
        chosen[:] = 0
        moved[:] = _EIGHTH
        for group in range(16):
            at, first = 16 * group, -1
            scales[group] = 0
            if np.abs(value[at : at + 16]).max() >= np.float32(1e-7):
                _order(value, at, 16, order)
                first, second, scale, kept = _best_cut_halves(value, weight, at, order)
            if first < 0:
                continue
            _cut(levels, order, first, second, scale < 0)
            if scale < 0:
                scale, kept = -scale, 3 - kept
            mine, shifts, exact = chosen[2 * group : 2 * group + 2], moved[2 * group : 2 * group + 2], True
            for run in range(2):
                shifts[run] = -_EIGHTH if kept >> 1 - run & 1 else _EIGHTH
                mine[run], here = _look_up(
                    value, weight, at + 8 * run, levels[8 * run : 8 * run + 8], scale, shifts[run], book
                )
                exact = exact and here
            if not exact:
                scale = _refit(value, weight, at, 2, mine, shifts, scale, book.points)
            scales[group] = scale
            largest = scale if not scale <= largest and largest == largest else largest
        worst = _put_iq1_m(value, weight, scales, chosen, moved, largest, book.points, row, worst)
    return worst


@compiled
def _put_iq1_m(
    x: F32,
    weight: F32,
    scales: F32,
    chosen: I32,
    moved: F32,
    largest: np.float32,
    points: F32,
    row: U8,
    worst: np.float32,
) -> np.float32:
    """Fit the block scale to all points found, write the block, and return the result of `put_half`."""
    row[:] = 0
    if largest == 0:
        return worst
    d = largest / np.float32(15)
    sum_xq = sum_qq = np.float32(0)
    words = np.zeros(4, np.int64)
    for group in range(16):
        level = _scale_level(scales[group], d)
        words[group // 4] |= level << 3 * (group % 4)
        for run in range(2 * group, 2 * group + 2):
            for i in range(8):
                j = 8 * run + i
                q = _value(points, chosen[run], i, moved[run]) * np.float32(2 * level + 1)
                sum_xq += weight[j] * q * x[j]
                sum_qq += weight[j] * q * q
            row[run] = chosen[run] & 255
            row[32 + group] |= (chosen[run] >> 8 | np.int64(moved[run] < 0) << 3) << 4 * (run % 2)
    if not sum_qq <= 0:
        d = sum_xq / sum_qq
    d = d * np.float32(1.1125)
    bits = half_bits(d)
    for k in range(4):
        put_word(words[k] | (bits >> 4 * k & 15) << 12, 2, row, 48 + 2 * k)
    magnitude = abs(d)
    return worst if magnitude <= worst or worst != worst else magnitude

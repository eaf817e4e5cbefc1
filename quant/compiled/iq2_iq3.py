"""IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS and IQ3_S: runs of 8 or 4 magnitudes are points of a codebook.

Signs are stored separately. The call signatures are as in k_quants, followed by the codebook (quant.compiled.codebook).
The searches follow ggml operation by operation, one group after the other (quant.compiled.runs).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from localllm.quant.compiled.blocks import put_half
from localllm.quant.compiled.codebook import I32, Codebook
from localllm.quant.compiled.jit import compiled
from localllm.quant.compiled.runs import ALL, ANY, OFF, Tried, nearest, search_group, tried
from localllm.quant.compiled.search import positive
from localllm.quant.compiled.simd import LANES, store
from localllm.quant.format import F32, U8

TOO_LARGE = np.float32(1e9)  # maximum scale in these formats; sums of higher powers would overflow


class SearchParameters(NamedTuple):
    """The parameters of a search."""

    size: int  # values per scale
    even: bool  # only seven of eight signs are stored
    spread: np.float32  # factor of the mean square in a value's weight, with importance
    floor: np.float32  # factor of the mean square in a value's weight, without importance
    tiny: np.float32  # a group with a smaller maximum magnitude is stored as zeros
    tries: int  # number of scales to try on either side of the scale that spans the group
    step: np.float32  # distance between these scales
    again: int  # which runs to look up again for the final scale


_F = np.float32
_IQ2_XXS = SearchParameters(32, True, _F(1), _F(0), _F(1e-15), 6, _F(0.1), ALL)
_IQ2_XS = SearchParameters(16, True, _F(1), _F(0), _F(1e-15), 9, _F(0.1), OFF)
_IQ2_S = SearchParameters(16, False, _F(2), _F(0.25), _F(1e-8), 9, _F(0.1), OFF)
_IQ3_XXS = SearchParameters(32, True, _F(2), _F(0), _F(1e-8), 15, _F(0.2), OFF)
_IQ3_S = SearchParameters(32, False, _F(2), _F(0), _F(0), 9, _F(0.2), ANY)


class Found(NamedTuple):
    """The state of a block's search: magnitudes and weights, results, and scratch memory."""

    value: F32  # (256,): magnitudes
    weight: F32  # (256,)
    guesses: F32  # (8,): initial scales, if the search uses them
    points: I32  # (runs,)
    signs: U8  # (32,), one bit per value
    scales: U8  # (groups,), four bits each
    tried: Tried


@compiled
def _found(book: Codebook) -> Found:
    value, weight, guesses = np.empty(256, np.float32), np.empty(256, np.float32), np.empty(8, np.float32)
    points = np.empty(256 // book.points.shape[1], np.int32)
    return Found(value, weight, guesses, points, np.empty(32, np.uint8), np.empty(16, np.uint8), tried())


@compiled
def weigh_block(x: F32, importance: F32, spread: np.float32, floor: np.float32, weight: F32) -> np.float32:
    """Compute the weights of a block, and return the largest magnitude of x.

    Importance (256,) is combined with the magnitudes. If it is (0,), a weight is x^2 + `floor` * the mean square.
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
    """Split values into magnitudes and a byte of signs per 8 values. `even` makes the number of signs even at the least
    loss.
    """
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
def _guess(found: Found) -> None:
    """Find scales of the groups of 32 for levels up to 4, one group per lane."""
    xt, wt, qt = np.empty((32, LANES), np.float32), np.empty((32, LANES), np.float32), np.empty((32, LANES), np.float32)
    for lane in range(LANES):
        for i in range(32):
            at = lane % 8 * 32 + i
            xt[i, lane], wt[i, lane] = found.value[at], found.weight[at]
    store(qt, 0, positive(xt, wt, 32, 4, qt))
    found.guesses[:] = qt[0, :8]


@compiled
def _prepare(x: F32, importance: F32, how: SearchParameters, found: Found) -> np.float32:
    """Compute magnitudes, weights and signs of a block of 256; return the largest magnitude."""
    peak = weigh_block(x, importance, how.spread, how.floor, found.weight)
    split_signs(x, found.weight, how.even, found.value, found.signs)
    return peak


@compiled
def _search(peak: np.float32, how: SearchParameters, book: Codebook, found: Found) -> np.float32:
    """Find the points and scales of a prepared block; return the scale of the block."""
    if peak > TOO_LARGE:
        return peak
    value, weight, chosen, signs, size = found.value, found.weight, found.points, found.signs, how.size
    root, scales, largest, width = np.sqrt(weight), np.empty(16, np.float32), np.float32(0), book.points.shape[1]
    for group in range(256 // size):
        at = size * group
        mine = chosen[at // width : (at + size) // width]
        mine[:] = 0
        top = value[at : at + size].max()
        scale = top / np.float32(5 if width == 8 else 15)
        scales[group] = 0
        empty = top < how.tiny or top == 0
        if how.again == ALL and not empty:
            scale = found.guesses[group]
            top = scale * np.float32(3)
            empty = top <= 0
        if empty:
            signs[at // 8 : (at + size) // 8] = 0
            continue
        scale = search_group(
            value, weight, root, at, size, top, scale, how.tries, how.step, how.again, book, found.tried, mine
        )
        if scale < 0:
            scale = -scale
            for run in range(at // 8, (at + size) // 8):
                signs[run] = ~signs[run]
        scales[group] = scale
        largest = scale if not scale <= largest and largest == largest else largest
    d = largest / np.float32(31)
    for group in range(256 // size):
        level = nearest(np.float32(0.5) * (np.float32(1) / d * scales[group] - np.float32(1))) if d > 0 else 0
        found.scales[group] = max(0, min(15, level))
    if largest == 0:
        chosen[:] = 0
        signs[:] = 0
    return d


@compiled
def weights_of(importance: F32, block: int) -> F32:
    """Return the importance (256,) for a block; (0,) without importance."""
    return importance[block % len(importance)] if len(importance) else np.empty(0, np.float32)


@compiled
def put_word(word: int, count: int, row: U8, at: int) -> None:
    """Write the low `count` bytes of a word, lowest first."""
    for i in range(count):
        row[at + i] = word >> 8 * i & 255


@compiled
def _put_nibbles(s: U8, count: int, row: U8, at: int) -> None:
    for i in range(count // 2):
        row[at + i] = s[2 * i] | s[2 * i + 1] << 4


@compiled
def _put_signs_and_scale(found: Found, group: int, row: U8, at: int) -> None:
    """Write a word for 32 values: four 7-bit sign codes and a scale."""
    word = np.int64(found.scales[group]) << 28
    for k in range(4):
        word |= np.int64(found.signs[4 * group + k] & 127) << 7 * k
    put_word(word, 4, row, at)


@compiled
def _put_points(points: I32, bits: int, row: U8, low: int, high: int) -> None:
    """Write the low bytes of point indices, and pack the `bits` above them."""
    each = 8 // bits
    for i in range(len(points) // each):
        above = 0
        for k in range(each):
            row[low + each * i + k] = points[each * i + k] & 255
            above |= points[each * i + k] >> 8 << bits * k
        row[high + i] = above


@compiled
def iq2_xxs(x: F32, importance: F32, out: U8, book: Codebook) -> np.float32:
    found, worst = _found(book), np.float32(0)
    for block in range(len(x)):
        row, peak = out[block], _prepare(x[block], weights_of(importance, block), _IQ2_XXS, found)
        _guess(found)
        d = _search(peak, _IQ2_XXS, book, found)
        for group in range(8):
            for k in range(4):
                row[2 + 8 * group + k] = found.points[4 * group + k]
            _put_signs_and_scale(found, group, row, 6 + 8 * group)
        worst = put_half(d, row, 0, worst)
    return worst


@compiled
def iq2_xs(x: F32, importance: F32, out: U8, book: Codebook) -> np.float32:
    found, worst = _found(book), np.float32(0)
    for block in range(len(x)):
        row, peak = out[block], _prepare(x[block], weights_of(importance, block), _IQ2_XS, found)
        d = _search(peak, _IQ2_XS, book, found)
        for run in range(32):
            put_word(found.points[run] | np.int64(found.signs[run] & 127) << 9, 2, row, 2 + 2 * run)
        _put_nibbles(found.scales, 16, row, 66)
        worst = put_half(d, row, 0, worst)
    return worst


@compiled
def iq2_s(x: F32, importance: F32, out: U8, book: Codebook) -> np.float32:
    found, worst = _found(book), np.float32(0)
    for block in range(len(x)):
        row, peak = out[block], _prepare(x[block], weights_of(importance, block), _IQ2_S, found)
        d = _search(peak, _IQ2_S, book, found)
        _put_points(found.points, 2, row, 2, 66)
        row[34:66] = found.signs
        _put_nibbles(found.scales, 16, row, 74)
        worst = put_half(d * np.float32(0.9875), row, 0, worst)
    return worst


@compiled
def iq3_xxs(x: F32, importance: F32, out: U8, book: Codebook) -> np.float32:
    found, worst = _found(book), np.float32(0)
    for block in range(len(x)):
        row, peak = out[block], _prepare(x[block], weights_of(importance, block), _IQ3_XXS, found)
        d = _search(peak, _IQ3_XXS, book, found)
        for run in range(64):
            row[2 + run] = found.points[run]
        for group in range(8):
            _put_signs_and_scale(found, group, row, 66 + 4 * group)
        worst = put_half(d * np.float32(1.0125), row, 0, worst)
    return worst


@compiled
def iq3_s(x: F32, importance: F32, out: U8, book: Codebook) -> np.float32:
    found, worst = _found(book), np.float32(0)
    for block in range(len(x)):
        row, peak = out[block], _prepare(x[block], weights_of(importance, block), _IQ3_S, found)
        d = _search(peak, _IQ3_S, book, found)
        _put_points(found.points, 1, row, 2, 66)
        row[74:106] = found.signs
        _put_nibbles(found.scales, 8, row, 106)
        worst = put_half(d * np.float32(1.033), row, 0, worst)
    return worst

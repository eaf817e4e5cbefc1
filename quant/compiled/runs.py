"""The scale and codebook points with the least loss for a group of values in the IQ2 and IQ3 formats.

A group consists of runs of 8 or 4 magnitudes; each run becomes a point. The expensive parts of the search handle 16
items at once: the scales tried for a group, and the neighbouring points of a run. Sums run in ggml's order, so that the
same input gives the same bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from localllm.quant.compiled.codebook import I32, Codebook
from localllm.quant.compiled.jit import compiled
from localllm.quant.compiled.search import clamp_level
from localllm.quant.compiled.simd import LANES, fields, load_lanes, lowest, numbers, pick, splat, store
from localllm.quant.compiled.simd import nearest as nearest_each
from localllm.quant.format import F32

# Runs to look up again for the final scale. OFF: runs that are not points; ANY: all runs, if any is not a point; ALL:
# always all runs.
OFF, ANY, ALL = 0, 1, 2
_HIGHEST = np.float32(3.4028235e38)


class Tried(NamedTuple):
    """Sixteen scales to try for a group, and the result for each scale."""

    inverse: F32  # (1, 16): 1 / scale
    scale: F32  # (1, 16)
    keys: F32  # (1, 16), of one run
    packed: I32  # (16,): the points of one run, packed as in the codebook
    points: I32  # (16, runs)
    exact: NDArray[np.bool_]  # (16, runs): whether the rounded run was itself a point
    sums: F32  # (2, 16): sums of weight * value * q and of weight * q * q


@compiled
def tried() -> Tried:
    """Return scratch memory for `search_group`."""
    lanes = (1, LANES)
    return Tried(
        np.empty(lanes, np.float32),
        np.empty(lanes, np.float32),
        np.empty(lanes, np.float32),
        np.zeros(LANES, np.int32),
        np.empty((LANES, 8), np.int32),
        np.empty((LANES, 8), np.bool_),
        np.empty((2, LANES), np.float32),
    )


@compiled
def nearest(x: np.float32) -> np.int64:
    """Compute `quant.compiled.simd.nearest` for one value."""
    bits = np.int64(np.float32(x + np.float32(12582912.0)).view(np.int32))
    return (bits & 0x7FFFFF) - 0x400000


@compiled
def _point(value: F32, root: F32, at: int, place: int, scale: np.float32, book: Codebook) -> int:
    """Return the point for the run at `at`: the exact one, or the neighbour with the least loss."""
    if place >= 0:
        return place
    first, here = -place, numbers()
    count, scales = book.near[first - 1], splat(scale)
    best, which, end = splat(_HIGHEST), splat(np.float32(0)), splat(np.float32(count))
    for start in range(first, first + count, LANES):
        loss = splat(np.float32(0))
        for i in range(book.points.shape[1]):
            miss = scales * fields(book.near_packed, start, i) - splat(value[at + i])
            loss = loss + splat(root[at + i]) * miss * miss
        better = (here < end) & (loss < best)
        best, which = pick(better, loss, best), pick(better, here, which)
        here = here + splat(np.float32(LANES))
    return book.near[first + int(lowest(pick(best == splat(lowest(best)), which, end)))]


@compiled
def _look_up(value: F32, root: F32, at: int, scale: np.float32, book: Codebook) -> int:
    """Return the point for the run at `at` with this scale."""
    width, inverse, key = book.points.shape[1], np.float32(1) / scale, 0
    bits, top = (2, 2) if width == 8 else (3, 7)
    for i in range(width):
        level = nearest(np.float32(0.5) * (inverse * value[at + i] - np.float32(1)))
        key |= max(0, min(top, level)) << bits * i
    return _point(value, root, at, book.places[key], scale, book)


@compiled
def _fit(value: F32, weight: F32, at: int, size: int, chosen: I32, scale: np.float32, points: F32) -> np.float32:
    """Return the least-squares scale of a group for the points `chosen`; `scale` if all weights are 0."""
    sum_xq = sum_qq = np.float32(0)
    width = points.shape[1]
    for run in range(size // width):
        for i in range(width):
            j, q = at + width * run + i, points[chosen[run], i]
            sum_xq += weight[j] * value[j] * q
            sum_qq += weight[j] * q * q
    return sum_xq / sum_qq if sum_qq > 0 else scale


@compiled
def _try(value: F32, weight: F32, root: F32, at: int, runs: int, count: int, book: Codebook, tried: Tried) -> None:
    """Evaluate the first `count` scales in `tried.inverse`."""
    width = book.points.shape[1]
    nothing, half, one = splat(np.float32(0)), splat(np.float32(0.5)), splat(np.float32(1))
    top, base = splat(np.float32(2 if width == 8 else 7)), splat(np.float32(4 if width == 8 else 8))
    inverse = load_lanes(tried.inverse, 0)
    store(tried.scale, 0, one / inverse)
    sum_xq = sum_qq = nothing
    for run in range(runs):
        start, key = at + width * run, nothing
        for i in range(start + width - 1, start - 1, -1):
            key = key * base + clamp_level(nearest_each(half * (inverse * splat(value[i]) - one)), nothing, top)
        store(tried.keys, 0, key)
        for lane in range(count):
            place = book.places[int(tried.keys[0, lane])]
            point = _point(value, root, start, place, tried.scale[0, lane], book)
            tried.points[lane, run], tried.exact[lane, run] = point, place >= 0
            tried.packed[lane] = book.packed[point]
        for i in range(width):
            q, weights = fields(tried.packed, 0, i), splat(weight[start + i])
            sum_xq = sum_xq + weights * splat(value[start + i]) * q
            sum_qq = sum_qq + weights * q * q
    store(tried.sums, 0, sum_xq)
    store(tried.sums, 1, sum_qq)


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
    book: Codebook,
    tried: Tried,
    chosen: I32,
) -> np.float32:
    """Return the scale of a group, and its points in `chosen`; `top` is the value tried for the highest level."""
    width = book.points.shape[1]
    runs, highest, best = size // width, np.float32(5 if width == 8 else 15), np.float32(0)
    exact = np.empty(runs, np.bool_)
    exact[:] = again == OFF
    chosen[:] = 0
    for first in range(-tries, tries + 1, LANES):
        count = min(LANES, tries + 1 - first)
        attempt = numbers() + splat(np.float32(first))
        store(tried.inverse, 0, (splat(highest) + attempt * splat(step)) / splat(top))
        _try(value, weight, root, at, runs, count, book, tried)
        for lane in range(count):
            sum_xq, sum_qq = tried.sums[0, lane], tried.sums[1, lane]
            if sum_qq > 0 and sum_xq * sum_xq > best * sum_qq:
                scale = sum_xq / sum_qq
                best = scale * sum_xq
                chosen[:] = tried.points[lane, :runs]
                exact[:] = tried.exact[lane, :runs]
    if (again == ALL or not exact.all()) and scale > 0:
        for run in range(runs):
            if again != OFF or not exact[run]:
                chosen[run] = _look_up(value, root, at + width * run, scale, book)
        scale = _fit(value, weight, at, size, chosen, scale, book.points)
    return scale

"""Codebooks of the IQ formats for searches: map rounded coordinates to a point, or to its neighbouring points.

Coordinates are represented as in ggml's search: level l is 2 * l + 1.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from localllm.quant.compiled.jit import compiled
from localllm.quant.compiled.simd import LANES
from localllm.quant.format import F32
from localllm.quant.formats.grids import levels_of

I32 = NDArray[np.int32]

# name: bits per level in a key, number of levels in a key, neighbour distances to search
_BOOKS = {
    "IQ1S": (2, 3, 3),
    "IQ2XXS": (2, 3, 2),
    "IQ2XS": (2, 3, 2),
    "IQ2S": (2, 3, 1),
    "IQ3XXS": (3, 8, 2),
    "IQ3S": (3, 8, 3),
}


class Codebook(NamedTuple):
    """A codebook with an index by key. A key packs the levels of a run, a few bits each, the first level in the lowest
    bits.
    """

    points: F32  # (points, width)
    packed: I32  # (points,): coordinates packed in four bits each, the first in the lowest bits
    places: I32  # per key: the index of its point, or -1 - its index in `near` if no point matches
    near: I32  # near[i] is the number of point indices that follow, nearest first, ties by index
    near_packed: I32  # packed coordinates of `near`, padded so that any sixteen can be read


@cache
def codebook(name: str) -> Codebook:
    bits, levels, distances = _BOOKS[name]
    points = np.ascontiguousarray(levels_of(name).astype(np.float32) * np.float32(2) + np.float32(1))
    places, length = np.empty(1 << bits * points.shape[1], np.int32), 0
    length = _neighbours(points, bits, levels, distances, places, np.empty(0, np.int32))
    near = np.empty(length, np.int32)
    _neighbours(points, bits, levels, distances, places, near)
    packed = (points.astype(np.uint32) << (4 * np.arange(points.shape[1], dtype=np.uint32))).sum(1, np.uint32)
    # counts in `near` also get an entry, which is never read
    near_packed = np.pad(packed[np.minimum(near, len(packed) - 1)], (0, LANES))
    return Codebook(points, packed.view(np.int32), places, near, near_packed.view(np.int32))


@compiled
def _neighbours(points: F32, bits: int, levels: int, distances: int, places: I32, near: I32) -> int:
    """Fill `places`, and `near` unless it is empty; return the required length of `near`."""
    count, width = points.shape
    distance, length, mask = np.empty(count, np.float32), 0, (1 << bits) - 1
    for key in range(len(places)):
        used = True
        for i in range(width):
            used = used and (key >> bits * i & mask) < levels
        places[key] = 0  # never read unless set below
        if not used:
            continue
        for point in range(count):
            total = np.float32(0)
            for i in range(width):
                miss = points[point, i] - np.float32(2 * (key >> bits * i & mask) + 1)
                total += miss * miss
            distance[point] = total
        here, end = np.argmin(distance), length + 1
        if distance[here] == 0:
            places[key] = here
            continue
        places[key] = -1 - length
        least = np.float32(0)
        for _ in range(distances):
            following = np.float32(np.inf)
            for point in range(count):
                if least < distance[point] < following:
                    following = distance[point]
            for point in range(count):
                if distance[point] == following:
                    if len(near):
                        near[end] = point
                    end += 1
            least = following
        if len(near):
            near[length] = end - length - 1
        length = end
    return length

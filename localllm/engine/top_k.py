"""Selects the k largest of many values, with a platform-independent order: ties are ordered by index.

Sampling each token needs, for example, the 40 largest of 128,000 logits, so the selection must be fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Indices = NDArray[np.intp]
Ids = NDArray[np.int32]

_COLUMNS = 1024  # long rows suit SIMD units, and 1024 column maxima are still quick to search
_MANY = 2048  # from this size on, sorting 64-bit keys is faster than a stable argsort: 2 ms instead of 20 for 128,000
FIRST = 256  # number of top scores, usually enough to reach a total probability
_DEPTHS = (0.25, 0.5, 1, 2, 4, 8)  # distances below the 256th largest score, searched in turn if 256 are too few


def top_k_indices(values: Floats, k: int) -> Indices:
    """Return the indices (min(k, n),) of the k largest `values` (n,), which contain no NaN; largest first, ties by
    index.
    """
    if k >= len(values):
        return descending(values)
    picked = _from_columns(values, k)
    if picked is None:
        floor = np.sort(values)[len(values) - k]  # the k-th largest; np.partition takes 3 ms if most are -inf
        above = np.flatnonzero(values > floor)
        picked = np.concatenate((above, np.flatnonzero(values == floor)[: k - len(above)]))
        picked.sort()
    return picked[descending(values[picked])[:k]]


def _from_columns(values: Floats, k: int) -> Indices | None:
    """Return ascending indices of a few more than the k largest values; None if a full search is as fast.

    The k-th largest of the 1024 column maxima is a lower bound on the k-th largest value. Columns with a smaller
    maximum are therefore not searched.
    """
    height = len(values) // _COLUMNS
    if height < 2 or k > _COLUMNS // 4:
        return None
    table = values[: height * _COLUMNS].reshape(height, _COLUMNS)
    maxima = table.max(axis=0)
    floor = np.partition(maxima, _COLUMNS - k)[_COLUMNS - k]
    columns = np.flatnonzero(maxima >= floor)
    if len(columns) > 2 * k:  # many equal values, such as -inf
        found = np.flatnonzero(values >= floor)
        return found if len(found) <= len(values) // 16 else None
    row, column = np.divmod(np.flatnonzero(table[:, columns] >= floor), len(columns))
    rest = np.flatnonzero(values[table.size :] >= floor) + table.size
    return np.concatenate((row * _COLUMNS + columns[column], rest))


def descending(values: Floats) -> Indices:
    """Return the indices (n,) that sort `values` (n,) in descending order, ties by index. NaN is not allowed."""
    if len(values) < _MANY:
        return (-values).argsort(kind="stable")
    bits = (values + np.float32(0)).view(np.int32)  # adding 0 turns -0 into +0
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # floats as integers with the same order
    keys = (-rising.astype(np.int64) << 32) | np.arange(len(values))
    keys.sort()
    return np.asarray(keys & 0xFFFFFFFF, np.intp)


def leading(
    scores: Floats, probabilities: Doubles, total: float, side: Literal["left", "right"], at_least: int
) -> Indices:
    """Return the indices, by descending score, of the shortest prefix whose probabilities reach `total`.

    With side "left" the sum must be at least `total`, with "right" above it. The prefix has at least `at_least`
    members, and never fewer than one.
    """
    for order in _growing(scores, probabilities, total):
        needed = max(int(probabilities[order].cumsum().searchsorted(total, side)) + 1, at_least)
        if needed <= len(order):
            break
    return order[:needed]


def _growing(scores: Floats, probabilities: Doubles, total: float) -> Iterator[Indices]:
    """Yield indices by descending score: the 256 largest, then roughly enough to reach the total probability, then all.
    Sorting all of 128,000 takes 2 to 6 ms.
    """
    first = top_k_indices(scores, FIRST)
    yield first
    if len(scores) > _MANY:
        floor = scores[first[-1]]
        for depth in _DEPTHS:
            rows = np.flatnonzero(scores >= floor - np.float32(depth))
            if probabilities[rows].sum() > total:
                yield rows[descending(scores[rows])]  # due to rounding, the sum may still be below the total
                break
    yield descending(scores)

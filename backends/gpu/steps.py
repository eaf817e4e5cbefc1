"""How a batch goes through a program: in pieces, each of one row, few or many, and of tiles for attention.

Runs of more than FEW_ROWS rows of one sequence are prefill and go together through the tiles; all others go FEW_ROWS at
a time through kernels whose sums have one order, so that decoding gives the same bits whatever else is in the batch.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import Limits
from localllm.backends.gpu.kernels import FEW_ROWS, HEADER, TILE_ROWS
from localllm.backends.gpu.products import SOME_ROWS
from localllm.backends.gpu.program import Dimension
from localllm.plan import Batch

ROW_CLASSES = (1, 2, FEW_ROWS + 1, SOME_ROWS + 1)  # the least rows of: one, few, some, many


def row_class(count: int) -> int:
    return sum(count >= least for least in ROW_CLASSES) - 1


def dimension(dimension: Dimension, counts: dict[str, int]) -> int:
    if isinstance(dimension, int):
        return dimension
    count, each, times, *more = dimension
    return -(-counts[count] // each) * times + sum(more)


def step_words(limits: Limits) -> int:
    """Header, four numbers a row, tiles (two each, at most one a row), slots of windows, and rows of logits."""
    return HEADER + 7 * limits.rows + limits.logit_rows


def pieces(batch: Batch) -> list[NDArray[np.intp]]:
    """Rows of the batch by piece, in order: long runs of a sequence together, the others FEW_ROWS at a time."""
    count = len(batch.tokens)
    if count <= FEW_ROWS:
        return [np.arange(count)]
    starts = np.concatenate([[0], np.flatnonzero(np.diff(batch.sequence)) + 1, [count]])
    long = np.repeat(np.diff(starts) > FEW_ROWS, np.diff(starts))
    many, few = np.flatnonzero(long), np.flatnonzero(~long)
    return [*([many] if len(many) else []), *(few[i : i + FEW_ROWS] for i in range(0, len(few), FEW_ROWS))]


def tiles(sequence: NDArray[np.int32]) -> NDArray[np.int32]:
    """(first row, rows) of tiles of one sequence each, at most TILE_ROWS rows."""
    starts = [0, *(np.flatnonzero(np.diff(sequence)) + 1).tolist(), len(sequence)]
    found = [
        (at, min(TILE_ROWS, stop - at)) for start, stop in pairwise(starts) for at in range(start, stop, TILE_ROWS)
    ]
    return np.array(found, np.int32)

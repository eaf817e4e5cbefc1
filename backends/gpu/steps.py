"""Splits a batch into pieces of one row, few rows or many rows. Pieces of many rows use attention tiles.

Runs of more than FEW_ROWS rows of one sequence are prefill and run together in tiles. All other rows run FEW_ROWS at a
time in kernels with a fixed summation order, so that decode is bitwise independent of the batch. With non-causal
attention, the rows of a sequence stay in one piece.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import Limits
from localllm.backends.gpu.device import Grid as Groups
from localllm.backends.gpu.kernels.attention import PARTITION, TILE_ROWS, partitions
from localllm.backends.gpu.kernels.kernel import FEW_ROWS, HEADER, Dimension, Grid
from localllm.backends.gpu.kernels.products import SOME_ROWS
from localllm.backends.gpu.replay import bucket
from localllm.plan import Batch, Plan, Rows

TILES: dict[Rows, str] = {"batch": "tiles", "logits": "wanted tiles"}  # name of the tile count, by kind of rows
ROW_CLASSES = (1, 2, FEW_ROWS + 1, SOME_ROWS + 1)  # minimum rows of each class: one, few, some, many


def row_class(count: int) -> int:
    return sum(count >= least for least in ROW_CLASSES) - 1


def work_groups(grid: Grid, counts: dict[str, int]) -> Groups:
    """Return the number of work-groups of a launch in each dimension."""
    x, y, z = grid
    return _dimension(x, counts), _dimension(y, counts), _dimension(z, counts)


def _dimension(dimension: Dimension, counts: dict[str, int]) -> int:
    if isinstance(dimension, int):
        return dimension
    count, each, times, *more = dimension
    return -(-counts[count] // each) * times + sum(more)


def step_words(limits: Limits, plan: Plan) -> int:
    """Return the number of words in the step buffer of a plan; see `fill_step`."""
    return HEADER + (7 + plan.axes + plan.spans) * limits.rows + limits.logit_rows


def fill_step(
    step: NDArray[np.int32], batch: Batch, rows: NDArray[np.intp], limits: Limits, causal: bool = True, axes: int = 0
) -> tuple[NDArray[np.intp], dict[str, int]]:
    """Write some rows of a batch to the step buffer.

    The buffer holds a header, then per row tokens, positions, slots and sequences, then tiles (first row, rows), slots
    of sliding windows, and rows of logits. A plan that is not `causal` has no window slots: the last position of the
    row's sequence takes their place. At the end are the positions of each row on the `axes` of rotations, and the ends
    of spans; the header says where, and the strides of rows and axes. Return the indices of these rows in `logit_rows`,
    and the counts that grids need.
    """
    place = np.full(len(batch.tokens), -1, np.int32)
    place[rows] = np.arange(len(rows))
    wanted = np.flatnonzero(place[batch.logit_rows] >= 0)
    limit, last = limits.rows, batch.positions if causal else batch.ends()
    furthest = last if batch.span_ends is None else batch.span_ends
    step[:3] = len(rows), len(wanted), batch.tables.shape[1]
    if batch.window_slots is not None and batch.window_tables is not None:
        step[3] = batch.window_tables.shape[1]
        assert causal, "with bidirectional attention, layers share their blocks"
        step[HEADER + 6 * limit : HEADER + 6 * limit + len(rows)] = batch.window_slots[rows]
    if not causal:
        step[HEADER + 6 * limit : HEADER + 6 * limit + len(rows)] = last[rows]
    for i, array in enumerate((batch.tokens, batch.positions, batch.slots, batch.sequence)):
        step[HEADER + i * limit : HEADER + i * limit + len(rows)] = array[rows]
    counts = {"batch": len(rows), "logits": len(wanted), TILES["batch"]: 0, TILES["logits"]: 0}
    counts["partitions"] = int(np.maximum(furthest, batch.positions)[rows].max()) // PARTITION + 1
    if len(rows) <= FEW_ROWS:
        counts["partitions"] = min(bucket(counts["partitions"]), partitions(limits))
    else:
        found = tiles(batch.sequence[rows], batch.positions[rows])
        counts[TILES["batch"]] = len(found)
        step[HEADER + 4 * limit : HEADER + 4 * limit + found.size] = found.reshape(-1)
    at = HEADER + 7 * limit
    step[at : at + len(wanted)] = place[batch.logit_rows[wanted]]
    step[4:7] = HEADER + limit, 1, 0  # all axes have the row's position
    if axes and batch.axes is not None:
        at += limits.logit_rows
        step[4:7] = at, axes, 1
        step[at : at + axes * len(rows)] = batch.axes[rows, :axes].reshape(-1)
    step[7] = HEADER + limit  # every span is one row
    if batch.span_ends is not None:
        step[7] = at = HEADER + (7 + axes) * limit + limits.logit_rows
        step[at : at + len(rows)] = batch.span_ends[rows]
    return wanted, counts


def pieces(batch: Batch, causal: bool = True) -> list[NDArray[np.intp]]:
    """Return the rows of each piece, in order.

    Long runs of a sequence form one piece; other rows go FEW_ROWS at a time. If the plan is not `causal`, or the batch
    has spans, short runs of a sequence are never divided; a piece holds several runs if they fit.
    """
    causal = causal and batch.span_ends is None
    count = len(batch.tokens)
    if count <= FEW_ROWS:
        return [np.arange(count)]
    starts = np.concatenate([[0], np.flatnonzero(np.diff(batch.sequence)) + 1, [count]])
    long = np.repeat(np.diff(starts) > FEW_ROWS, np.diff(starts))
    many, few = np.flatnonzero(long), np.flatnonzero(~long)
    cuts = range(0, len(few), FEW_ROWS) if causal else _whole(batch.sequence[few])
    return [*([many] if len(many) else []), *(few[a:b] for a, b in pairwise([*cuts, len(few)]))]


def _whole(sequence: NDArray[np.int32]) -> list[int]:
    """Return the first rows of pieces that have at most FEW_ROWS rows and do not divide a sequence."""
    starts = [] if not len(sequence) else [0, *(np.flatnonzero(np.diff(sequence)) + 1).tolist()]
    found: list[int] = []
    for start, stop in pairwise([*starts, len(sequence)]):
        if not found or stop - found[-1] > FEW_ROWS:
            found.append(start)
    return found


def wanted_limits(limits: Limits) -> Limits:
    """Return the limits of a step that contains only the rows whose logits are requested."""
    return replace(limits, rows=limits.logit_rows)


def tiles(sequence: NDArray[np.int32], positions: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return tiles of at most TILE_ROWS rows of one sequence in order of position, as (first row, rows)."""
    starts = [0, *(np.flatnonzero((np.diff(sequence) != 0) | (np.diff(positions) < 0)) + 1).tolist(), len(sequence)]
    found = [
        (at, min(TILE_ROWS, stop - at)) for start, stop in pairwise(starts) for at in range(start, stop, TILE_ROWS)
    ]
    return np.array(found, np.int32)

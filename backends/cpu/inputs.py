"""The inputs of a step, at fixed addresses. Kernels find the batch through a `Step`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import Limits
from localllm.backends.cpu.kernels.common import Step
from localllm.backends.cpu.memory import address
from localllm.plan import BLOCK, Batch, Rows


class Inputs:
    """The `Step` structs of a batch, and of its rows with logits if a kernel uses their positions.

    Between two tokens the weights evict everything else from the CPU caches, so `fill` does as little as possible.
    """

    def __init__(self, limits: Limits, wanted: bool, causal: bool, axes: int = 0, spans: bool = False) -> None:
        blocks = -(-limits.positions // BLOCK)
        self._steps: dict[Rows, _Steps] = {"batch": _Steps(limits.rows, limits.logit_rows, blocks, axes)}
        self._causal, self._spans = causal, spans
        if wanted:
            self._steps["logits"] = _Steps(limits.logit_rows, limits.logit_rows, blocks, axes)

    def step(self, rows: Rows = "batch", windowed: bool = False) -> NDArray[np.int64]:
        steps = self._steps[rows]
        return steps.window_step if windowed else steps.step

    def fill(self, batch: Batch) -> dict[Rows, Batch]:
        """Load a batch. Return it, and also the batch of the rows with logits if there are `Step` structs for them."""
        batches: dict[Rows, Batch] = {"batch": batch}
        if "logits" in self._steps:
            batches["logits"] = batch.wanted()
        for rows, own in batches.items():
            self._steps[rows].fill(own)
            if self._spans:
                ends = own.positions if own.span_ends is None else own.span_ends
                self._steps[rows].ends[: len(ends)] = ends
        if not self._causal:
            self._steps["batch"].ends[: len(batch.tokens)] = batch.ends()
        return batches


class _Steps:
    """A batch's arrays, and the two `Step` structs that point to them.

    Sliding-window layers with separate cache blocks read `window_step`, which has other slots and block tables.
    """

    def __init__(self, rows: int, logit_rows: int, blocks: int, axes: int) -> None:
        self.step, self.window_step = np.zeros(Step.size, np.int64), np.zeros(Step.size, np.int64)
        self._rows = np.zeros((5, rows), np.int32)
        self._logit_rows = np.zeros(logit_rows, np.int32)
        self._run_starts = np.zeros(rows + 2, np.int32)
        self.ends = np.zeros(rows, np.int32)
        self._axes = np.zeros((rows, axes), np.int32)
        self._tables: list[NDArray[np.int32]] = []  # keeps the block tables alive while kernels read them
        lists = [np.zeros(blocks, np.int32) for _ in range(2)]
        self._table_rows = [(one, address(one)) for one in lists]  # the block table of a single sequence
        for step, slots in zip((self.step, self.window_step), self._rows[3:], strict=True):
            for slot, array in zip((Step.tokens, Step.positions, Step.sequence), self._rows, strict=False):
                step[slot] = address(array)
            step[Step.slots], step[Step.logit_index] = address(slots), address(self._logit_rows)
            step[Step.run_starts], step[Step.ends] = address(self._run_starts), address(self.ends)

    def fill(self, batch: Batch) -> None:
        count, wanted = len(batch.tokens), len(batch.logit_rows)
        steps = [(self.step, batch.slots, batch.tables)]
        if batch.window_slots is not None and batch.window_tables is not None:
            steps.append((self.window_step, batch.window_slots, batch.window_tables))
        for target, source in zip(self._rows, (batch.tokens, batch.positions, batch.sequence), strict=False):
            target[:count] = source
        self._logit_rows[:wanted] = batch.logit_rows
        if self._axes.size:
            self._fill_axes(batch)
        runs = self._fill_runs(batch.sequence)
        self._tables.clear()
        for (step, slots, tables), target, row in zip(steps, self._rows[3:], self._table_rows, strict=False):
            target[:count] = slots
            step[Step.rows], step[Step.logit_rows], step[Step.runs] = count, wanted, runs
            step[Step.tables], step[Step.table_stride] = self._placed(tables, row), tables.shape[1] * 4

    def _fill_axes(self, batch: Batch) -> None:
        """Store the positions on the axes, or let all axes read the positions."""
        axes = self._axes.shape[1]
        if batch.axes is None:
            found = address(self._rows[1]), 4, 0
        else:
            self._axes[: len(batch.axes)] = batch.axes[:, :axes]
            found = address(self._axes), 4 * axes, 4
        for step in (self.step, self.window_step):
            step[Step.axes], step[Step.axes_row], step[Step.axes_stride] = found

    def _placed(self, tables: NDArray[np.int32], row: tuple[NDArray[np.int32], int]) -> int:
        """Return the address at which kernels find the block tables.

        A single table is copied to `row`, whose address is fixed.
        """
        one, at = row
        if len(tables) == 1 and tables.shape[1] <= len(one):
            one[: tables.shape[1]] = tables[0]
            return at
        self._tables.append(np.ascontiguousarray(tables, np.int32))
        return address(self._tables[-1])

    def _fill_runs(self, sequence: NDArray[np.int32]) -> int:
        """Store the first row of each sequence, and return the number of sequences."""
        starts, count = self._run_starts, len(sequence)
        if count == 1:  # decode, where microseconds per token count
            starts[0], starts[1] = 0, 1
            return 1
        found = np.flatnonzero(np.diff(sequence)) + 1
        starts[0], starts[1 : len(found) + 1], starts[len(found) + 1] = 0, found, count
        return len(found) + 1

"""Divides the attention of a step into tasks: which rows form a tile, and whether tasks are split.

The division never changes a result: the partitions of a row and the order of merging are fixed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import Limits
from localllm.backends.cpu.kernels.attention import PARTITION, Work
from localllm.backends.cpu.kernels.attention_shape import AttentionShape
from localllm.backends.cpu.memory import address
from localllm.plan import BLOCK, Batch, Rows

SPLIT_ROWS = 32  # largest batch whose tasks are split; larger batches have enough tasks, and are compute-bound
SPLIT_BYTES = 16 << 20  # bytes for the partition states, unless a single row needs more
TASKS_PER_THREAD = 6  # minimum task count, so that threads finish at about the same time
READING = 0.3  # cost of reading a block's rows for some pieces, relative to the arithmetic of a piece (Zen 4)


class Sharing:
    """The `Work` struct of one kernel, filled for every step."""

    def __init__(self, shape: AttentionShape, window: int, limits: Limits, threads: int, rows: Rows = "batch") -> None:
        most = limits.rows if rows == "batch" else limits.logit_rows
        self.work = np.zeros(Work.size, np.int64)
        self._tiles = np.zeros((most, 2), np.int32)
        self._at = address(self._tiles)
        self._shape, self._window, self._threads = shape, window, threads
        self._wanted: tuple[bool, int, bool] | None = None  # arguments of the last `_heads`
        self._found = 1  # the result of the last `_heads`: pieces per task
        self._of_partition = shape.pieces * shape.state_bytes(shape.piece)
        longest = shape.listed(limits.positions - 1, window)
        row = -(-longest // (BLOCK * PARTITION)) * self._of_partition
        self.partial_bytes = max(row, min(SPLIT_BYTES, row * min(most, SPLIT_ROWS)))

    def fill(self, batch: Batch, last: int) -> None:
        """Fill the struct for a batch whose largest position is `last`."""
        shape, rows = self._shape, len(batch.tokens)
        tiles = fill_tiles(self._tiles, batch, shape.tokens)
        partitions = -(-shape.listed(last, self._window) // (BLOCK * PARTITION))
        seen = min(partitions, self._window // (BLOCK * PARTITION) + 2) if shape.window else partitions
        split = seen > 1 and rows <= SPLIT_ROWS and rows * partitions * self._of_partition <= self.partial_bytes
        wanted = (rows > SPLIT_ROWS, tiles * (seen if split else 1), split)
        if wanted != self._wanted:  # most steps have the same division as the previous step
            self._wanted, self._found = wanted, self._heads(*wanted)
        work = self.work
        work[Work.tiles], work[Work.tile_rows], work[Work.split] = tiles, self._at, split
        work[Work.heads], work[Work.partitions] = self._found, partitions

    def _heads(self, many: bool, parts: int, split: bool) -> int:
        """Return the number of pieces per task. `parts` counts tiles, or their partitions if tasks are split.

        `many` means that the batch has more than SPLIT_ROWS rows.
        """
        shape, threads = self._shape, self._threads
        if split:
            most = shape.kv_heads if shape.slices == 1 else 1  # heads with separate selections get separate tasks
            found = [n for n in range(1, most + 1) if shape.kv_heads % n == 0]
            enough = [n for n in found if parts * (shape.kv_heads // n) >= TASKS_PER_THREAD * threads]
            if enough or shape.of_head == 1:
                return shape.of_head * max(enough, default=1)
        if many:
            return shape.of_head
        divisors = [n for n in range(1, shape.of_head + 1) if shape.of_head % n == 0]
        # number of tasks of the busiest thread
        turns = {n: -(-parts * shape.pieces // (n * threads)) for n in divisors}
        return min(divisors, key=lambda n: turns[n] * (n + READING))


def fill_tiles(tiles: NDArray[np.int32], batch: Batch, size: int) -> int:
    """Fill `tiles` with (first row, number of rows) and return the number of tiles.

    A tile is a run of rows of one sequence at consecutive positions. It never crosses a multiple of `size`, so all its
    rows attend to the same cache blocks.
    """
    count = len(batch.tokens)
    if count == 1:
        tiles[0, 0], tiles[0, 1] = 0, 1
        return 1
    if not count or size == 1:
        tiles[:count, 0], tiles[:count, 1] = np.arange(count), 1
        return count
    follows = (np.diff(batch.positions) == 1) & (np.diff(batch.sequence) == 0) & (batch.positions[1:] % size != 0)
    starts = np.concatenate([[0], np.flatnonzero(~follows) + 1])
    tiles[: len(starts), 0] = starts
    tiles[: len(starts), 1] = np.diff(np.append(starts, count))
    return len(starts)

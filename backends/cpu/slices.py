"""`Slices`: a stage of a plan in slices of time, between which other programs may use the threads.

A slice ends between two pieces of a kernel (`pieces.py`), or within one: threads take no further task once its time is
over. The counters of tasks remember how far they are, so the next slice continues within the same piece.
"""

from __future__ import annotations

from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from localllm.backends.cpu.kernels.common import TaskLine
from localllm.backends.cpu.pieces import Pieces
from localllm.backends.cpu.pool import ThreadPool

LEAST = 1e-4  # seconds of a slice in which a piece is begun


class Slices:
    """The pieces of a stage and the number of finished ones. All slices use the same threads."""

    def __init__(self, pool: ThreadPool, pieces: Pieces, counters: NDArray[np.int64], threads: int) -> None:
        """`counters` has a row per call of the stage."""
        self._pool, self._counters, self._threads = pool, counters, threads
        self._pieces, self._entries = pieces, pieces.entries
        self._at, self._paused = 0, False
        self.seconds = self.late = 0.0  # of all slices; `late` is the time that a thread waited for others too long

    def run(self, seconds: float) -> bool:
        """Run for about this time. Return whether the stage is done."""
        until = perf_counter() + seconds
        while self._at < len(self._entries):
            if not self._run_entry(max(until - perf_counter(), LEAST)):
                return False
            self._at += 1
            if perf_counter() >= until:
                break
        return self._at == len(self._entries)

    def _run_entry(self, seconds: float) -> bool:
        """Begin or continue a piece. Return whether it is done."""
        entry, counters = self._entries[self._at : self._at + 1], self._counters[self._pieces.calls[self._at]]
        if not self._paused:
            counters[:] = 0
        rate = self._pool.cycles_per_second
        counters[:, TaskLine.cycles] = max(int(seconds * rate), 1) if rate else 0
        counters[:, TaskLine.paused] = 0
        took, late = self._pool.run(entry, counters, self._threads, resume=True)
        self.seconds, self.late = self.seconds + took, self.late + late * took
        # A thread that has not paused has found no task left.
        self._paused = bool(counters[: self._threads, TaskLine.paused].all())
        return not self._paused

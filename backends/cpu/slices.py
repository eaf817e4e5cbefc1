"""`Slices`: a stage of a plan in slices of time, between which other programs may use the threads.

Threads take no further task once the time of a slice is over. The counters of tasks remember how far they are, so the
next slice continues within the same kernel. Kernels that are divided by rows are short, and run whole.
"""

from __future__ import annotations

from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from localllm.backends.cpu.kernels.common import TaskLine
from localllm.backends.cpu.kernels.executor import Entry
from localllm.backends.cpu.pool import ThreadPool

LEAST = 1e-4  # seconds of a slice in which a kernel is begun


class Slices:
    """The entries of a stage and the number of finished ones. All slices use the same threads."""

    def __init__(self, pool: ThreadPool, entries: NDArray[np.int64], counters: NDArray[np.int64], threads: int) -> None:
        self._pool, self._counters, self._threads = pool, counters, threads
        self._entries = entries.copy()
        self._entries[:, Entry.barrier] = 1  # each entry is a batch
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
        """Begin or continue a kernel. Return whether it is done."""
        entry, counters = self._entries[self._at : self._at + 1], self._counters[self._at]
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

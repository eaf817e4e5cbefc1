"""Worker threads that live as long as the backend: they replay plans inside compiled code and sleep between answers."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
from numpy.typing import NDArray

from backends.cpu.jit import Library
from backends.cpu.kernels import executor
from backends.cpu.kernels.executor import Sync
from backends.cpu.memory import address

IDLE_SPINS = 200_000  # a few milliseconds: longer than sampling a token takes, short enough not to heat an idle machine


class Pool:
    """`threads` threads counting the caller's; `run` replays a plan on all of them."""

    def __init__(self, library: Library, threads: int) -> None:
        kernels = [executor.step(), executor.worker()]
        library.load(kernels)
        word = ctypes.c_int64
        self._step = ctypes.CFUNCTYPE(word, word, word)(library.address("step"))
        self._worker = ctypes.CFUNCTYPE(word, word, word, word, word)(library.address("worker"))
        self.threads = threads
        self._sync = np.zeros(int(Sync.THREAD) + 8 * (threads + 1), np.int64)
        sched_yield = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value
        assert sched_yield is not None
        self._sync[Sync.YIELD] = sched_yield
        self._wake = [threading.Event() for _ in range(1, threads)]
        self._workers = [
            threading.Thread(target=self._work, args=(i, event), daemon=True, name=f"localllm-cpu-{i}")
            for i, event in enumerate(self._wake, start=1)
        ]
        for thread in self._workers:
            thread.start()

    def _work(self, thread: int, wake: threading.Event) -> None:
        while True:
            wake.wait()
            wake.clear()  # before looking: a command given after this wakes us again
            if self._worker(address(self._sync), thread, self.threads, IDLE_SPINS):
                return

    def run(self, plan: NDArray[np.int64], counters: NDArray[np.int64]) -> None:
        """Replay `plan` (operations, Entry.SIZE) once; its last entry has a barrier. `counters` (n, 8) are zeroed."""
        sync = self._sync
        sync[Sync.PLAN], sync[Sync.COUNT] = address(plan), len(plan)
        counters[:] = 0
        sync[Sync.COMMAND] += 1  # before waking anyone: a worker that finds no command goes back to sleep
        for event in self._wake:
            event.set()
        self._step(address(sync), self.threads)

    def close(self) -> None:
        self._sync[Sync.QUIT] = 1
        for event in self._wake:
            event.set()
        for thread in self._workers:
            thread.join(timeout=5)

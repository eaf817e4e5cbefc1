"""Worker threads that run plans in compiled code. They sleep between requests, and live as long as the backend."""

from __future__ import annotations

import ctypes
import platform
import sys
import threading
from queue import SimpleQueue
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import BackendError
from localllm.backends.cpu.jit import Library
from localllm.backends.cpu.kernels import executor
from localllm.backends.cpu.kernels.executor import COMMAND, Own, Sync, own_slot
from localllm.backends.cpu.memory import address
from localllm.base.notices import Notice, Setting

MEASURED = 1e-3  # seconds; the cycles of shorter batches say little
IDLE_SPINS = 200_000  # a few milliseconds: longer than sampling takes, too short to heat an idle machine

FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98}  # number of the Linux futex system call


class ThreadPool:
    """`threads` threads including the caller. `run` executes a plan on all of them."""

    def __init__(self, library: Library, threads: int) -> None:
        kernels = [executor.step(), executor.worker()]
        library.load(kernels)
        word = ctypes.c_int64
        self._step = ctypes.CFUNCTYPE(word, word)(library.address("step"))
        self._worker = ctypes.CFUNCTYPE(word, word, word, word)(library.address("worker"))
        self._library = library  # keeps the workers' code alive
        self.threads = threads
        self._sync = np.zeros(own_slot(threads), np.int64)
        self._at = address(self._sync)  # each call of `address` takes a microsecond
        self._plan, self._plan_at = self._sync, self._at  # the last plan and its address, or a placeholder
        self.spins = executor.SPINS
        self._overdue = 0  # `Sync.overdue` after the last batch
        self.cycles_per_second = 0.0  # of the time-stamp counter; 0: not measured yet, or it does not count here
        self._sync[Sync.sched_yield] = _system("SwitchToThread" if sys.platform == "win32" else "sched_yield")
        if sys.platform == "linux" and platform.machine() in FUTEX:
            self._sync[Sync.syscall], self._sync[Sync.futex] = _system("syscall"), FUTEX[platform.machine()]
        self._running = threading.Lock()
        # Queues written in C: unlike threading's locks, they stay consistent if Ctrl-C raises an exception.
        self._beds: list[SimpleQueue[None]] = [SimpleQueue() for _ in range(threads)]
        self._asleep = [False] * threads
        self._workers = [
            threading.Thread(target=self._work, args=(i,), daemon=True, name=f"localllm-cpu-{i}")
            for i in range(1, threads)
        ]
        for started, thread in enumerate(self._workers):
            try:
                thread.start()
            except RuntimeError:  # no memory for a stack, or the system's thread limit is reached
                self._workers = self._workers[:started]
                self.close()
                problem = f"only {started + 1} of {threads} threads can be started"
                raise BackendError(Notice(problem, "; give fewer (", Setting("threads"), ")")) from None

    @property
    def spins(self) -> int:
        """Iterations of about 50 nanoseconds that a thread spins at a barrier before it sleeps."""
        return int(self._sync[Sync.spins])

    @spins.setter
    def spins(self, turns: int) -> None:
        self._sync[Sync.spins] = turns

    @property
    def slept(self) -> int:
        """Number of times that a thread slept at a barrier."""
        return int(self._sync[Sync.slept])

    def _work(self, thread: int) -> None:
        sync, bed, seen = self._sync, self._beds[thread], own_slot(thread) + Own.seen
        while not self._worker(address(sync), thread, IDLE_SPINS):
            self._asleep[thread] = True  # set before the check: a later request sees it and wakes this thread
            asked = int(sync[Sync.asked])
            wanted = asked != sync[seen] and thread < asked % COMMAND
            if not wanted and not sync[Sync.quit]:
                bed.get()
            self._asleep[thread] = False
            while not bed.empty():
                bed.get()

    def _wake(self, threads: int) -> None:
        for thread in range(1, threads):
            if self._asleep[thread]:
                self._beds[thread].put(None)

    def run(
        self, plan: NDArray[np.int64], counters: NDArray[np.int64], threads: int = 0, resume: bool = False
    ) -> tuple[float, float]:
        """Run `plan` (operations, Entry.size) once on the first `threads` threads; 0: all threads.

        The plan's last entry has a barrier. With `resume`, tasks that `counters` count are not run again. Return the
        duration in seconds, and the share of its time that a thread, on average, waited at barriers beyond the spin
        limit.
        """
        sync, threads = self._sync, threads or self.threads
        with self._running:
            if sync[Sync.quit]:
                raise BackendError("the cpu backend is closed; open it again")
            if plan is not self._plan:
                self._plan, self._plan_at = plan, address(plan)
            sync[Sync.plan], sync[Sync.count] = self._plan_at, len(plan)
            if not resume:
                counters[:] = 0
            try:
                number = int(sync[Sync.command]) // COMMAND + 1
                sync[Sync.asked] = number * COMMAND + threads  # before waking, so that no worker goes back to sleep
                self._wake(threads)
                began = perf_counter()
                self._step(self._at)
                seconds = perf_counter() - began
                if seconds > MEASURED:
                    self.cycles_per_second = int(sync[Sync.took]) / seconds
                if threads == 1:
                    return seconds, 0.0
                overdue, self._overdue = self._overdue, int(sync[Sync.overdue])
                return seconds, (self._overdue - overdue) / max(int(sync[Sync.took]) * (threads - 1), 1)
            finally:
                sync[Sync.asked] = sync[Sync.command]  # if Ctrl-C came before the batch started, cancel the request

    def close(self) -> None:
        """Stop the threads, after any batch that another thread is running."""
        with self._running:
            self._sync[Sync.quit] = 1
        self._wake(self.threads)
        for thread in self._workers:
            # the garbage collector may close the backend in a worker thread
            if thread is not threading.current_thread():
                thread.join(timeout=5)


def _system(name: str) -> int:
    """Return the address of a function of the C library, or of kernel32 on Windows."""
    library = ctypes.CDLL("kernel32" if sys.platform == "win32" else None)
    found = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert found is not None
    return found

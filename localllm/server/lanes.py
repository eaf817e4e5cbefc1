"""Lanes: worker threads for blocking work. Each lane has a queue that is fair between accounts.

A lane runs one job at a time. The next job is the oldest job of the account that has used the least time, so an account
with many jobs delays another account by at most one job. Callers limit the number of jobs. Large texts have a separate
lane, so that short texts never wait for them. A lane for memory-intensive jobs returns memory to the system between
jobs.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from time import monotonic
from typing import Any, NamedTuple, TypeVar

from localllm.base.machine.heap import return_pages
from localllm.server.accounts import ACCOUNT

T = TypeVar("T")
LARGE = 1 << 15  # characters or values above which a job goes to the large lane
MOST_ACCOUNTS = 1000  # accounts whose used time is remembered
IDLE_SECONDS = 1.0  # time that an idle thread waits for a job before it ends
RETURN_SECONDS = 1.0  # minimum time between two calls that return memory to the system


class Lane:
    """A queue of jobs that run one at a time, in a thread that exists only while there are jobs."""

    def __init__(self, name: str, heavy: bool = False) -> None:
        """Create an empty lane. `heavy` jobs take much memory, which the C library would otherwise keep."""
        self._name, self._heavy = name, heavy
        self._waiting: dict[str, deque[_Job]] = {}  # account -> its jobs
        self._used: dict[str, float] = {}  # account -> seconds used; at least `_now` after idling
        self._now = 0.0  # seconds used by the newest job's account before that job
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    async def run(self, job: Callable[[], T], stop: Callable[[], None] | None = None) -> T:
        """Run a job for the account of the current request. If the caller is cancelled, a queued job is dropped.

        On cancellation `stop` is called from the event loop. It must end a job that is running or just starting.
        """
        made = _Job(job, Future())
        account = ACCOUNT.get()
        with self._changed:
            if self._closed:
                raise RuntimeError("the lane is closed")
            if account not in self._waiting:  # an account gains no credit while it is idle
                self._used[account] = max(self._used.pop(account, 0.0), self._now)
                self._waiting[account] = deque()
            self._waiting[account].append(made)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()
        try:
            found: T = await asyncio.wrap_future(made.future)
        except asyncio.CancelledError:
            if stop is not None:
                stop()
            raise
        return found

    def close(self) -> None:
        """Drop the queued jobs, and end the thread after its current job."""
        with self._changed:
            self._closed = True
            for jobs in self._waiting.values():
                for job in jobs:
                    job.future.cancel()
            self._waiting.clear()
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _loop(self) -> None:
        returned, used = 0.0, False
        while (found := self._next()) is not None:
            account, job = found
            if not job.future.set_running_or_notify_cancel():
                continue
            began = monotonic()
            try:
                job.future.set_result(job.work())
            except BaseException as error:  # passed on to the caller
                job.future.set_exception(error)
            del job, found
            used = self._heavy
            if used and monotonic() - returned > RETURN_SECONDS:
                return_pages()
                returned, used = monotonic(), False
            with self._changed:
                self._used[account] = self._used.get(account, 0.0) + monotonic() - began
                if len(self._used) > MOST_ACCOUNTS:  # accounts with queued jobs keep their time, or they would go first
                    idle = [name for name in self._used if name not in self._waiting]
                    for name in idle[: len(self._used) - MOST_ACCOUNTS]:
                        del self._used[name]
        if used:
            return_pages()

    def _next(self) -> tuple[str, _Job] | None:
        """Wait briefly for a job and take it from the queue. Return None after a timeout, which ends the thread."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting) or self._closed, IDLE_SECONDS)
            if not self._waiting:
                self._thread = None
                return None
            account = min(self._waiting, key=lambda name: self._used.get(name, 0.0))
            self._now, jobs = self._used.get(account, 0.0), self._waiting[account]
            job = jobs.popleft()
            if not jobs:
                del self._waiting[account]
            return account, job


class _Job(NamedTuple):
    """A job and the future for its result."""

    work: Callable[[], Any]
    future: Future[Any]


def is_large(*values: Any) -> bool:
    """Return whether the values of a request have many characters or many elements."""
    left, waiting = LARGE, list(values)
    while waiting and left > 0:
        value = waiting.pop()
        left -= 1
        if isinstance(value, str | bytes):
            left -= len(value)
        elif isinstance(value, dict):
            left -= len(value)
            waiting += value.values() if left > 0 else ()
            left -= sum(map(len, value)) if left > 0 and all(isinstance(name, str) for name in value) else 0
        elif isinstance(value, list | tuple):
            left -= len(value) // 16  # token ids are cheap
            waiting += (each for each in value if not isinstance(each, int)) if left > 0 else ()
    return left <= 0

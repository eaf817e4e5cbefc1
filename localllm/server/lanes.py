"""Lanes: threads for work that blocks, each with a queue in which accounts take turns.

A lane runs one job at a time. The next job is the oldest one of the account that has used the least time, so that many
jobs of one account hold up another account's by one job at most. Jobs are bounded by their callers. Large texts
have a separate lane, so that short texts never wait for them. A lane for jobs that take much memory returns it to the
system between them.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from time import monotonic
from typing import Any, NamedTuple, TypeVar

from localllm.machine.heap import return_pages
from localllm.server.accounts import ACCOUNT

T = TypeVar("T")
LARGE = 1 << 15  # characters, and values: from here on a job belongs in the lane of large ones
MOST_ACCOUNTS = 1000  # whose used time is remembered
IDLE_SECONDS = 1.0  # that a thread waits for a further job before it ends
RETURN_SECONDS = 1.0  # between two returns of memory to the system


class Lane:
    """Jobs that run one at a time, in a thread that is there while there are any."""

    def __init__(self, name: str, heavy: bool = False) -> None:
        """`heavy`: jobs take much memory, which the C library would keep."""
        self._name, self._heavy = name, heavy
        self._waiting: dict[str, deque[_Job]] = {}  # account -> its jobs
        self._used: dict[str, float] = {}  # account -> seconds of its jobs, those it could have had included
        self._now = 0.0  # what the account of the newest job had used before it
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    async def run(self, job: Callable[[], T], stop: Callable[[], None] | None = None) -> T:
        """Run a job for the account of the current request. If the caller is cancelled, a waiting job is dropped.

        `stop` is called then, from the event loop: it must end a job that runs, and one that starts at that moment.
        """
        made = _Job(job, Future())
        account = ACCOUNT.get()
        with self._changed:
            if self._closed:
                raise RuntimeError("the lane is closed")
            if account not in self._waiting:  # an idle account saves up no time
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
        """Drop the jobs that wait, and end the thread after its current job."""
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
            except BaseException as error:  # the caller's to handle
                job.future.set_exception(error)
            del job, found
            used = self._heavy
            if used and monotonic() - returned > RETURN_SECONDS:
                return_pages()
                returned, used = monotonic(), False
            with self._changed:
                self._used[account] = self._used.get(account, 0.0) + monotonic() - began
                if len(self._used) > MOST_ACCOUNTS:  # those that wait keep their time, or they would go first
                    idle = [name for name in self._used if name not in self._waiting]
                    for name in idle[: len(self._used) - MOST_ACCOUNTS]:
                        del self._used[name]
        if used:
            return_pages()

    def _next(self) -> tuple[str, _Job] | None:
        """Wait a moment for a job, and take it from its queue; None after that: the thread ends."""
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
    """A job, and where its result goes."""

    work: Callable[[], Any]
    future: Future[Any]


def is_large(*values: Any) -> bool:
    """Whether values from outside have many characters, or many values in them."""
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

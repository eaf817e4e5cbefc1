"""Event streams of requests. A thread that reads a stream steps the core until the next event arrives.

Several threads may read streams of one core. One thread steps for all of them while the others wait. Between reads, a
stream buffers at most AHEAD events, so that threads that read at about the same time share steps.
"""

from __future__ import annotations

import threading
from _signal import getsignal, signal  # type: ignore[import-not-found]
from collections import deque
from collections.abc import Callable, Iterator
from signal import SIGINT, default_int_handler
from threading import get_ident, main_thread
from types import FrameType
from typing import TypeVar

from localllm.base.errors import LocalLLMError
from localllm.generation.core import Core
from localllm.generation.request import Event, Failed, Finished, Request
from localllm.generation.request_state import RequestState, Ticket
from localllm.sampling.sampler import Sampler

T = TypeVar("T")
_MOST_IDLE = 10_000  # maximum steps without work while a thread waits; beyond it, a bug is reported instead of hanging
AHEAD = 8  # maximum unread events of a stream before its request is paused

# `_signal` is used because the functions of `signal` convert to enums, which costs 10 microseconds per token.
_SIGINT = int(SIGINT)


class Uninterrupted:
    """Context manager that delays KeyboardInterrupt until its block ends.

    It does nothing outside the main thread, or if the program has set its own handler for SIGINT.
    """

    pending = False  # whether SIGINT has arrived
    _held = False

    def __enter__(self) -> Uninterrupted:
        if get_ident() == main_thread().ident and getsignal(_SIGINT) is default_int_handler:
            signal(_SIGINT, self._hold)
            self._held = True
        return self

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self.pending = True

    def __exit__(self, *error: object) -> None:
        if self._held:
            signal(_SIGINT, default_int_handler)
            if self.pending:
                raise KeyboardInterrupt


class Stepper:
    """Steps a core on behalf of all waiting threads, in one thread at a time."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._turn = threading.Condition()  # reentrant: a stream may be garbage-collected at any point
        self._thread: int | None = None  # the stepping thread
        self._waiting = 0  # number of waiting threads
        self._closed: LocalLLMError | None = None
        self._swept = True  # False if a request was cancelled after the last step

    def stream(
        self,
        request: Request,
        stop: threading.Event | None = None,
        ahead: int | None = AHEAD,
        sampler: Sampler | None = None,
    ) -> Stream:
        """Queue a request and return its event stream. Raise ContextFull if the prompt does not fit into the context.

        Setting `stop` ends the answer. The request pauses while `ahead` events are unread (None: never). If a `sampler`
        is given, the request uses it and continues its random sequence.
        """
        if self._closed is not None:
            raise self._closed
        self.refuse_within()
        events = deque[Event]()
        wanted = None if ahead is None else lambda: len(events) < ahead
        ticket = Ticket(request, events.append, wanted, stop)
        one = self.core.new_state(ticket, sampler)
        stream = Stream(self, ticket, events)  # created before `put`, so that an interrupt closes the stream
        self.put(lambda: self._add(one), alone=False)
        return stream

    def _add(self, one: RequestState) -> None:
        if self._closed is not None:  # the stepper was closed after the request was queued
            one.fail(self._closed)
        else:
            self.core.running.waiting.append(one)

    def put(self, job: Callable[[], None], alone: bool = True) -> None:
        """Queue a job, which the next stepping thread runs between two steps; `alone`: with no step in flight."""
        with Uninterrupted():
            self.core.inbox.put((job, alone))
            self._wake()

    def run(self, job: Callable[[], T], alone: bool = True) -> T:
        """Run a job as `put` does; return its result."""
        done: list[T] = []
        failed: list[BaseException] = []

        def work() -> None:
            try:
                done.append(job())
            except BaseException as error:
                failed.append(error)

        if self._closed is not None:
            raise self._closed
        self.refuse_within()
        self.put(work, alone)
        self.until(lambda: done or failed)
        if failed:
            raise failed[0]
        return done[0]

    def until(self, ready: Callable[[], object]) -> None:
        """Step until `ready()` is true, or wait while another thread steps. Ctrl-C takes effect between two steps."""
        with Uninterrupted() as interrupts:
            self._until(ready, interrupts)

    def _until(self, ready: Callable[[], object], interrupts: Uninterrupted) -> None:
        """Return when `ready()` is true, or earlier on an interrupt."""
        with self._turn:
            while self._thread is not None and not ready():
                self.refuse_within()
                self._wait()
                if interrupts.pending:
                    return
            if ready():
                return
            self._thread = threading.get_ident()
        try:
            idle = 0
            while not ready() and not interrupts.pending:
                idle = 0 if self.core.step() else idle + 1
                assert idle < _MOST_IDLE, "a request waits forever"
                if self._waiting:
                    self._wake()
        finally:
            self._leave()

    def refuse_within(self) -> None:
        """Raise LocalLLMError if this thread is already inside a step, where waiting would deadlock."""
        if self._thread == threading.get_ident():
            raise LocalLLMError("the model is in the middle of a step; a function that it calls cannot use it")

    def step(self) -> None:
        """Run one step when no other thread steps. Wait until there is work."""
        with self._turn:
            while self._thread is not None or not self.core.busy:
                self._wait()
            self._thread = threading.get_ident()
        try:
            self.core.step()
        finally:
            self._leave()

    def sweep(self) -> None:
        """Free the blocks of cancelled requests, or let the stepping thread do so after its step. Never blocks."""
        with Uninterrupted():
            self._swept = False
            with self._turn:
                if self._thread is not None:
                    return
                self._thread = threading.get_ident()
            self._leave()

    def close(self, error: LocalLLMError, afterwards: Callable[[], None] = lambda: None) -> None:
        """End all requests with `error` and refuse new ones with it. Then call `afterwards` between two steps."""
        with Uninterrupted():
            self._closed = error
            self.put(lambda: self.core.running.end(error), alone=False)  # the steps in flight are given up
            self.put(afterwards)
            self.sweep()

    def settle(self) -> None:
        """Wait until no other thread steps."""
        with self._turn:
            while self._thread not in (None, threading.get_ident()):
                self._wait()

    def _leave(self) -> None:
        """Free requests cancelled during the step, then let another thread step."""
        try:
            while not self._let_go(unswept=False):
                self.core.receive()
                self.core.running.drop_cancelled()
        except BaseException:  # on an interrupt
            self._let_go(unswept=True)
            raise

    def _let_go(self, unswept: bool) -> bool:
        """Let other threads step unless a cancelled request must be freed first; return whether they may.

        With `unswept`, always let them step.
        """
        with self._turn:
            if not self._swept and not unswept:
                self._swept = True
                return False
            self._thread = None
            if self._waiting:
                self._turn.notify_all()
            return True

    def _wait(self) -> None:
        self._waiting += 1
        try:
            self._turn.wait()
        finally:
            self._waiting -= 1

    def _wake(self) -> None:
        with self._turn:
            self._turn.notify_all()


class Stream(Iterator[Event]):
    """Yields the events of a request, ending with `Finished`. Raises the error if the request fails. `close` cancels
    it.
    """

    def __init__(self, stepper: Stepper, ticket: Ticket, events: deque[Event]) -> None:
        self._stepper, self._ticket, self._events = stepper, ticket, events
        self._ready = events.__len__
        self._over = False

    def __next__(self) -> Event:
        if self._over:
            raise StopIteration
        if not self._events:
            self._stepper.until(self._ready)
        event = self._events.popleft()
        if isinstance(event, Failed):
            self._over = True
            raise event.error
        self._over = isinstance(event, Finished)
        return event

    def close(self) -> None:
        """Cancel the request and free its blocks."""
        if not self._over:
            with Uninterrupted():
                self._over = True
                self._ticket.cancel()
                self._stepper.sweep()

    def __del__(self) -> None:
        self.close()

"""The scheduler of a server: steps a core in a separate thread, and limits the number of open requests.

scheduler = Scheduler(model.new_core(SchedulerLimits()))
ticket = scheduler.submit(Request(prompt, sampling), listener)
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from time import perf_counter
from typing import Protocol, TypeVar

from localllm.base.closing import Closing
from localllm.base.errors import LocalLLMError
from localllm.generation.errors import Stopped
from localllm.generation.interfaces import Load, SchedulerLimits, Slot
from localllm.generation.open_requests import OpenRequests
from localllm.generation.request import Event, Request
from localllm.generation.request_state import RequestState, Ticket
from localllm.generation.slots import Slots
from localllm.generation.stream import Stepper

T = TypeVar("T")
SEEN_SECONDS = 0.1  # interval between counts of cached blocks for `load`; a count takes up to 0.3 ms


class RequestScheduler(Protocol):
    """What a server needs of a scheduler, wherever its model runs. It has the methods of `Scheduler`."""

    limits: SchedulerLimits

    def submit(self, request: Request, listener: Callable[[Event], None]) -> Ticket: ...

    def load(self) -> Load: ...

    def forget(self) -> None: ...

    def between(self, job: Callable[[Slots], T]) -> Future[T]: ...

    def close(self) -> None: ...


class Scheduler(Closing):
    """Runs requests in its thread until it is closed."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper, self._running = stepper, stepper.core.running
        self.engine, self.limits = stepper.core.engine, stepper.core.limits
        self._lock = threading.Lock()
        self._open = OpenRequests()
        self._stopped: LocalLLMError | None = None
        self._closing = False
        self._seen, self._seen_at = (0, 0, self.engine.free_blocks), 0.0  # cached tokens, cached blocks, free blocks
        self._thread = threading.Thread(target=self._loop, name="scheduler", daemon=True)
        self._thread.start()

    # -- for any thread --------------------------------------------------------------------------------------------

    def submit(self, request: Request, listener: Callable[[Event], None]) -> Ticket:
        """Queue a request. The scheduler's thread calls `listener` with the request's events.

        Raise ContextFull if the prompt does not fit into the context, QueueFull if too many requests are open in total
        or for this account, and Stopped if the scheduler has stopped.
        """
        account = request.account
        ticket = Ticket(request, listener, ended=lambda: self._open.leave(account))
        one = self._stepper.core.new_state(ticket)
        with self._lock:
            if self._stopped is not None:
                raise self._stopped
            self._open.enter(account, self.limits.parallel + self.limits.waiting)
            self._stepper.put(lambda: self._running.waiting.append(one), alone=False)
        return ticket

    def load(self) -> Load:
        """Return the current load. Request counts may be one step old, cache counts up to 0.1 s old."""
        running = tuple(map(_slot, list(self._running.active)))
        tokens, blocks, free = self._seen
        waiting = max(0, self._open.count - len(running))
        return Load(running, waiting, tokens, blocks, free, self.engine.pool.blocks)

    @property
    def recovering(self) -> float:
        """Seconds since a part of the executable was lost; 0: it runs."""
        return self._stepper.core.recovering

    def forget(self) -> None:
        """Clear the prefix cache at the next step."""
        self.between(lambda _: self._running.prefixes.clear())

    def between(self, job: Callable[[Slots], T]) -> Future[T]:
        """Run a job on the slots in the scheduler's thread, between two steps. Raise Stopped if the scheduler has
        stopped.
        """
        future = Future[T]()

        def run() -> None:
            if not future.set_running_or_notify_cancel():  # it was cancelled
                return
            try:
                future.set_result(job(self._running.slots))
            except Exception as error:  # re-raised in the thread that waits for the result
                future.set_exception(error)

        with self._lock:
            if self._stopped is not None:
                raise self._stopped
            self._stepper.put(run)
        return future

    def close(self) -> None:
        """End all requests with the error Stopped, and stop the thread."""
        with self._lock:
            self._stopped = self._stopped or Stopped("the server is shutting down")
        self._stepper.put(self._close, alone=False)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            while not self._closing:
                if not self._running.busy or perf_counter() - self._seen_at > SEEN_SECONDS:
                    self._look()
                self._stepper.step()
        except BaseException as error:  # on a bug, end all requests, so that no client waits forever
            traceback.print_exc()
            with self._lock:
                self._stopped = Stopped(f"the scheduler stopped after an error: {error}")
        finally:
            with suppress(LocalLLMError):  # the model was closed, which already ended all requests
                self._stepper.run(lambda: self._running.end(self._stopped), alone=False)

    def _close(self) -> None:
        self._closing = True

    def _look(self) -> None:
        """Count the cached tokens and blocks. Runs in the stepping thread, which changes them."""
        kept = list(self._running.prefixes)
        blocks = {block for sequence in kept for block in sequence.blocks}
        tokens = sum(sequence.length for sequence in kept)
        self._seen, self._seen_at = (tokens, len(blocks), self.engine.free_blocks), perf_counter()


def _slot(one: RequestState) -> Slot:
    sequence = one.sequence  # read once: the stepping thread sets it to None when the request ends
    evaluated = sequence.length if sequence is not None else 0
    return Slot(one.number, one.request.client, one.prompt_tokens, evaluated, one.answer_tokens)

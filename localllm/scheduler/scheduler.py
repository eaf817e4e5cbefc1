"""The scheduler: runs many requests on one engine, a step at a time, in a thread of its own.

running.py decides who runs, steps.py takes the steps. The tokens of a request do not depend on its company: the
engine's rows do not, drafted tokens are accepted only if they would have been chosen anyway, and each request has its
own random numbers.

    scheduler = Scheduler(engine, tokenizer, model.sampler, SchedulerLimits())
    ticket = scheduler.submit(Request(prompt, sampling), listener)
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Generic, TypeVar

from localllm.closing import Closing
from localllm.engine import ContextFull, Engine
from localllm.errors import LocalLLMError
from localllm.notice import Notice, Setting
from localllm.options import SamplingOptions
from localllm.sampling.repetition import Breakers
from localllm.sampling.sampler import Sampler
from localllm.scheduler.answering import Answering
from localllm.scheduler.drafts import Drafts
from localllm.scheduler.errors import QueueFull, Stopped
from localllm.scheduler.interfaces import Load, Observer, SchedulerLimits, Slot, Store
from localllm.scheduler.places import Places
from localllm.scheduler.request import Event, Request, Ticket, within_share
from localllm.scheduler.running import Running
from localllm.scheduler.steps import Steps
from localllm.tokenizer import Tokenizer

T = TypeVar("T")
SEEN_SECONDS = 0.1  # between looks at the cache for `load`: counting the blocks of windows takes up to 0.3 ms


class Scheduler(Closing):
    """Runs requests until it is closed."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        sampler: Callable[[SamplingOptions, Breakers | None], Sampler],
        limits: SchedulerLimits | None = None,
        drafts: Drafts | None = None,
        observer: Observer | None = None,
        store: Store | None = None,
    ) -> None:
        self.engine, self.limits = engine, limits or SchedulerLimits()
        self._tokenizer, self._sampler = tokenizer, sampler
        self._running = Running(engine, self.limits, drafts, store, self._ended)
        self._steps = Steps(engine, self.limits, self._running, drafts, observer)
        self._inbox: queue.SimpleQueue[Answering | _Job[Any] | None] = queue.SimpleQueue()
        self._number = 0
        self._lock = threading.Lock()
        self._open = 0  # requests that have not ended
        self._accounts: Counter[str] = Counter()  # open requests of each account
        self._stopped: LocalLLMError | None = None
        self._seen, self._seen_at = (0, 0, engine.free_blocks), 0.0  # tokens and blocks kept, blocks free
        self._thread = threading.Thread(target=self._loop, name="scheduler", daemon=True)
        self._thread.start()

    # -- for any thread --------------------------------------------------------------------------------------------

    def submit(self, request: Request, listener: Callable[[Event], None]) -> Ticket:
        """Queue a request. Its events go to `listener`, in the scheduler's thread.

        ContextFull for a prompt that does not fit, QueueFull if too many wait or too many are this account's, Stopped
        after the end.
        """
        context = self.engine.limits.positions
        if not request.prompt:
            raise LocalLLMError("the prompt has no tokens; give some text")
        request = replace(request, prompt=self.engine.opened(request.prompt))
        if len(request.prompt) > context:
            counts = f"the prompt has {len(request.prompt)} tokens, the context holds {context}"
            raise ContextFull(Notice(counts, "; shorten it or raise ", Setting("ctx_size")))
        sampler = self._sampler(request.sampling, request.breakers)
        ticket = Ticket(request, listener)
        with self._lock:
            if self._stopped is not None:
                raise self._stopped
            left, mine = self.limits.parallel + self.limits.waiting - self._open, self._accounts[request.account]
            if left <= 0:
                raise QueueFull(f"{self._open} answers are running or waiting; try again later")
            if not within_share(mine, left):
                message = f"{mine} answers of yours are running or waiting, and the rest of the queue is for others"
                raise QueueFull(f"{message}; wait for some to end")
            self._open += 1
            self._accounts[request.account] += 1
            self._number += 1
            self._inbox.put(Answering(ticket, self._number, sampler, self._tokenizer))
        return ticket

    def load(self) -> Load:
        """Return what runs now. Numbers may be those of a step before or after; those of the cache are 0.1 s old."""
        running = tuple(map(_slot, list(self._running.active)))
        tokens, blocks, free = self._seen
        waiting = max(0, self._open - len(running))
        return Load(running, waiting, tokens, blocks, free, self.engine.pool.blocks)

    def forget(self) -> None:
        """Empty the prefix cache at the next step."""
        self.between(lambda _: self._running.prefixes.clear())

    def between(self, job: Callable[[Places], T]) -> Future[T]:
        """Run a job with the places in the scheduler's thread, between two steps. Stopped after the end."""
        made = _Job(job, Future[T]())
        with self._lock:
            if self._stopped is not None:
                raise self._stopped
            self._inbox.put(made)
        return made.future

    def close(self) -> None:
        """End all requests as cancelled, and the thread."""
        with self._lock:
            self._stopped = self._stopped or Stopped("the server is shutting down")
        self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            while self._collect():
                self._running.drop_cancelled()
                self._running.admit()
                self._steps.step()
                if perf_counter() - self._seen_at > SEEN_SECONDS:
                    self._look()
        except BaseException as error:  # a bug: nobody may wait for ever
            traceback.print_exc()
            with self._lock:
                self._stopped = Stopped(f"the scheduler ended by an error: {error}")
        finally:
            self._end()

    def _collect(self) -> bool:
        """Take new requests; wait for one if nothing runs. Return whether to go on."""
        while True:
            idle = not self._running.active and not self._running.waiting
            if idle and self._inbox.empty():
                self._look()
            try:
                item = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            if item is None:
                return False
            if isinstance(item, Answering):
                self._running.waiting.append(item)
            else:
                item.run(self._running.places)

    def _look(self) -> None:
        """Count what is in the cache. Only this thread may, because others would see it change while they count."""
        kept = list(self._running.prefixes)
        blocks = {block for sequence in kept for block in sequence.blocks}
        tokens = sum(sequence.length for sequence in kept)
        self._seen, self._seen_at = (tokens, len(blocks), self.engine.free_blocks), perf_counter()

    def _end(self) -> None:
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                break
            if isinstance(item, Answering):
                self._running.waiting.append(item)
            elif item is not None:
                item.future.set_exception(self._stopped or Stopped("the server is shutting down"))
        self._running.end(self._stopped)

    def _ended(self, one: Answering) -> None:
        account = one.request.account
        with self._lock:
            self._open -= 1
            self._accounts[account] -= 1
            if not self._accounts[account]:
                del self._accounts[account]


@dataclass(frozen=True, slots=True)
class _Job(Generic[T]):
    """What another thread wants done in the scheduler's."""

    work: Callable[[Places], T]
    future: Future[T]

    def run(self, places: Places) -> None:
        try:
            self.future.set_result(self.work(places))
        except Exception as error:  # the other thread's to tell
            self.future.set_exception(error)


def _slot(one: Answering) -> Slot:
    sequence = one.sequence  # read once: it goes when the request ends
    evaluated = sequence.length if sequence is not None else 0
    return Slot(one.number, one.request.client, one.prompt_tokens, evaluated, one.answered)

"""The generation loop: `step` admits requests, evaluates a batch of their tokens, and samples the next tokens.

The tokens of a request do not depend on the other requests in the batch. The engine computes each row independently,
drafts are accepted only if the sampler chooses the same tokens, and each request has its own random generator.
stream.py steps the core in the threads that consume events; `localllm.generation.scheduler` steps it in one server
thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from queue import SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING

from localllm.backends.base import BackendError
from localllm.base.errors import LocalLLMError
from localllm.base.notices import Notice, Setting, said
from localllm.engine import ContextFull, Engine, Result
from localllm.generation.interfaces import Observer, PrefixStore, SchedulerLimits
from localllm.generation.request_state import RequestState, Ticket
from localllm.generation.running import Running
from localllm.generation.schedule import Schedule, StepPart
from localllm.options import SamplingOptions
from localllm.sampling.repetition import Breakers
from localllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from localllm.generation.speculation.drafts import Drafts
    from localllm.sampling.sampler import Sampler


class Core:
    """Runs the requests of one engine. `new_state` may be called from any thread, `step` from one thread at a time."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        sampler: Callable[[SamplingOptions, Breakers | None], Sampler],
        limits: SchedulerLimits | None = None,
        drafts: Drafts | None = None,
        observer: Observer | None = None,
        store: PrefixStore | None = None,
    ) -> None:
        """`observer` is called after each step. `store` saves sequences evicted from the prefix cache."""
        self.engine, self.limits = engine, limits or SchedulerLimits()
        self._tokenizer, self._sampler, self._observer = tokenizer, sampler, observer
        self.running = Running(engine, self.limits, drafts, store)
        self._schedule = Schedule(engine, self.limits, self.running)
        self.inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()  # jobs to run at the start of a step
        self._numbers = count(1)

    def new_state(self, ticket: Ticket, sampler: Sampler | None = None) -> RequestState:
        """Return the state of a new request.

        Raise ContextFull if the prompt does not fit into the context, and LocalLLMError if it is empty.
        """
        request = ticket.request
        if not request.prompt:
            raise LocalLLMError("the prompt has no tokens; give some text")
        prompt, context = self.engine.opened(request.prompt), self.engine.limits.positions
        if len(prompt) > context:
            counts = f"the prompt has {len(prompt)} tokens, but the context holds {context}"
            raise ContextFull(Notice(counts, "; shorten it or raise ", Setting("ctx_size")))
        if prompt is not request.prompt:
            ticket.request = replace(request, prompt=prompt)
        sampler = sampler or self._sampler(request.sampling, request.dry_breakers)
        return RequestState(ticket, next(self._numbers), sampler, self._tokenizer, self.engine.read_after)

    def step(self) -> bool:
        """Admit requests, evaluate their next tokens in one forward pass, and sample. Return whether there was
        work.
        """
        worked = not self.inbox.empty() and self.receive()
        self.running.drop_cancelled()
        self.running.admit()
        began = perf_counter()
        parts = self._schedule.parts()
        clock = perf_counter if self.running.drafts is None else self.engine.clock  # the engine's may be slow to read
        drafted, before = perf_counter(), clock()
        results = self._run(parts)
        cost, ended = clock() - before, perf_counter()
        self._process(parts, results, ended - began, ended - drafted, cost)
        return worked or bool(parts)

    def receive(self) -> bool:
        """Run the jobs in the inbox; return whether any job ran."""
        worked = False
        while not self.inbox.empty():
            self.inbox.get()()  # does not block: only the stepping thread takes jobs
            worked = True
        return worked

    def _run(self, parts: list[StepPart]) -> list[Result]:
        """Evaluate the tokens in one forward pass. A backend error fails the requests; an interrupt propagates."""
        if not parts:
            return []
        try:
            return self.engine.step([self._schedule.rows(part) for part in parts])
        except (BackendError, LocalLLMError) as error:
            for part in parts:
                part.state.fail(error if isinstance(error, LocalLLMError) else LocalLLMError(said(error)))
                self.running.leave(part.state)
            return []

    def _process(
        self, parts: list[StepPart], results: list[Result], seconds: float, passing: float, cost: float
    ) -> None:
        """Sample the next tokens of each request. `seconds` is the duration of the step, `passing` the duration of its
        forward pass, and `cost` the same by the engine's clock.
        """
        if not results:
            return
        self._schedule.observe(parts, passing, cost)
        if self._observer is not None:
            self._observer.step(len(parts), sum(part.state.verified > 0 for part in parts))
        plain, drafts = seconds, self.running.drafts
        if drafts is not None:
            plain = drafts.plain_seconds(sum(not part.prompt for part in parts), seconds)
        for number, (part, result) in enumerate(zip(parts, results, strict=True)):
            try:
                self.running.take(part.state, result, part.prompt, seconds, plain)
            except BaseException:  # on an interrupt, the remaining results are lost
                for lost in parts[number:]:
                    lost.state.fail(LocalLLMError("the answer was interrupted"))
                    self.running.leave(lost.state)
                raise

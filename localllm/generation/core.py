"""The generation loop: `step` admits requests, evaluates a batch of their tokens, and samples the next tokens.

An executable may run several steps at a time. `step` then submits steps until enough are in flight, and collects the
oldest. If a part of the executable is lost, all requests wait until it is restored, and are then evaluated again.

The tokens of a request do not depend on the other requests in the batch. The engine computes each row independently,
drafts are accepted only if the sampler chooses the same tokens, and each request has its own random generator.
stream.py steps the core in the threads that consume events; `localllm.generation.scheduler` steps it in one server
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from queue import SimpleQueue
from time import monotonic, perf_counter
from typing import TYPE_CHECKING

from localllm.backends.base import BackendError, ExecutableLost
from localllm.base.errors import LocalLLMError
from localllm.base.notices import Notice, Setting, said
from localllm.engine import ContextFull, Engine, Result
from localllm.generation.encodings import Encodings
from localllm.generation.flights import Flight
from localllm.generation.interfaces import Observer, PrefixStore, SchedulerLimits
from localllm.generation.prompt_media import PromptMedia, expanded
from localllm.generation.recovery import Recovery
from localllm.generation.request import Request
from localllm.generation.request_state import RequestState, Ticket
from localllm.generation.running import Running
from localllm.generation.schedule import Schedule
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
        # Jobs to run at the start of a step, and whether no step may be in flight then.
        self.inbox: SimpleQueue[tuple[Callable[[], None], bool]] = SimpleQueue()
        self._numbers, self._steps = count(1), count(1)
        self._collected = 0.0  # time of the last collection, by the clock that compares costs
        self._recovery: Recovery | None = None
        self._encodings = Encodings(self.running, engine.media.width)

    def new_state(self, ticket: Ticket, sampler: Sampler | None = None) -> RequestState:
        """Return the state of a new request.

        Raise ContextFull if the prompt does not fit into the context, and LocalLLMError if it is empty.
        """
        request = ticket.request
        if not request.prompt:
            raise LocalLLMError("the prompt has no tokens; give some text")
        tokens, media = expanded(request.prompt, self.engine.pool.media)
        prompt, context = self.engine.opened(tokens), self.engine.limits.positions
        if len(prompt) > context:
            counts = f"the prompt has {len(prompt)} tokens, but the context holds {context}"
            raise ContextFull(Notice(counts, "; shorten it or raise ", Setting("ctx_size")))
        if prompt is not tokens:
            ticket.request = replace(request, prompt=prompt)
        if media:
            self._check_media(request, media)
        sampler = sampler or self._sampler(request.sampling, request.dry_breakers)
        return RequestState(ticket, next(self._numbers), sampler, self._tokenizer, self.engine.read_after, media)

    def _check_media(self, request: Request, media: Sequence[PromptMedia]) -> None:
        """Raise LocalLLMError for a prompt with pictures or sound that this model cannot take."""
        if not self.engine.media.width:
            raise LocalLLMError("this model takes no pictures or sound; load it with its mmproj file")
        if request.prompt_logprobs:
            raise LocalLLMError("pictures and sound have no log-probabilities; leave out the prompt's")
        if not self.engine.media.axes and any(not each.placed.media.plain for each in media):
            raise LocalLLMError("this model has one position per token; its pictures cannot have rows and columns")
        largest = max((each.span.tokens for each in media if not each.span.causal), default=0)
        if self.engine.media.spans and largest > self.engine.limits.rows:
            most = f"this model evaluates at most {self.engine.limits.rows} tokens together"
            raise LocalLLMError(f"a picture of {largest} tokens that see each other: {most}; use a smaller picture")

    @property
    def recovering(self) -> float:
        """Seconds since the executable was lost, with all attempts to restore it; 0: it runs. For any thread."""
        recovery = self._recovery
        return 0.0 if recovery is None else monotonic() - recovery.began

    @property
    def busy(self) -> bool:
        """Whether there is something to do. A lost executable is restored even if all requests have left."""
        return self.running.busy or not self.inbox.empty() or self._recovery is not None

    def step(self) -> bool:
        """Admit requests, submit steps until enough are in flight, and sample from the results of the oldest. Return
        whether there was work.
        """
        worked = not self.inbox.empty() and self.receive()
        self.running.drop_cancelled()
        if self._recovery is not None:
            self._recover(self._recovery)
            return True
        flights, depth = self.running.flights, self.engine.depth
        try:
            self.running.admit()
            worked = self._encode() or worked
            while len(flights) < depth and self._submit():
                worked = True
            return self._collect() or worked
        except ExecutableLost as error:
            if not self.engine.restorable:
                raise
            self._lose(error)
            return True

    def receive(self) -> bool:
        """Run the jobs in the inbox; return whether any job ran."""
        worked = False
        while not self.inbox.empty():
            job, alone = self.inbox.get()  # does not block: only the stepping thread takes jobs
            try:
                while alone and self._collect():
                    pass
            except ExecutableLost as error:
                self._lose(error)
            job()
            worked = True
        return worked

    def _encode(self) -> bool:
        """Evaluate a picture whose tokens see each other, or run the encoder, for a while; return whether a request
        waits for that.
        """
        began = perf_counter()
        worked = (self.engine.slices or self.running.flights.sliced is not None) and self._slice()
        worked = worked or self._encodings.advance(self._schedule.encoder_seconds)
        self._schedule.spent = perf_counter() - began if worked else 0.0
        return worked

    def _slice(self) -> bool:
        """Begin or continue the step that runs in slices; return whether there is one."""
        flights = self.running.flights
        flight = flights.sliced
        if flight is None and (part := self._schedule.sliced()) is not None:
            now = perf_counter()
            flight = Flight([part], part.count, 0, now, now, now, None)
        if flight is None:
            return False
        [part] = flight.parts
        try:
            if flight.pending is None:
                flight.pending = self.engine.begin_sliced([self._schedule.rows(part)])
                part.state.fly(next(self._steps), len(flight.pending.rows[0].tokens))
                flights.sliced = flight
            results = self.engine.advance(flight.pending, self._schedule.encoder_seconds())
        except BaseException as error:
            flights.sliced = None
            self._failed(flight, error)
            return True
        if results is not None:
            flights.sliced = None
            part.state.land()
            self._process(flight, results, perf_counter() - flight.began)
        return True

    # -- a step ----------------------------------------------------------------------------------------------------

    def _submit(self) -> bool:
        """Submit the next step; return whether there was one. An error fails its requests; an interrupt propagates."""
        began = perf_counter()
        parts = self._schedule.parts()
        if not parts:
            return False
        running = self.running
        rows = [self._schedule.rows(part) for part in parts]
        proposal = running.drafts.depart() if running.drafts is not None else None
        depth, number, prompt, total = self.engine.depth, next(self._steps), 0, 0
        for part in parts:
            if depth > 1:  # else it is collected at once
                part.state.fly(number)
            total += part.count
            if part.prompt or part.known:
                prompt += part.count
        submitted = perf_counter()
        before = submitted if running.drafts is None else self.engine.clock()  # the engine's clock may be slow to read
        flight = Flight(parts, prompt, total - prompt, began, submitted, before, proposal)
        try:
            flight.pending = self.engine.submit(rows)
        except BaseException as error:
            self._failed(flight, error)
        else:
            running.flights.add(flight)
        return True

    def _collect(self) -> bool:
        """Wait for the oldest step in flight, and sample from its results; return whether there was one."""
        running = self.running
        if not running.flights:
            return False
        flight = running.flights.popleft()
        try:
            assert flight.pending is not None
            results = self.engine.collect(flight.pending)
        except BaseException as error:
            self._failed(flight, error)
            return True
        ended = perf_counter()
        now = ended if running.drafts is None else self.engine.clock()
        cost = now - (max(flight.before, self._collected) if running.flights.depth > 1 else flight.before)
        self._collected = now
        if self.engine.depth > 1:
            for part in flight.parts:
                part.state.land()
        self._schedule.observe(flight, ended - flight.submitted, cost)
        self._process(flight, results, ended - flight.began)
        return True

    def _failed(self, flight: Flight, error: BaseException) -> None:
        """Fail the requests of a step. Raise the error again if it is an interrupt, or if it can be repaired."""
        if self.running.drafts is not None and flight.proposal is not None:
            self.running.drafts.forget(flight.proposal)
        if isinstance(error, ExecutableLost) and self.engine.restorable:
            raise error  # `_lose` treats the requests as in flight
        for part in flight.parts:
            part.state.land()
        if not isinstance(error, BackendError | LocalLLMError):
            raise error
        for part in flight.parts:
            part.state.fail(error if isinstance(error, LocalLLMError) else LocalLLMError(said(error)))
            self.running.leave(part.state)

    def _process(self, flight: Flight, results: list[Result], seconds: float) -> None:
        """Sample the next tokens of each request. `seconds` is the duration of the step."""
        parts = flight.parts
        if self._observer is not None:
            self._observer.step(len(parts), sum(part.state.verified > 0 for part in parts if not part.known))
        plain, drafts = seconds, self.running.drafts
        if drafts is not None:
            plain = drafts.plain_seconds(sum(not (part.prompt or part.known) for part in parts), seconds)
        for number, (part, result) in enumerate(zip(parts, results, strict=True)):
            try:
                self.running.take(part.state, result, part.prompt, seconds, plain)
            except BaseException:  # on an interrupt, the remaining results are lost
                for lost in parts[number:]:
                    lost.state.fail(LocalLLMError("the answer was interrupted"))
                    self.running.leave(lost.state)
                raise

    # -- a lost executable -----------------------------------------------------------------------------------------

    def _lose(self, error: ExecutableLost) -> None:
        """Preempt all requests, and begin to restore the executable."""
        self.running.lose(error)
        self._encodings.forget()
        self._recovery = Recovery(self.engine, error)

    def _recover(self, recovery: Recovery) -> None:
        """Wait a little for the restored executable. If that failed, fail the requests."""
        if not recovery.over():
            return
        self._recovery = None
        if recovery.error is not None:
            for one in list(self.running.waiting):
                one.fail(recovery.error)
                self.running.leave(one)

"""Send requests to a scheduler in tests: collect events, run single steps, and record what its engine evaluates."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import localllm
from localllm.engine import Engine, Pending, SequenceRows
from localllm.generation.core import Core
from localllm.generation.errors import Stopped
from localllm.generation.interfaces import SchedulerLimits
from localllm.generation.request import Event, Failed, Finished, Request, Started, Token
from localllm.generation.request_state import RequestState, Ticket
from localllm.generation.scheduler import Scheduler
from localllm.generation.speculation.drafts import Drafts
from localllm.generation.stream import Stepper
from localllm.sampling.sampler import Sampler

WAIT = 60  # seconds after which a test counts as hanging


@dataclass
class Answer:
    """The events of one request so far."""

    events: list[Event] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    ticket: Ticket | None = None
    until: int = 0  # cancel after this number of tokens

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if self.until and len(self.tokens) >= self.until and self.ticket is not None:
            self.ticket.cancel()
        if isinstance(event, Finished | Failed):
            self.over.set()

    @property
    def tokens(self) -> list[int]:
        return [event.token for event in self.events if isinstance(event, Token)]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Token | Finished))

    @property
    def reused(self) -> int:
        return next(event.reused_tokens for event in self.events if isinstance(event, Started))

    def result(self) -> Finished:
        assert self.over.wait(WAIT), "the request does not end"
        last = self.events[-1]
        assert isinstance(last, Finished), last
        return last

    def error(self) -> Failed:
        assert self.over.wait(WAIT), "the request does not end"
        last = self.events[-1]
        assert isinstance(last, Failed), last
        return last


def ask(scheduler: Scheduler, request: Request) -> Answer:
    answer = Answer()
    answer.ticket = scheduler.submit(request, answer)
    return answer


@contextmanager
def scheduled(model: localllm.Model, **limits: object) -> Iterator[Scheduler]:
    with Scheduler(model.new_core(SchedulerLimits(**limits))) as scheduler:  # type: ignore[arg-type]
        yield scheduler


def stepper_of(
    on: localllm.Model | Engine, limits: SchedulerLimits | None = None, drafts: Drafts | None = None, **more: Any
) -> Stepper:
    """Return a stepper with a new core, which replaces the model's current core."""
    if isinstance(on, Engine):
        return Stepper(Core(on, None, Sampler, limits, drafts, **more))
    on.new_core(limits or SchedulerLimits())  # frees the blocks of the previous core
    return Stepper(Core(on.engine, on.maybe_tokenizer, on.sampler, limits, drafts, **more))


class Watched(Engine):
    """An engine that records the input of its steps: (sequence, tokens, wanted logits)."""

    def __init__(self, engine: Engine, **limits: int) -> None:
        super().__init__(engine.executable, engine.pool, replace(engine.limits, **limits))
        self.stepped: list[list[SequenceRows]] = []

    def submit(self, rows: Sequence[SequenceRows]) -> Pending:
        self.stepped.append(list(rows))
        return super().submit(rows)


class Stepped:
    """A core whose steps the test runs one by one."""

    def __init__(self, on: localllm.Model | Engine, drafts: Drafts | None = None, **limits: object) -> None:
        self.limits = SchedulerLimits(**limits)  # type: ignore[arg-type]
        self.ended = 0
        self.core = stepper_of(on, self.limits, drafts).core
        self.engine = self.core.engine
        self.running = self.core.running

    def _count(self) -> None:
        self.ended += 1

    def ask(self, request: Request) -> tuple[RequestState, Answer]:
        answer = Answer()
        answer.ticket = Ticket(request, answer, ended=self._count)
        one = self.core.new_state(answer.ticket)
        self.running.waiting.append(one)
        return one, answer

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.core.step()

    def finish(self) -> None:
        """Run steps until no request remains."""
        for _ in range(10_000):
            if not self.running.busy:
                return
            self.turn()
        raise AssertionError("requests are left after 10,000 steps")

    def __enter__(self) -> Stepped:
        return self

    def __exit__(self, *_: object) -> None:
        self.running.end(Stopped("the test is over"))

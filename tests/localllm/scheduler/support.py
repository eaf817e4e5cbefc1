"""Requests to a scheduler in tests: gather events, and write the same answer alone for comparison."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import localllm
from localllm.scheduler.interfaces import SchedulerLimits
from localllm.scheduler.request import Event, Failed, Finished, Request, Started, Ticket, Written
from localllm.scheduler.scheduler import Scheduler

WAIT = 60  # seconds: a test that hangs fails


@dataclass
class Answer:
    """The events of one request so far."""

    events: list[Event] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    ticket: Ticket | None = None
    until: int = 0  # cancel after so many tokens

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if self.until and len(self.tokens) >= self.until and self.ticket is not None:
            self.ticket.cancel()
        if isinstance(event, Finished | Failed):
            self.over.set()

    @property
    def tokens(self) -> list[int]:
        return [event.token for event in self.events if isinstance(event, Written)]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Written | Finished))

    @property
    def reused(self) -> int:
        return next(event.reused for event in self.events if isinstance(event, Started))

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
    with Scheduler(model.engine, model.tokenizer, model.sampler, SchedulerLimits(**limits)) as scheduler:  # type: ignore[arg-type]
        yield scheduler

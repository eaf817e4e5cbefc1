"""Track generation for /slots, /metrics and token limits. The service calls the observer for each event."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from localllm.generation.request import Event, Finished, Prefilled, Started, Token, account_of
from localllm.generation.statistics import Usage
from localllm.server.collected import Progress
from localllm.server.metrics import Metrics
from localllm.server.turn import Completion, EmbedResult, Generation, Turn

A = TypeVar("A", Turn, Completion)
BROKEN_OFF = "broken off"  # finish reason of a choice whose generation failed or whose client disconnected


@dataclass(eq=False, slots=True, kw_only=True)
class Open(Progress):
    """An unfinished choice."""

    number: int  # consecutive number of the choice, from 0
    model: str
    generation: Generation
    running: bool = False  # whether the choice is running; otherwise it is queued
    lines: bool = False  # whether the output has a line break
    submitted: float = field(default_factory=time.monotonic)
    first: float = 0.0  # time of the first token

    @property
    def rate(self) -> float:
        """Return the decode speed in tokens/s, excluding the first token, or 0 before the second token."""
        return (self.tokens - 1) / (self.last - self.first) if self.last > self.first > 0 else 0.0

    def broken_off(self) -> Usage:
        """Return the usage so far, for a choice that ends early."""
        began, first = self.began or self.submitted, self.first or time.monotonic()
        return replace(
            self.usage,
            queued_seconds=began - self.submitted,
            first_token_seconds=first - self.submitted,
            prompt_seconds=first - began if self.began else 0.0,
            decode_seconds=max(self.last - first, 0.0) if self.last else 0.0,
        )


class ServiceObserver:
    """Counts the requests of a service. It is called at the start of a request, for each event, and at the end."""

    def __init__(
        self,
        metrics: Metrics,
        spend: Callable[[str, int], None] = lambda client, tokens: None,
        priorities: bool = False,
    ) -> None:
        """Create an observer. `spend` is called with the client and tokens of each finished choice. `priorities` lets
        requests set a priority."""
        self._spend, self._priorities = spend, priorities
        self.metrics = metrics
        self.open: dict[int, Open] = {}
        self._next = 0
        metrics.load = self.load

    def load(self) -> tuple[int, int]:
        """Return the numbers of running and queued choices."""
        running = sum(each.running for each in tuple(self.open.values()))
        return running, len(self.open) - running

    def admitted(self, asked: A) -> A:
        """Return the request without options that the operator does not allow."""
        if not asked.generation.priority or self._priorities:
            return asked
        return replace(asked, generation=replace(asked.generation, priority=0))

    def begin(self, model: str, generation: Generation) -> ObservedAnswers:
        """Count the choices of a new request as queued."""
        return ObservedAnswers(self, [self._add(model, generation) for _ in range(generation.n)])

    def end(self, each: Open, usage: Usage, reason: str) -> None:
        """Count the end of a choice, once."""
        if self.open.pop(each.number, None) is not None and (each.running or reason != BROKEN_OFF):
            self.metrics.answered(usage, reason)
            client, evaluated = account_of(each.generation.client), usage.prompt_tokens - usage.reused_tokens
            self._spend(client, evaluated + usage.answer_tokens)

    def embedded(self, found: EmbedResult, seconds: float, texts: int) -> EmbedResult:
        """Count embedded or scored texts, and return the result unchanged."""
        self.metrics.embedded(found.tokens, seconds, texts, found.steps)
        return found

    def _add(self, model: str, generation: Generation) -> Open:
        made = Open(number=self._next, model=model, generation=generation, clock=time.monotonic)
        self.open[made.number] = made
        self._next += 1
        return made


class ObservedAnswers:
    """The choices of one request. Leaving the context ends unfinished choices."""

    def __init__(self, observer: ServiceObserver, answers: Sequence[Open]) -> None:
        self._observer, self._answers = observer, answers

    def __enter__(self) -> ObservedAnswers:
        return self

    def __exit__(self, *error: object) -> None:
        for each in self._answers:
            self._observer.end(each, each.broken_off(), BROKEN_OFF)

    def event(self, event: Event) -> None:
        """Update the metrics from an event before the API handler gets it."""
        each, metrics = self._answers[event.choice], self._observer.metrics
        evaluated, last = each.evaluated, each.last
        each.add(event)
        match event:
            case Started():
                each.running = True
            case Prefilled():
                metrics.evaluated(max(event.evaluated - evaluated, 0))
            case Token():
                each.first = each.first or each.last
                metrics.token(each.last - last if last else None)
                each.lines = each.lines or any("\n" in getattr(part, "text", "") for part in event.parts)
            case Finished():
                self._observer.end(each, event.usage, event.reason)

"""A service that is watched: which answers run and wait, for /slots and /metrics. Protocols use it as the service."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import cast

from localllm.options import SamplingOptions
from localllm.scheduler.request import Usage, account_of
from localllm.server.metrics import Metrics
from localllm.server.turn import (
    Begun,
    Completion,
    Done,
    EmbedResult,
    Evaluated,
    Generation,
    ModelInfo,
    More,
    Service,
    SlotAction,
    Turn,
    TurnEvent,
)


@dataclass(eq=False, slots=True)
class Open:
    """An answer that is not finished."""

    number: int  # counts up from 0
    model: str
    generation: Generation
    running: bool = False  # else it waits
    prompt_tokens: int = 0
    reused: int = 0
    evaluated: int = 0
    tokens: int = 0
    lines: bool = False  # whether the answer has a line break
    submitted: float = field(default_factory=time.monotonic)
    began: float = 0.0
    first: float = 0.0  # when the first token came
    last: float = 0.0
    latest: float = 0.0  # when the last token came

    @property
    def rate(self) -> float:
        """Tokens per second after the first one; 0 until there are two."""
        return (self.tokens - 1) / (self.latest - self.first) if self.latest > self.first > 0 else 0.0

    def usage(self) -> Usage:
        """Return what the answer took until now, for one that ends before its time."""
        began, first, last = self.began or self.submitted, self.first or time.monotonic(), self.last
        return Usage(
            prompt_tokens=max(self.evaluated, self.reused),
            reused=self.reused,
            answer_tokens=self.tokens,
            queued_seconds=began - self.submitted,
            first_token_seconds=first - self.submitted,
            prompt_seconds=first - began if self.began else 0.0,
            decode_seconds=max(last - first, 0.0) if last else 0.0,
        )


class Observed:
    """The service behind it, with an eye on its answers."""

    def __init__(
        self,
        service: Service,
        metrics: Metrics,
        spend: Callable[[str, int], None] = lambda client, tokens: None,
        priorities: bool = False,
    ) -> None:
        """`spend` gets the client and the tokens of each finished answer. `priorities`: requests may have one."""
        self.service, self._spend, self._priorities = service, spend, priorities
        self.metrics = metrics
        self.open: dict[int, Open] = {}
        self._next = 0
        metrics.load = self.load

    def load(self) -> tuple[int, int]:
        """Return how many answers are being written, and how many wait."""
        running = sum(each.running for each in tuple(self.open.values()))
        return running, len(self.open) - running

    def answer(self, model: str, turn: Turn) -> AsyncIterator[TurnEvent]:
        if turn.generation.priority and not self._priorities:
            turn = replace(turn, generation=replace(turn.generation, priority=0))
        return self._watched(model, turn.generation, lambda: self.service.answer(model, turn))

    def complete(self, model: str, completion: Completion) -> AsyncIterator[TurnEvent]:
        if completion.generation.priority and not self._priorities:
            completion = replace(completion, generation=replace(completion.generation, priority=0))
        return self._watched(model, completion.generation, lambda: self.service.complete(model, completion))

    async def _watched(
        self, model: str, generation: Generation, start: Callable[[], AsyncIterator[TurnEvent]]
    ) -> AsyncIterator[TurnEvent]:
        mine = [self._add(model, generation) for _ in range(generation.n)]
        try:
            events = start()
            async with aclosing(cast("AsyncGenerator[TurnEvent, None]", events)):
                async for event in events:
                    self._follow(mine[event.answer], event)
                    yield event
        finally:
            for each in mine:
                if self.open.pop(each.number, None) is not None and each.running:
                    self._ended(each, each.usage(), "broken off")

    def _add(self, model: str, generation: Generation) -> Open:
        made = Open(self._next, model, generation)
        self.open[made.number] = made
        self._next += 1
        return made

    def _follow(self, each: Open, event: TurnEvent) -> None:
        match event:
            case Begun():
                each.running, each.began = True, time.monotonic()
                each.prompt_tokens, each.reused = event.prompt_tokens, event.reused
            case Evaluated():
                self.metrics.evaluated(max(event.tokens - max(each.evaluated, each.reused), 0))
                each.evaluated = event.tokens
            case More():
                each.last = time.monotonic()
                each.first = each.first or each.last
                if event.token is not None:
                    self.metrics.token(each.last - each.latest if each.tokens else None)
                    each.tokens, each.latest = each.tokens + 1, each.last
                each.lines = each.lines or any("\n" in getattr(part, "text", "") for part in event.parts)
            case Done():
                if self.open.pop(each.number, None) is not None:
                    self._ended(each, event.usage, event.reason)

    def _ended(self, each: Open, usage: Usage, reason: str) -> None:
        self.metrics.answered(usage, reason)
        self._spend(account_of(each.generation.client), usage.prompt_tokens - usage.reused + usage.answer_tokens)

    # -- what needs no watching -------------------------------------------------------------------------------------

    def models(self) -> Sequence[ModelInfo]:
        return self.service.models()

    def find(self, name: str) -> ModelInfo:
        return self.service.find(name)

    async def count(self, model: str, turn: Turn) -> int:
        return await self.service.count(model, turn)

    async def prompt_ids(self, model: str, turn: Turn) -> list[int]:
        return await self.service.prompt_ids(model, turn)

    async def render(self, model: str, turn: Turn) -> str:
        return await self.service.render(model, turn)

    async def tokenize(self, model: str, text: str, add_special: bool, parse_special: bool) -> list[int]:
        return await self.service.tokenize(model, text, add_special, parse_special)

    async def tokenize_all(
        self, model: str, texts: Sequence[str], add_special: bool, parse_special: bool
    ) -> list[list[int]]:
        return await self.service.tokenize_all(model, texts, add_special, parse_special)

    async def pieces(self, model: str, ids: Sequence[int]) -> list[bytes]:
        return await self.service.pieces(model, ids)

    async def embed(
        self, model: str, texts: Sequence[str | Sequence[int]], pooling: str = "auto", normalize: bool = True
    ) -> EmbedResult:
        started = time.monotonic()
        found = await self.service.embed(model, texts, pooling, normalize)
        self.metrics.embedded(found.tokens, time.monotonic() - started, len(texts), found.steps)
        return found

    async def rank(self, model: str, query: str, documents: Sequence[str]) -> EmbedResult:
        started = time.monotonic()
        found = await self.service.rank(model, query, documents)
        self.metrics.embedded(found.tokens, time.monotonic() - started, len(documents), found.steps)
        return found

    async def slot(self, model: str, number: int, action: SlotAction, name: str) -> tuple[int, int]:
        return await self.service.slot(model, number, action, name)

    def sampling_defaults(self, model: str) -> SamplingOptions:
        return self.service.sampling_defaults(model)

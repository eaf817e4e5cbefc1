"""The service behind all APIs. It finds the model of a request, loads it if needed, and generates the output.

Where a request sets no reasoning options or template variables, the server's options apply (`Usual`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import TYPE_CHECKING, Any

from localllm.generation.interfaces import Load
from localllm.generation.request import Event, Finished
from localllm.options import SamplingOptions
from localllm.options.thinking import SWITCHES
from localllm.output.reader import with_parts
from localllm.server.bridge import Inbox
from localllm.server.info import Info
from localllm.server.metrics import Metrics
from localllm.server.observer import ServiceObserver
from localllm.server.registry import ModelRegistry
from localllm.server.turn import Completion, EmbedResult, Generation, SlotAction, Thinking, Turn

if TYPE_CHECKING:
    from localllm.server.served import Prepared, Served


@dataclass(frozen=True, slots=True)
class Usual:
    """The defaults for reasoning options and template variables."""

    thinking: Thinking = field(default_factory=Thinking)
    variables: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, think: bool | int | str | None, inline: bool, variables: Mapping[str, Any]) -> Usual:
        """Return the defaults from the server's options."""
        return cls(replace(Thinking.of(think), inline=inline or None), variables)

    def fill(self, turn: Turn) -> Turn:
        """Return a turn with the defaults filled in."""
        own, usual = turn.thinking, self.thinking
        said = own.enabled is not None or bool(own.effort) or own.budget is not None
        inline = usual.inline if own.inline is None else own.inline
        thinking = replace(own if said else usual, inline=inline)
        variables = {name: value for name, value in self.variables.items() if not (said and name in SWITCHES)}
        return replace(turn, thinking=thinking, template_variables={**variables, **turn.template_variables})


class ModelService:
    """A `turn.Service` over a registry of models."""

    def __init__(self, registry: ModelRegistry, usual: Usual | None = None) -> None:
        self.registry, self._usual = registry, usual or Usual()
        self.observer = ServiceObserver(Metrics())

    def models(self) -> Sequence[Info]:
        return self.registry.infos

    def find(self, name: str) -> Info:
        return self.registry.find(name)

    def load_of(self, model: str) -> Load | None:
        """Return the load of a model's scheduler, or None if the model is not loaded or has no scheduler."""
        served = self.registry.loaded(model)
        return None if served is None or served.embeds else served.scheduler.load()

    def loads(self) -> dict[str, Load]:
        """Return the load of the scheduler of every loaded model."""
        found = {info.id: self.load_of(info.id) for info in self.models()}
        return {name: load for name, load in found.items() if load is not None}

    def answer(self, model: str, turn: Turn) -> AsyncGenerator[Event, None]:
        turn = self.observer.admitted(turn)
        return self._events(model, turn.generation, lambda served: served.of_turn(self._usual.fill(turn)))

    def complete(self, model: str, completion: Completion) -> AsyncGenerator[Event, None]:
        completion = self.observer.admitted(completion)
        return self._events(model, completion.generation, lambda served: served.of_completion(completion))

    async def _events(
        self, model: str, generation: Generation, prepare: Callable[[Served], Awaitable[Prepared]]
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of all choices of a request, with their parsed parts. API handlers read this iterator."""
        with self.observer.begin(model, generation) as watched:
            async with self.registry.using(model) as served:
                submit = served.scheduler.submit
                asked = await prepare(served)
                readers = [asked.readers() for _ in asked.requests]
                with closing(Inbox(submit, asked.requests)) as inbox:
                    while inbox.left:
                        event = await inbox.next()
                        event = with_parts(event, readers[event.choice])
                        if isinstance(event, Finished) and event.reason == "context":
                            event = replace(event, reason="length")
                        watched.event(event)
                        yield event

    async def count(self, model: str, turn: Turn) -> int:
        return len(await self.prompt_ids(model, turn))

    async def render(self, model: str, turn: Turn) -> str:
        async with self.registry.using(model) as served:
            return (await served.prompt(self._usual.fill(turn))).text

    async def prompt_ids(self, model: str, turn: Turn) -> list[int]:
        async with self.registry.using(model) as served:
            return (await served.prompt(self._usual.fill(turn))).ids

    async def tokenize(self, model: str, text: str, add_special: bool, parse_special: bool) -> list[int]:
        async with self.registry.using(model) as served:
            return await served.tokenize(text, add_special, parse_special)

    async def tokenize_all(
        self, model: str, texts: Sequence[str], add_special: bool, parse_special: bool
    ) -> list[list[int]]:
        async with self.registry.using(model) as served:
            return await served.tokenize_all(texts, add_special, parse_special)

    async def pieces(self, model: str, ids: Sequence[int]) -> list[bytes]:
        async with self.registry.using(model) as served:
            tokenizer = served.model.tokenizer
            return await served.room(ids).lane.run(lambda: [tokenizer.piece(token) for token in ids])

    async def embed(
        self, model: str, texts: Sequence[str | Sequence[int]], pooling: str = "auto", normalize: bool = True
    ) -> EmbedResult:
        started = monotonic()
        async with self.registry.using(model) as served:
            found = await served.embed(texts, pooling, normalize)
        return self.observer.embedded(found, monotonic() - started, len(texts))

    async def rank(self, model: str, query: str, documents: Sequence[str]) -> EmbedResult:
        started = monotonic()
        async with self.registry.using(model) as served:
            found = await served.rank(query, documents)
        return self.observer.embedded(found, monotonic() - started, len(documents))

    async def slot(self, model: str, number: int, action: SlotAction, name: str) -> tuple[int, int]:
        async with self.registry.using(model) as served:
            return await served.slot(number, action, name)

    def sampling_defaults(self, model: str) -> SamplingOptions:
        served = self.registry.loaded(model)
        return SamplingOptions() if served is None else served.model.sampling_defaults.options(dict(served.sampling))

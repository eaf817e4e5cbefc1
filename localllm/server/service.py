"""The service behind all APIs. It finds the model of a request, loads it if needed, and generates the output.

Where a request sets no reasoning options or template variables, the server's options apply (`Usual`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, Concatenate, ParamSpec, TypeVar

from localllm.generation.interfaces import Load
from localllm.generation.request import Event, Finished
from localllm.options import SamplingOptions
from localllm.options.thinking import SWITCHES
from localllm.output.reader import with_parts
from localllm.server.bridge import Inbox
from localllm.server.derived import with_derived
from localllm.server.info import ModelInfo
from localllm.server.metrics import Metrics
from localllm.server.observer import ServiceObserver
from localllm.server.prompts import Prompt
from localllm.server.registry import ModelRegistry
from localllm.server.served import Prepared, Served
from localllm.server.store import ModelStore
from localllm.server.turn import Completion, EmbedResult, Generation, Thinking, Turn
from localllm.server.uploads import UploadRules, Uploads

A = TypeVar("A", Turn, Completion)
P = ParamSpec("P")
T = TypeVar("T")


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


def _on_model(
    method: Callable[Concatenate[Served, P], Awaitable[T]],
) -> Callable[Concatenate[Service, str, P], Coroutine[Any, Any, T]]:
    """Return a method of Service that loads a model if needed, and calls its method of the same name."""

    async def call(self: Service, model: str, /, *args: P.args, **kwargs: P.kwargs) -> T:
        async with self.registry.using(model) as served:
            found: T = await getattr(served, method.__name__)(*args, **kwargs)
        return found

    return call


class Service:
    """The models of a registry. Its methods raise LocalLLMError; `errors.py` assigns HTTP status and kind."""

    tokenize_all = _on_model(Served.tokenize)
    pieces = _on_model(Served.pieces)
    slot = _on_model(Served.slot)

    def __init__(self, registry: ModelRegistry, usual: Usual | None = None, uploads: UploadRules | None = None) -> None:
        self.registry, self._usual = registry, usual or Usual()
        self.uploads = Uploads(uploads)
        self.observer = ServiceObserver(Metrics())
        self.store: ModelStore | None = None  # set if clients may change the models on this computer

    def models(self) -> Sequence[ModelInfo]:
        """All available models, loaded or not."""
        return self.registry.infos

    def find(self, name: str) -> ModelInfo:
        """Return the model with this name. If the server has only one model, it matches every name."""
        return self.registry.find(name)

    async def refresh(self) -> None:
        """Follow changes of the files on this computer, every few seconds."""
        await self.registry.refresh()

    def load_of(self, model: str) -> Load | None:
        """Return the load of a model's scheduler, or None if the model is not loaded or has no scheduler."""
        served = self.registry.loaded(model)
        return None if served is None or served.embeds else served.scheduler.load()

    def loads(self) -> dict[str, Load]:
        """Return the load of the scheduler of every loaded model."""
        found = {info.id: self.load_of(info.id) for info in self.models() if info.derived is None}
        return {name: load for name, load in found.items() if load is not None}

    def sampling_defaults(self, model: str) -> SamplingOptions:
        served = self.registry.loaded(model)
        return SamplingOptions() if served is None else served.sampling_defaults

    def answer(self, model: str, turn: Turn) -> AsyncGenerator[Event, None]:
        """Stream the events of a turn. Closing the iterator ends generation at the next step."""
        turn = self._completed(model, self.observer.admitted(turn))

        async def prepared(served: Served) -> Prepared:
            return await served.of_turn(await self.uploads.of_turn(self._usual.fill(turn)))

        return self._events(model, turn.generation, prepared)

    def complete(self, model: str, completion: Completion) -> AsyncGenerator[Event, None]:
        """Stream the events of a completion."""
        completion = self._completed(model, self.observer.admitted(completion))

        async def prepared(served: Served) -> Prepared:
            return await served.of_completion(await self.uploads.of_completion(completion))

        return self._events(model, completion.generation, prepared)

    def _completed(self, model: str, asked: A) -> A:
        """Add a derived model's system prompt and parameters to a request."""
        found = self.find(model)
        return with_derived(asked, found.derived, found.context)

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

    async def prompt(self, model: str, turn: Turn) -> Prompt:
        """Return the prompt of a turn."""
        async with self.registry.using(model) as served:
            return await served.prompt(await self.uploads.of_turn(self._usual.fill(self._completed(model, turn))))

    async def tokenize(self, model: str, text: str, add_special: bool, parse_special: bool) -> list[int]:
        """Return the tokens of a text."""
        found: list[int]
        [found] = await self.tokenize_all(model, [text], add_special, parse_special)
        return found

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

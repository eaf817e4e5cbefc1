"""The service behind all protocols: finds the model of a request, loads it if needed, and answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from localllm.options import SamplingOptions
from localllm.scheduler.interfaces import Load
from localllm.server.info import Info
from localllm.server.shelf import Shelf
from localllm.server.turn import Completion, EmbedResult, Turn, TurnEvent


class ModelService:
    """A `turn.Service` over a shelf of models."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf

    def models(self) -> Sequence[Info]:
        return self.shelf.infos

    def find(self, name: str) -> Info:
        return self.shelf.find(name)

    def load_of(self, model: str) -> Load | None:
        """Return what a model's scheduler does now; None if the model is not loaded or has none."""
        served = self.shelf.loaded(model)
        return None if served is None or served.embeds else served.scheduler.load()

    async def answer(self, model: str, turn: Turn) -> AsyncGenerator[TurnEvent, None]:
        async with self.shelf.using(model) as served, aclosing(served.answer(turn)) as stream:
            async for event in stream:
                yield event

    async def complete(self, model: str, completion: Completion) -> AsyncGenerator[TurnEvent, None]:
        async with self.shelf.using(model) as served, aclosing(served.complete(completion)) as stream:
            async for event in stream:
                yield event

    async def count(self, model: str, turn: Turn) -> int:
        async with self.shelf.using(model) as served:
            return len((await served.prompt(turn)).ids)

    async def render(self, model: str, turn: Turn) -> str:
        async with self.shelf.using(model) as served:
            return (await served.prompt(turn)).text

    async def tokenize(self, model: str, text: str, add_special: bool, parse_special: bool) -> list[int]:
        async with self.shelf.using(model) as served:
            return await served.work(lambda: served.model.tokenize(text, add_special, parse_special))

    async def pieces(self, model: str, ids: Sequence[int]) -> list[bytes]:
        async with self.shelf.using(model) as served:
            words = served.model.words
            return await served.work(lambda: [words.piece(token) for token in ids])

    async def embed(self, model: str, texts: Sequence[str | Sequence[int]], pooling: str = "auto") -> EmbedResult:
        async with self.shelf.using(model) as served:
            return await served.embed(texts, pooling)

    async def rank(self, model: str, query: str, documents: Sequence[str]) -> EmbedResult:
        async with self.shelf.using(model) as served:
            return await served.rank(query, documents)

    def sampling_defaults(self, model: str) -> SamplingOptions:
        served = self.shelf.loaded(model)
        return SamplingOptions() if served is None else served.model.sampling_defaults.options({})

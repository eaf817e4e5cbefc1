"""Collect the events of one choice: the full output for non-streamed responses, and token counts for all responses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from localllm.generation.parts import CallArguments, CallStart, Content, Part, Reasoning
from localllm.generation.request import Event, Finished, Token
from localllm.generation.statistics import Usage
from localllm.server.progress import Progress

T = TypeVar("T")


class CollectedCall:
    """A tool call."""

    __slots__ = ("_arguments", "id", "name")

    def __init__(self, id: str, name: str) -> None:
        self.id, self.name = id, name
        self._arguments: list[str] = []

    def add(self, text: str) -> None:
        self._arguments.append(text)

    @property
    def arguments(self) -> str:
        """The arguments as JSON, or an empty object if the model wrote none."""
        return "".join(self._arguments) or "{}"


class Collected:
    """One choice of a turn, with the events received so far."""

    def __init__(self) -> None:
        self.progress = Progress()
        self.thinking_tokens = 0
        self.calls: dict[int, CollectedCall] = {}
        self.done: Finished | None = None
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._thinks = False  # whether the last part was reasoning

    def add(self, event: Event) -> None:
        """Add an event of this choice."""
        self.progress.add(event)
        if isinstance(event, Token | Finished):
            self._add_parts(event.parts)
        if isinstance(event, Token):
            self.thinking_tokens += self._thinks
        elif isinstance(event, Finished):
            self.done = event

    def _add_parts(self, parts: Sequence[Part]) -> None:
        for part in parts:
            self._thinks = isinstance(part, Reasoning)
            match part:
                case Reasoning(text):
                    self._reasoning.append(text)
                case Content(text):
                    self._content.append(text)
                case CallStart(index, id, name):
                    self.calls[index] = CollectedCall(id, name)
                case CallArguments(index, json):
                    self.calls[index].add(json)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def usage(self) -> Usage:
        """The usage of this choice. Until the choice ends, it only has the token counts."""
        sofar = self.progress
        return self.done.usage if self.done else Usage(sofar.prompt_tokens, sofar.reused, sofar.tokens)


@asynccontextmanager
async def closing(events: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """Close an iterator on exit. If the client has disconnected, this ends generation."""
    try:
        yield events
    finally:
        if (close := getattr(events, "aclose", None)) is not None:
            await close()


async def written(
    events: AsyncIterator[T], write: Callable[[T], Iterable[Any]], last: Callable[[], Iterable[Any]] = tuple
) -> AsyncIterator[Any]:
    """Yield what `write` makes of each event, and then `last`."""
    async with closing(events):
        async for event in events:
            for made in write(event):
                yield made
    for made in last():
        yield made


async def drained(events: AsyncIterator[T], add: Callable[[T], object] = id) -> None:
    """Pass each event to `add`."""
    async with closing(events):
        async for event in events:
            add(event)

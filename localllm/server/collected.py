"""Collect the events of one choice: the full output for non-streamed responses, and token counts for all responses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from localllm.generation.parts import CallArguments, CallStart, Content, Part, Reasoning
from localllm.generation.request import Event, Finished, Started, Token
from localllm.generation.statistics import Usage

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
        self.prompt_tokens = self.reused = 0
        self.tokens = self.thinking_tokens = 0
        self.calls: dict[int, CollectedCall] = {}
        self.done: Finished | None = None
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._thinks = False  # whether the last part was reasoning

    def add(self, event: Event) -> None:
        """Add an event of this choice."""
        match event:
            case Started():
                self.prompt_tokens, self.reused = event.prompt_tokens, event.reused_tokens
            case Token():
                self._add_parts(event.parts)
                self.tokens += 1
                self.thinking_tokens += self._thinks
            case Finished():
                self._add_parts(event.parts)
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
        return self.done.usage if self.done else Usage(self.prompt_tokens, self.reused, self.tokens)


@asynccontextmanager
async def closing(events: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """Close an iterator on exit. If the client has disconnected, this ends generation."""
    try:
        yield events
    finally:
        if (close := getattr(events, "aclose", None)) is not None:
            await close()

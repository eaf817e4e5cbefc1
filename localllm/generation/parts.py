"""The streamed parts of a chat answer: reasoning, content and tool calls.

`localllm.output.reader` splits the model's text into these parts; each server protocol converts them to its own format.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of reasoning text."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer's content."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The start of tool call number `index` (0, 1, ...)."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a tool call's arguments. The concatenated pieces are one JSON object."""

    index: int
    json: str


Part = Reasoning | Content | CallStart | CallArguments

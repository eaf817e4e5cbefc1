"""The parts of an answer to messages: reasoning, content and tool calls, as they stream.

`localllm.output.reader` splits a model's text into these; each protocol of the server converts them to its own format.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The start of tool call number `index` (0, 1, ...)."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments. All pieces together are one JSON object."""

    index: int
    json: str


Part = Reasoning | Content | CallStart | CallArguments

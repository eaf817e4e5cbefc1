"""The parts of an answer to messages: reasoning, content and calls of tools, as they stream.

`localllm.answer.reader` cuts the text of a model into these; every protocol of the server puts them in its own words.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The call number `index` (0, 1, ...) of a tool begins."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments. All of them together are one JSON object."""

    index: int
    json: str


Part = Reasoning | Content | CallStart | CallArguments

"""Parse the prompts of completions and the inputs of embeddings, in all formats that clients send.

One input: "text", [12, 34], [12, "text", 34], {"prompt_string": "text"}, {"content": [{"type": "text", "text": "t"}]}.
Several inputs are a list of inputs. A list that contains a number is one input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from localllm.server.content import Part, joined
from localllm.server.errors import BadRequest
from localllm.server.llamacpp.prompts import joined_prompt
from localllm.server.service import Service
from localllm.server.structs import MISSING, Body, Wrong, read, wrong

Mixed = tuple[int | str, ...]  # token ids and texts of one input
Input = str | Mixed
MAX_ID = 2**31 - 1


class TextInput(Body):
    """An input as an object."""

    prompt_string: str | None = None
    content: list[Part] | None = None
    multimodal_data: Any = None

    def __post_init__(self) -> None:
        if self.multimodal_data is not None:
            raise Wrong("multimodal_data", "image and audio input is not supported; send text")
        if self.prompt_string is None and self.content is None:
            raise Wrong("content", "expected a list of parts")


def read_inputs(value: Any, name: str, most: int) -> list[Input]:
    """Return the inputs of a field, at least one; raise BadRequest with the path of an invalid input."""
    if value is None:
        raise wrong(MISSING, name)
    if not isinstance(value, list) or any(type(item) is int for item in value):
        return [_input(value, name)]
    if not 0 < len(value) <= most:
        raise wrong(f"expected 1 to {most} items, got {len(value)}", name)
    return [_input(item, f"{name}[{number}]") for number, item in enumerate(value)]


def _input(value: Any, place: str) -> Input:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        found = read(value, TextInput, place)
        return joined(found.content, f"{place}.content") if found.prompt_string is None else found.prompt_string
    if not isinstance(value, list) or not value:
        raise wrong("expected a text or a list of token ids", place)
    for item in value:
        if type(item) not in (int, str) or (isinstance(item, int) and not 0 <= item <= MAX_ID):
            raise wrong("expected token ids, which are whole numbers from 0, or texts", place)
    return tuple(value)


async def as_tokens(service: Service, model: str, mixed: Mixed) -> list[int]:
    """Return the token ids of an input. Special tokens are added only if the input starts with text."""
    vocabulary = service.find(model).vocabulary or MAX_ID
    for item in mixed:
        if isinstance(item, int) and item >= vocabulary:
            raise BadRequest(f"the prompt contains invalid tokens: {item} is not below {vocabulary}")
    return await joined_prompt(service, model, mixed, True, True)


async def as_prompt(service: Service, model: str, given: Input) -> str | Sequence[int]:
    """Return an input in the service's format."""
    return given if isinstance(given, str) else await as_tokens(service, model, given)

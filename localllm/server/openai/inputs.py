"""Parse the prompts of completions and the inputs of embeddings, in all formats that clients send.

One input: "text", [12, 34], [12, "text", 34], {"prompt_string": "text"}, {"content": [{"type": "text", "text": "t"}]}.
Several inputs are a list of inputs. A list that contains a number is one input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from localllm.server.content import read_text_field
from localllm.server.errors import BadRequest
from localllm.server.fields import Fields
from localllm.server.interface import Service
from localllm.server.llamacpp.prompts import joined_prompt

Mixed = tuple[int | str, ...]  # token ids and texts of one input
Input = str | Mixed
MAX_ID = 2**31 - 1


def read_inputs(fields: Fields, name: str, most: int) -> list[Input]:
    """Return the inputs of a field, at least one; raise BadRequest with the path of an invalid input."""
    value = fields.data.get(name)
    if value is None:
        raise fields.wrong(name, "required, but missing")
    if not isinstance(value, list) or any(type(item) is int for item in value):
        return [_input(fields, name, value)]
    if not 0 < len(value) <= most:
        raise fields.wrong(name, f"expected 1 to {most} items, got {len(value)}")
    return [_input(fields, f"{name}[{number}]", item) for number, item in enumerate(value)]


def _input(fields: Fields, place: str, value: Any) -> Input:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return _object(Fields(value, fields.path(place)))
    if not isinstance(value, list) or not value:
        raise fields.wrong(place, "expected a text or a list of token ids")
    for item in value:
        if type(item) not in (int, str) or (isinstance(item, int) and not 0 <= item <= MAX_ID):
            raise fields.wrong(place, "expected token ids, which are whole numbers from 0, or texts")
    return tuple(value)


def _object(fields: Fields) -> str:
    if fields.has("multimodal_data"):
        raise fields.wrong("multimodal_data", "image and audio input is not supported; send text")
    if fields.has("prompt_string"):
        return fields.text("prompt_string")
    if not isinstance(fields.data.get("content"), list):
        raise fields.wrong("content", "expected a list of parts")
    return read_text_field(fields, "content") or ""


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

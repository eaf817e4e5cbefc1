"""Read prompts. A prompt is a string, token ids, a mix of both, or an object with a string; a field has one prompt or a
list.

"text" [12, 34] [12, "text", 34] {"prompt_string": "text"} ["text", [12, 34], {"prompt_string": "text"}]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from localllm.server.errors import BadRequest, NotSupported
from localllm.server.service import Service
from localllm.server.turn import Completion
from localllm.server.uploads import Upload

MAX_PROMPTS = 1024
SHAPES = "a text, a list of token ids, a list of texts and token ids, or an object with prompt_string"


def split(value: Any, name: str) -> list[Any]:
    """Return the prompts in a field. A list that contains a number is one prompt."""
    several = isinstance(value, list) and not any(_is_token(item) for item in value)
    found = value if several else [value]
    if not found:
        raise BadRequest(f"{name} must not be empty", name)
    if len(found) > MAX_PROMPTS:
        raise BadRequest(f"{name} has {len(found)} prompts; the limit is {MAX_PROMPTS}", name)
    return list(found)


async def tokens(
    service: Service, model: str, value: Any, name: str, *, add_special: bool = True, parse_special: bool = True
) -> list[int]:
    """Return the token ids of one prompt. BOS is added only if the prompt begins with text."""
    match value:
        case str():
            return await service.tokenize(model, value, add_special, parse_special)
        case list():
            return await _mixed(service, model, value, name, add_special, parse_special)
        case {"prompt_string": inner}:
            if "multimodal_data" in value:
                raise NotSupported("multimodal_data is not supported here; /completion takes it")
            if not isinstance(inner, dict):
                return await tokens(service, model, inner, name, add_special=add_special, parse_special=parse_special)
    raise BadRequest(f"{name}: expected {SHAPES}", name)


def with_media(value: Any, name: str) -> Completion | None:
    """Return the prompt of an object with `multimodal_data`, files in base64 for its markers, or None."""
    if not isinstance(value, dict) or value.get("multimodal_data") is None:
        return None
    text, media = value.get("prompt_string"), value["multimodal_data"]
    if not isinstance(text, str) or not isinstance(media, list) or not all(isinstance(each, str) for each in media):
        raise BadRequest(f"{name}: expected a text as prompt_string, and base64 texts as multimodal_data", name)
    return Completion(text, media=[Upload("image", each) for each in media])  # or a sound: its content decides


async def _mixed(
    service: Service, model: str, items: Sequence[Any], name: str, add_special: bool, parse_special: bool
) -> list[int]:
    vocabulary = service.find(model).vocabulary
    for item in items:
        if type(item) is int:
            if not 0 <= item < vocabulary:
                raise BadRequest(f"{name} contains invalid tokens: ids go from 0 to {vocabulary - 1}", name)
        elif not isinstance(item, str):
            raise BadRequest(f"{name}: expected {SHAPES}", name)
    return await joined_prompt(service, model, items, add_special, parse_special)


async def joined_prompt(
    service: Service, model: str, items: Sequence[int | str], add_special: bool, parse_special: bool
) -> list[int]:
    """Return the token ids of a mix of ids and strings. `add_special` only applies if the first item is a string."""
    texts = [item for item in items if isinstance(item, str)]
    if not texts:
        return [item for item in items if isinstance(item, int)]
    first = isinstance(items[0], str)
    made = iter(await service.tokenize_all(model, texts, add_special and first, parse_special))
    found: list[int] = []
    for item in items:
        found += next(made) if isinstance(item, str) else (item,)
    return found


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

"""Write a refusal in each API's error format: as the body of an error response, or as an event in a failing stream.

The path of the request determines the API.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from localllm.server.errors import Kind, Refusal
from localllm.server.turn import Json
from localllm.server.wire import frame, line


class Names(NamedTuple):
    """The names of a kind of error: the `type` in OpenAI's and llama.cpp's formats, and in Anthropic's, and OpenAI's
    `code`."""

    openai: str
    anthropic: str
    code: str | None = None


# For a full context, clients check OpenAI's `code`, and llama.cpp's tests check its `type` on the paths of both APIs.
NAMES: dict[Kind, Names] = {
    "invalid_request": Names("invalid_request_error", "invalid_request_error"),
    "context_length_exceeded": Names("exceed_context_size_error", "invalid_request_error", "context_length_exceeded"),
    "authentication": Names("authentication_error", "authentication_error", "invalid_api_key"),
    "permission": Names("permission_error", "permission_error"),
    "not_found": Names("not_found_error", "not_found_error", "not_found"),
    "too_large": Names("invalid_request_error", "request_too_large"),
    "timeout": Names("timeout_error", "timeout_error"),
    "rate_limit": Names("rate_limit_error", "rate_limit_error", "rate_limit_exceeded"),
    "unsupported": Names("not_supported_error", "invalid_request_error", "unsupported"),
    "unavailable": Names("unavailable_error", "overloaded_error"),
    "internal": Names("server_error", "api_error"),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """The error format of an API."""

    body: Callable[[Refusal], Json]
    event: Callable[[Refusal], bytes]  # used after a stream has started


def _openai(refusal: Refusal) -> Json:
    names = NAMES[refusal.kind]
    error = {"message": refusal.message, "type": names.openai, "param": refusal.param or None, "code": names.code}
    return {"error": error | dict(refusal.numbers)}


def _anthropic(refusal: Refusal) -> Json:
    error: Json = {"type": NAMES[refusal.kind].anthropic, "message": refusal.message}
    return {"type": "error", "error": error | ({"details": dict(refusal.details)} if refusal.details else {})}


def _ollama(refusal: Refusal) -> Json:
    return {"error": refusal.message}


def _llamacpp(refusal: Refusal) -> Json:
    error = {"code": refusal.status, "message": refusal.message, "type": NAMES[refusal.kind].openai}
    return {"error": error | dict(refusal.numbers)}


openai = Shape(_openai, lambda refusal: frame(_openai(refusal)))
anthropic = Shape(_anthropic, lambda refusal: frame(_anthropic(refusal), "error"))
ollama = Shape(_ollama, lambda refusal: line(_ollama(refusal)))
llamacpp = Shape(_llamacpp, lambda refusal: frame(_llamacpp(refusal)))

# The first matching prefix determines the format. Other paths use llama.cpp's format.
PREFIXES: tuple[tuple[str, Shape], ...] = (
    ("/v1/messages", anthropic),
    ("/v1/", openai),
    ("/chat/completions", openai),
    ("/responses", openai),
    ("/models", openai),
    ("/api/v0/", openai),
    ("/api/", ollama),
    ("/", llamacpp),
)


def shape_of(path: str) -> Shape:
    """Return the error format for a path."""
    return next((shape for prefix, shape in PREFIXES if path.startswith(prefix)), llamacpp)

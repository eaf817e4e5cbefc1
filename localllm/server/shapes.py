"""Write a refusal in each API's error format: as the body of an error response, or as an event in a failing stream.

The path of the request determines the API.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from localllm.server.errors import Kind, Refusal
from localllm.server.turn import Json
from localllm.server.wire import frame, line

# The `type` of each kind of error in OpenAI's and llama.cpp's formats. For a full context, clients check OpenAI's
# `code`, and llama.cpp's tests check this `type` on the paths of both APIs.
OPENAI: dict[Kind, str] = {
    "invalid_request": "invalid_request_error",
    "context_length_exceeded": "exceed_context_size_error",
    "authentication": "authentication_error",
    "permission": "permission_error",
    "not_found": "not_found_error",
    "too_large": "invalid_request_error",
    "timeout": "timeout_error",
    "rate_limit": "rate_limit_error",
    "unsupported": "not_supported_error",
    "unavailable": "unavailable_error",
    "internal": "server_error",
}
CODES: dict[Kind, str] = {
    "context_length_exceeded": "context_length_exceeded",
    "authentication": "invalid_api_key",
    "not_found": "not_found",
    "rate_limit": "rate_limit_exceeded",
    "unsupported": "unsupported",
}
ANTHROPIC: dict[Kind, str] = {
    "invalid_request": "invalid_request_error",
    "context_length_exceeded": "invalid_request_error",
    "authentication": "authentication_error",
    "permission": "permission_error",
    "not_found": "not_found_error",
    "too_large": "request_too_large",
    "timeout": "timeout_error",
    "rate_limit": "rate_limit_error",
    "unsupported": "invalid_request_error",
    "unavailable": "overloaded_error",
    "internal": "api_error",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """The error format of an API."""

    body: Callable[[Refusal], Json]
    event: Callable[[Refusal], bytes]  # used after a stream has started


def _openai(refusal: Refusal) -> Json:
    error = {
        "message": refusal.message,
        "type": OPENAI[refusal.kind],
        "param": refusal.param or None,
        "code": CODES.get(refusal.kind),
    }
    return {"error": error | dict(refusal.numbers)}


def _anthropic(refusal: Refusal) -> Json:
    error: Json = {"type": ANTHROPIC[refusal.kind], "message": refusal.message}
    return {"type": "error", "error": error | ({"details": dict(refusal.details)} if refusal.details else {})}


def _ollama(refusal: Refusal) -> Json:
    return {"error": refusal.message}


def _llamacpp(refusal: Refusal) -> Json:
    error = {"code": refusal.status, "message": refusal.message, "type": OPENAI[refusal.kind]}
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

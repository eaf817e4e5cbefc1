"""Map an exception to a refusal: HTTP status and kind of error, independent of the API.

    refusal_of(BadRequest("...", "messages"))  ->  Refusal(400, "invalid_request", "...", "messages")

`shapes.py` converts a refusal to the error format of OpenAI, Anthropic, Ollama or llama.cpp.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from localllm.base.errors import LocalLLMError
from localllm.base.notices import said
from localllm.base.printable import printable
from localllm.engine import ContextFull
from localllm.generation.errors import QueueFull, Stopped
from localllm.gguf.layout import GGUFError
from localllm.options.structure import NotFinished
from localllm.sandbox import ConfinedError
from localllm.server import errors

Kind = Literal[
    "invalid_request",
    "context_length_exceeded",
    "authentication",
    "permission",
    "not_found",
    "too_large",
    "timeout",
    "rate_limit",
    "unsupported",
    "unavailable",
    "internal",
]
MESSAGE = 2000  # maximum characters of an error message, which may quote the request
log = logging.getLogger("localllm.server")


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error in a form that does not depend on the API."""

    status: int
    kind: Kind
    message: str
    param: str = ""  # the invalid field of the request
    retry_after: int | None = None  # seconds
    numbers: Mapping[str, int] = field(default_factory=dict)  # llama.cpp's n_prompt_tokens and n_ctx
    details: Mapping[str, Any] = field(default_factory=dict)  # machine-readable details in Anthropic's format

    @property
    def headers(self) -> dict[str, str]:
        found = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.kind == "unsupported":  # OpenAI's and Anthropic's clients otherwise retry every 5xx status
            found["X-Should-Retry"] = "false"
        return found | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


# The first matching class determines the status. The request causes all other LocalLLMErrors, such as a bad option.
TABLE: tuple[tuple[type[BaseException], int, Kind], ...] = (
    (errors.BadRequest, 400, "invalid_request"),
    (errors.UnknownModel, 404, "not_found"),
    (errors.NotFound, 404, "not_found"),
    (ContextFull, 400, "context_length_exceeded"),
    (errors.TooLarge, 413, "too_large"),
    (errors.TooSlow, 408, "timeout"),
    (errors.TooManyRequests, 429, "rate_limit"),
    (errors.Unauthorized, 401, "authentication"),
    (errors.Forbidden, 403, "permission"),
    (errors.NotSupported, 501, "unsupported"),
    (errors.Loading, 503, "unavailable"),
    (errors.Draining, 503, "unavailable"),
    (errors.Unavailable, 503, "unavailable"),
    (QueueFull, 429, "rate_limit"),
    (NotFinished, 503, "unavailable"),
    (ConfinedError, 503, "unavailable"),  # a child process cannot be started
    (Stopped, 503, "unavailable"),
    (GGUFError, 500, "internal"),
    (LocalLLMError, 400, "invalid_request"),
)


def refusal_of(error: BaseException) -> Refusal:
    """Return the refusal for an exception. An unexpected exception is logged, and the client gets no details."""
    for kind, status, name in TABLE:
        if isinstance(error, kind):
            return Refusal(
                status,
                name,
                printable(said(error), MESSAGE),
                getattr(error, "param", ""),
                getattr(error, "retry_after", None),
                _numbers(error),
                getattr(error, "details", {}),
            )
    log.error("unexpected error", exc_info=error)
    return Refusal(500, "internal", "internal error; the server's log has the details")


def _numbers(error: BaseException) -> dict[str, int]:
    if isinstance(error, errors.PromptTooLong):
        return {"n_prompt_tokens": error.prompt_tokens, "n_ctx": error.context}
    return {}

"""Errors that only the server raises, and the refusal of an exception: its HTTP status and kind, for every API.

    refusal_of(BadRequest("...", "messages"))  ->  Refusal(400, "invalid_request", "...", "messages")

`shapes.py` converts a refusal to the error format of OpenAI, Anthropic, Ollama or llama.cpp.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from localllm.base.errors import LocalLLMError
from localllm.base.notices import said
from localllm.base.printable import printable
from localllm.engine import ContextFull
from localllm.generation.errors import EncoderFailed, QueueFull, Stopped
from localllm.gguf.layout import GGUFError
from localllm.options.structure import NotFinished
from localllm.sandbox import ConfinedError


class BadRequest(LocalLLMError):
    """A request that is invalid for every model. `param` is the invalid field, such as "messages[2].role"."""

    def __init__(self, message: str, param: str = "") -> None:
        super().__init__(message)
        self.param = param


class NoThreads(BadRequest):
    """The request refers to a conversation stored on the server, which stores none.

    `details` tells Anthropic's clients to send the full history.
    """

    details: ClassVar[Mapping[str, Any]] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


class UnknownModel(LocalLLMError):
    """The request names an unknown model."""


class NotFound(LocalLLMError):
    """The path is unknown or does not support the method."""


class NotSupported(LocalLLMError):
    """A feature that the API defines but the server or the model does not support."""


class PromptTooLong(ContextFull):
    """The prompt does not fit in the context. The error has both lengths in tokens."""

    def __init__(self, message: str, prompt_tokens: int, context: int) -> None:
        super().__init__(message)
        self.prompt_tokens = prompt_tokens
        self.context = context

    @classmethod
    def of(cls, tokens: int, context: int, at_least: str = "") -> Self:
        """Return the error for a prompt of `tokens` tokens. `at_least` is "at least " if the count is a lower bound."""
        size = f"the available context size of {context} tokens"  # llama.cpp's wording, which clients search for
        return cls(f"the prompt has {at_least}{tokens} tokens and exceeds {size}; shorten it", tokens, context)


class TooLarge(LocalLLMError):
    """The request body, or a value in it, exceeds a limit."""


class TooSlow(LocalLLMError):
    """The request body did not arrive in time."""


class Unauthorized(LocalLLMError):
    """The API key is missing or wrong."""


class Forbidden(LocalLLMError):
    """The request comes from a page of another site, or addresses an unknown host name."""


class _Later(LocalLLMError):
    """A temporary failure: the client may retry after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TooManyRequests(_Later):
    """This client, or all clients together, have too many open requests."""


class Unavailable(LocalLLMError):
    """The service is unavailable, and waiting may not help."""


class Unloadable(Unavailable):
    """The model cannot be loaded. Clients get no details; `reason` is for the server's log, which has it if `told`."""

    def __init__(self, message: str, reason: Exception, told: bool = False) -> None:
        super().__init__(message)
        self.reason, self.told = reason, told


class Loading(_Later):
    """The model is being loaded."""


class Draining(_Later):
    """The server is stopping and accepts no new requests."""


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
    (BadRequest, 400, "invalid_request"),
    (UnknownModel, 404, "not_found"),
    (NotFound, 404, "not_found"),
    (ContextFull, 400, "context_length_exceeded"),
    (TooLarge, 413, "too_large"),
    (TooSlow, 408, "timeout"),
    (TooManyRequests, 429, "rate_limit"),
    (Unauthorized, 401, "authentication"),
    (Forbidden, 403, "permission"),
    (NotSupported, 501, "unsupported"),
    (Loading, 503, "unavailable"),
    (Draining, 503, "unavailable"),
    (Unavailable, 503, "unavailable"),
    (QueueFull, 429, "rate_limit"),
    (NotFinished, 503, "unavailable"),
    (ConfinedError, 503, "unavailable"),  # a child process cannot be started
    (Stopped, 503, "unavailable"),
    (EncoderFailed, 500, "internal"),  # a bug
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
    if isinstance(error, PromptTooLong):
        return {"n_prompt_tokens": error.prompt_tokens, "n_ctx": error.context}
    return {}

"""Errors that only the server raises. `refusal.py` assigns an HTTP status to each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from localllm.base.errors import LocalLLMError
from localllm.engine import ContextFull


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
    """The model cannot be loaded. Clients get no details; `reason` is for the server's log."""

    def __init__(self, message: str, reason: LocalLLMError) -> None:
        super().__init__(message)
        self.reason = reason


class Loading(_Later):
    """The model is being loaded."""


class Draining(_Later):
    """The server is stopping and accepts no new requests."""

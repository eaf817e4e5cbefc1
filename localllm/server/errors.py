"""What the server refuses besides the errors of the program itself. `refusal.py` gives each its status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from localllm.engine import ContextFull
from localllm.errors import LocalLLMError


class BadRequest(LocalLLMError):
    """A request that no model could answer. `param` is the field at fault, such as "messages[2].role"."""

    def __init__(self, message: str, param: str = "") -> None:
        super().__init__(message)
        self.param = param


class NoThreads(BadRequest):
    """A request for a conversation that the server keeps. `details` tell Anthropic's clients to send all of it."""

    details: ClassVar[Mapping[str, Any]] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


class UnknownModel(LocalLLMError):
    """No model has this name."""


class NotFound(LocalLLMError):
    """Nothing has this path, or it is not asked for in this way."""


class NotSupported(LocalLLMError):
    """Something that the protocol knows but this server, or this model, does not do."""


class PromptTooLong(ContextFull):
    """A prompt that does not fit in the context, with both lengths in tokens."""

    def __init__(self, message: str, prompt_tokens: int, context: int) -> None:
        super().__init__(message)
        self.prompt_tokens = prompt_tokens
        self.context = context

    @classmethod
    def of(cls, tokens: int, context: int, at_least: str = "") -> Self:
        """Return the error for a prompt with `tokens` tokens; `at_least` is "at least " if it may have more."""
        size = f"the available context size of {context} tokens"  # llama.cpp's words, which clients look for
        return cls(f"the prompt has {at_least}{tokens} tokens and exceeds {size}; shorten it", tokens, context)


class TooLarge(LocalLLMError):
    """A body, or something in it, over a limit."""


class TooSlow(LocalLLMError):
    """A body that did not arrive in time."""


class Unauthorized(LocalLLMError):
    """The API key is missing or wrong."""


class Forbidden(LocalLLMError):
    """A page of another site, or a host name that is not ours."""


class _Later(LocalLLMError):
    """May work if repeated after some seconds."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TooManyRequests(_Later):
    """This client, or all of them together, have too many requests open."""


class Unavailable(LocalLLMError):
    """Cannot be had now, and waiting may not help."""


class Unloadable(Unavailable):
    """A model that cannot be loaded. Clients get no details; `reason` is for the server's log."""

    def __init__(self, message: str, reason: LocalLLMError) -> None:
        super().__init__(message)
        self.reason = reason


class Loading(_Later):
    """The model is being loaded."""


class Draining(_Later):
    """The server is stopping and takes no new requests."""

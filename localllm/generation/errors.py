"""Errors of the scheduler."""

from __future__ import annotations

from localllm.base.errors import LocalLLMError


class QueueFull(LocalLLMError):
    """Too many requests are waiting; try again after `retry_after` seconds."""

    retry_after = 1


class NotRepeated(LocalLLMError):
    """After a fault, an answer did not repeat the tokens that its client has; ask again."""


class EncoderFailed(LocalLLMError):
    """A bug ended the encoding of a picture or a sound. The log has its traceback."""


class Stopped(LocalLLMError):
    """The scheduler was closed, or stopped by an error."""

"""Errors of the scheduler."""

from __future__ import annotations

from localllm.base.errors import LocalLLMError


class QueueFull(LocalLLMError):
    """Too many requests are waiting; try again after `retry_after` seconds."""

    retry_after = 1


class Stopped(LocalLLMError):
    """The scheduler was closed, or stopped by an error."""

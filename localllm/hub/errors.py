"""Errors when finding, fetching or removing models."""

from __future__ import annotations

from localllm.base.errors import LocalLLMError


class StoreError(LocalLLMError):
    """A model could not be found, fetched or removed. The message has advice."""


class NotHere(StoreError):
    """No usable model of this name is on this computer. Fetching it helps."""

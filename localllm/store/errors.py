"""Errors of finding, fetching and removing models."""

from __future__ import annotations

from localllm.errors import LocalLLMError


class StoreError(LocalLLMError):
    """A model could not be found, fetched or removed; the message says what to do next."""


class NotHere(StoreError):
    """No model of this name is on this computer, or it cannot be opened; fetching it helps."""

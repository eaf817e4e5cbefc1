"""Errors when finding, downloading or removing models."""

from __future__ import annotations

from localllm.base.errors import LocalLLMError


class StoreError(LocalLLMError):
    """A model could not be found, downloaded or removed. The message has advice."""


class NotHere(StoreError):
    """No usable model with this name is on this computer, so the caller may download it."""

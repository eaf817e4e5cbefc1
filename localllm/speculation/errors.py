"""Errors of speculation."""

from __future__ import annotations

from localllm.errors import LocalLLMError


class SpeculationError(LocalLLMError):
    """Speculation is not possible as requested."""


class NoDrafts(SpeculationError):
    """The model takes no drafts of any kind."""

"""Errors of sampling."""

from __future__ import annotations

from localllm.base.errors import LocalLLMError


class SamplingError(LocalLLMError):
    """The logits are unusable for sampling."""

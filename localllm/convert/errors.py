"""The error of this package."""

from __future__ import annotations

from localllm.base.errors import LocalLLMError


class ConvertError(LocalLLMError):
    """A Hugging Face folder that cannot be converted. The message is one line: cause, place, and remedy."""

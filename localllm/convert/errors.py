"""The one error of this package."""

from __future__ import annotations

from localllm.errors import LocalLLMError


class ConvertError(LocalLLMError):
    """The Hugging Face folder cannot be converted; one line that says what, where and what to do next."""

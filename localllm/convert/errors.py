"""The error raised by this package."""

from __future__ import annotations

from localllm.base.errors import LocalLLMError


class ConvertError(LocalLLMError):
    """A checkpoint cannot be converted. The one-line message gives the cause, the place and the remedy."""

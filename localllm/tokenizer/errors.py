"""The error for tokenizer metadata that is missing, broken or unsupported, and for text or ids that do not fit it."""

from __future__ import annotations

from localllm.base.errors import LocalLLMError


class TokenizerError(LocalLLMError):
    """Invalid tokenizer or text; the message names the key or token, what was found and what is supported."""

"""The error of the tokenizer."""

from __future__ import annotations

from localllm.base.errors import LocalLLMError


class TokenizerError(LocalLLMError):
    """Invalid tokenizer metadata, text or ids; the message gives the key or token, the value found and the supported
    ones.
    """

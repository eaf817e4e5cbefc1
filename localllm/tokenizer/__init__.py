"""Tokenization and detokenization with the vocabulary in GGUF metadata. Token ids are the same as in llama.cpp.

May import: base, gguf.
Begin with: tokenizer.py, then vocab.py and pretokenize.py.
"""

from __future__ import annotations

from localllm.tokenizer.errors import TokenizerError
from localllm.tokenizer.tokenizer import StreamDecoder, Tokenizer
from localllm.tokenizer.vocab import has_tokenizer

__all__ = ["StreamDecoder", "Tokenizer", "TokenizerError", "has_tokenizer"]

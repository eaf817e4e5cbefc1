"""The table of tokenizer models (`tokenizer.ggml.model`): default special tokens and flags, and required data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

NO_TEXT_MODELS = ("none", "no_vocab", "test")  # values for models that accept only token ids

# How token texts represent the bytes of a text.
SPACES = "U+2581 for a space, <0x..> for a byte"
LETTERS = "one letter per byte"
ESCAPES = "Python's escapes"
PLAIN = "as they are, <0x..> for a byte"


@dataclass(frozen=True, slots=True)
class VocabKind:
    """An entry of the table. `ids` and `adds` are defaults for missing GGUF keys, as in llama.cpp."""

    method: str
    ids: Mapping[str, int] = field(default_factory=dict)  # bos, eos, unknown, seperator
    adds: tuple[str, ...] = ()  # names of special tokens to add
    needs: tuple[str, ...] = ()  # names of ids required for encoding
    scores: bool = False
    writes: str = LETTERS  # overridden by the pre-tokenizer of a vocabulary with merges
    prefix: bool = False  # whether a space is inserted before the first word
    merges: bool = False  # BPE: uses merges, and a pre-tokenizer
    pre: str = ""  # name of the pre-tokenizer, regardless of the GGUF
    adds_always: bool = False  # `adds` applies regardless of the GGUF's flags
    lowercase: bool = False


_GPT2 = VocabKind("byte-level BPE", {"bos": 11, "eos": 11}, merges=True)
_LLAMA = {"bos": 1, "eos": 2, "unknown": 0}
_BERT = {"bos": 101, "unknown": 100, "seperator": 102}
_AROUND = ("bos", "seperator")
VOCAB_KINDS: Mapping[str, VocabKind] = {
    "llama": VocabKind("SentencePiece BPE", _LLAMA, ("bos",), ("unknown",), True, writes=SPACES, prefix=True),
    "gpt2": _GPT2,
    "gemma4": VocabKind("BPE over UTF-8", merges=True, pre="gemma4"),
    "bert": VocabKind("WordPiece", _BERT, _AROUND, tuple(_BERT), writes=SPACES, adds_always=True, lowercase=True),
    "t5": VocabKind("SentencePiece unigram", {"eos": 1, "unknown": 2}, ("eos",), ("unknown",), True, writes=SPACES),
    "rwkv": VocabKind("the longest token at each byte", writes=ESCAPES, adds_always=True),
    "plamo2": VocabKind("the tokens with the highest sum of scores", _LLAMA, scores=True, writes=PLAIN),
    "hybriddna": replace(_GPT2, method="byte-level BPE, six DNA letters per token"),
    "whitespace": replace(_GPT2, method="BPE over UTF-8, without white space"),
}

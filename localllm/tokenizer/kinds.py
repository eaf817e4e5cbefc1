"""The meaning of each `tokenizer.ggml.model`: default special tokens and flags, and the required data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

NO_TEXT_MODELS = ("none", "no_vocab", "test")  # a file without a tokenizer, for token ids only

# How a vocabulary spells the bytes of a text in its tokens.
SPACES = "U+2581 for a space, <0x..> for a byte"
LETTERS = "one letter for each byte"
ESCAPES = "Python's escapes"
PLAIN = "as they are, <0x..> for a byte"


@dataclass(frozen=True, slots=True)
class VocabKind:
    """A row of the table. `ids` and `adds` are defaults if the file has no key, as in llama.cpp."""

    method: str
    ids: Mapping[str, int] = field(default_factory=dict)  # bos, eos, unknown, seperator
    adds: tuple[str, ...] = ()  # ids added around a text
    needs: tuple[str, ...] = ()  # ids required for encoding
    scores: bool = False
    writes: str = LETTERS  # overridden by the rule of a vocabulary with merges
    prefix: bool = False  # a space is put before the first word
    merges: bool = False  # BPE: reads merges, and the rule that splits a text into words
    pre: str = ""  # the rule, regardless of the file
    adds_always: bool = False  # `adds` applies regardless of the file's flags
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
    "hybriddna": replace(_GPT2, method="byte-level BPE, six letters of DNA a token"),
    "whitespace": replace(_GPT2, method="BPE over UTF-8, white space dropped"),
}

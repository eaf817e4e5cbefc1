"""What each `tokenizer.ggml.model` means: default special tokens and flags, and what else the file must hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

NO_TEXT_MODELS = ("none", "no_vocab", "test")  # a file without a tokenizer, for token ids only

# How a vocabulary writes the bytes of a text in its tokens.
SPACES = "U+2581 for a space, <0x..> for a byte"
LETTERS = "one letter for each byte"
ESCAPES = "Python's escapes"
PLAIN = "as they are, <0x..> for a byte"


@dataclass(frozen=True, slots=True)
class VocabKind:
    """A row of the table. `ids` and `adds` hold where the file says nothing, as in llama.cpp."""

    ids: Mapping[str, int] = field(default_factory=dict)  # bos, eos, unknown, seperator
    adds: tuple[str, ...] = ()  # the ids that are put around a text
    needs: tuple[str, ...] = ()  # ids that encoding cannot do without
    scores: bool = False
    writes: str = LETTERS  # with merges the rule decides
    prefix: bool = False  # a space precedes the first word
    merges: bool = False  # BPE: reads merges, and the rule that splits a text into words
    pre: str = ""  # the rule, whatever the file says
    adds_always: bool = False  # `adds` holds whatever the file's flags say
    lowercase: bool = False


_GPT2 = VocabKind({"bos": 11, "eos": 11}, merges=True)
_BERT = {"bos": 101, "unknown": 100, "seperator": 102}
VOCAB_KINDS: Mapping[str, VocabKind] = {
    # SentencePiece, by merging
    "llama": VocabKind({"bos": 1, "eos": 2, "unknown": 0}, ("bos",), ("unknown",), True, writes=SPACES, prefix=True),
    "gpt2": _GPT2,
    "gemma4": VocabKind(merges=True, pre="gemma4"),
    "bert": VocabKind(_BERT, ("bos", "seperator"), tuple(_BERT), writes=SPACES, adds_always=True, lowercase=True),
    "t5": VocabKind({"eos": 1, "unknown": 2}, ("eos",), ("unknown",), True, writes=SPACES),
    "rwkv": VocabKind(writes=ESCAPES, adds_always=True),
    "plamo2": VocabKind({"bos": 1, "eos": 2, "unknown": 0}, scores=True, writes=PLAIN),
    "hybriddna": _GPT2,
    "whitespace": _GPT2,
}

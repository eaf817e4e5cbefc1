"""A draft model with another vocabulary: tokens with equal bytes are matched, and others are converted as text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from localllm.generation.speculation.errors import SpeculationError
from localllm.generation.speculation.vocabulary import Vocabulary, match_vocabularies
from localllm.tokenizer import Tokenizer


def spm(*words: str, end: str = "</s>") -> Tokenizer:
    """Return a vocabulary of special tokens, all bytes, and then `words`."""
    tokens = ["<unk>", "<s>", end, *(f"<0x{b:02X}>" for b in range(256)), *words]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(words)]
    return Tokenizer.from_metadata(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": np.arange(len(tokens), dtype=np.float32),
            "tokenizer.ggml.token_type": np.array(kinds, np.int32),
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
        }
    )


def model(tokenizer: Tokenizer | None, size: int = 0, name: str = "m.gguf") -> Vocabulary:
    """Return the vocabulary of a model."""
    width = size or (tokenizer.vocab_size if tokenizer else 0)
    return Vocabulary(Path(name), width, tokenizer)


def test_equal_vocabularies_are_equal() -> None:
    mapping = match_vocabularies(model(spm("a", "b")), model(spm("a", "b")))
    assert mapping.identical
    logits = np.arange(261, dtype=np.float32)
    assert mapping.logits(logits) is logits
    assert mapping.to_draft(260) == (260,)


def test_tokens_are_the_same_by_their_bytes() -> None:
    """The other vocabulary has the tokens in another order, with further tokens in between. A byte token and
    a letter with equal text stay distinct.
    """
    ours, theirs = spm("a", "ab", "▁c"), spm("▁c", "x", "a", end="<end>")
    mapping = match_vocabularies(model(ours), model(theirs))
    ids, other = {w: 259 + i for i, w in enumerate(("a", "ab", "▁c"))}, {"▁c": 259, "x": 260, "a": 261}
    assert mapping.target_of[other["▁c"]] == ids["▁c"]
    assert mapping.target_of[other["a"]] == 3 + ord("a")  # the first of two target tokens with these bytes
    assert mapping.target_of[2] == 2  # both are end-of-text tokens
    assert mapping.to_draft(ids["▁c"]) == (other["▁c"],)
    logits = mapping.logits(np.ones(262, np.float32))
    assert logits[ids["▁c"]] == 1
    assert logits[ids["ab"]] == -np.inf  # the draft model's vocabulary lacks this token


def test_what_the_draft_does_not_have_is_spelled_to_it() -> None:
    mapping = match_vocabularies(model(spm("a", "ab", "abc")), model(spm("ab", "c")))
    assert mapping.to_draft(261) == tuple(spm("ab", "c").encode("abc", add_special=False))
    assert mapping.to_draft(0) == (0,)


def test_a_control_token_that_the_draft_does_not_know_is_left_out() -> None:
    ours = spm("a", end="<stop>")
    theirs = spm("a")
    theirs.eos = None
    assert match_vocabularies(model(ours), model(theirs)).to_draft(2) == ()


def test_rows_padded_beyond_the_vocabulary_do_not_matter() -> None:
    mapping = match_vocabularies(model(spm("a"), 264), model(spm("a"), 320))
    assert mapping.logits(np.zeros(320, np.float32)).shape == (264,)
    assert mapping.logits(np.zeros(320, np.float32))[260:].max() == -np.inf
    assert mapping.to_draft(263) == ()


def test_a_begin_token_that_only_the_draft_wants() -> None:
    ours, theirs = spm("a"), spm("a", "b")
    ours.add_bos = False
    assert match_vocabularies(model(ours), model(theirs)).begin == (1,)
    ours.add_bos = True
    assert match_vocabularies(model(ours), model(theirs)).begin == ()


def test_a_draft_that_shares_too_little_is_refused() -> None:
    many = spm(*(f"w{i}" for i in range(3000)))
    with pytest.raises(SpeculationError, match=r"draft.gguf: cannot draft for .*m.gguf: only 259 of its 3259 tokens"):
        match_vocabularies(model(spm("a")), model(many, name="draft.gguf"))


def test_without_tokenizers_the_sizes_must_agree() -> None:
    assert match_vocabularies(model(None, 100), model(None, 100)).identical
    with pytest.raises(SpeculationError, match="vocabularies differ"):
        match_vocabularies(model(None, 100), model(None, 101))
    with pytest.raises(SpeculationError, match=r"draft.gguf has no tokenizer"):
        match_vocabularies(model(spm("a")), model(None, 101, "draft.gguf"))

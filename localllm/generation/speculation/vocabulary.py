"""Maps the tokens of a draft model to the target model's tokens if their vocabularies differ.

Tokens correspond if they have the same bytes; special begin and end tokens correspond if they have the same role. Other
target tokens are retokenized for the draft model. Other draft tokens are never proposed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localllm.generation.speculation.errors import SpeculationError
from localllm.tokenizer import Tokenizer

LEAST_SHARED = 0.25  # minimum fraction of draft tokens that have a target token; below it, few drafts are usable


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The vocabulary of a model."""

    path: Path  # path of the GGUF, for messages
    size: int  # number of logits per position
    tokenizer: Tokenizer | None


class Mapping:
    """A token mapping: `target_of`, int32 (draft vocabulary,), gives the target token of each draft token, or -1."""

    def __init__(
        self, target_of: NDArray[np.int32], size: int, target: Tokenizer | None, draft: Tokenizer | None
    ) -> None:
        self.target_of = target_of
        self.identical = len(target_of) == size and bool((target_of == np.arange(size)).all())
        self._size, self._target, self._draft = size, target, draft
        self._usable = np.flatnonzero(target_of >= 0)
        draft_of = np.full(size, -1, np.int32)
        draft_of[target_of[self._usable[::-1]]] = self._usable[::-1]  # keep the first of several draft tokens
        self._draft_of: list[int] = draft_of.tolist()
        self._spelled: dict[int, tuple[int, ...]] = {}

    @property
    def begin(self) -> tuple[int, ...]:
        """The tokens that the draft model requires before a text and the target model does not add."""
        missing = self._draft is not None and self._draft.add_bos and not (self._target and self._target.add_bos)
        return (self._draft.bos,) if missing and self._draft and self._draft.bos is not None else ()

    def to_draft(self, token: int) -> tuple[int, ...]:
        """Return the draft tokens for a target token; empty for a control token missing from the draft model."""
        same = self._draft_of[token]
        return (same,) if same >= 0 else self._spell(token)

    def logits(self, drafted: NDArray[np.float32]) -> NDArray[np.float32]:
        """Map draft logits to logits (V,) over the target vocabulary, with -inf for tokens missing from the draft
        model.
        """
        if self.identical:
            return drafted
        result = np.full(self._size, -np.inf, np.float32)
        result[self.target_of[self._usable]] = drafted[self._usable]
        return result

    def _spell(self, token: int) -> tuple[int, ...]:
        if token not in self._spelled:
            assert self._target is not None
            assert self._draft is not None
            known = token < self._target.vocab_size
            text = self._target.piece(token, special=False).decode("utf-8", "replace") if known else ""
            self._spelled[token] = tuple(self._draft.encode(text, add_special=False)) if text else ()
        return self._spelled[token]


def match_vocabularies(target: Vocabulary, draft: Vocabulary) -> Mapping:
    """Match two vocabularies. Raise SpeculationError with the reason if they do not match."""
    size, drafted = target.size, draft.size
    ours, theirs = target.tokenizer, draft.tokenizer
    if ours is None or theirs is None:
        if size != drafted:
            missing = target if ours is None else draft
            raise SpeculationError(
                f"{draft.path}: cannot draft for {target.path}: their vocabularies differ ({drafted} and "
                f"{size} tokens) and {missing.path.name} has no tokenizer to compare them by; use another draft"
            )
        return Mapping(np.arange(size, dtype=np.int32), size, None, None)
    target_of = np.full(drafted, -1, np.int32)
    shared = _same_tokens(ours, theirs)
    target_of[list(shared)] = list(shared.values())
    target_of[target_of >= size] = -1
    if (target_of >= 0).sum() < LEAST_SHARED * theirs.vocab_size:
        raise SpeculationError(
            f"{draft.path}: cannot draft for {target.path}: only {(target_of >= 0).sum()} of its "
            f"{theirs.vocab_size} tokens are tokens of the model; use a draft of the same family"
        )
    return Mapping(target_of, size, ours, theirs)


def _same_tokens(ours: Tokenizer, theirs: Tokenizer) -> dict[int, int]:
    """Map draft tokens to the target tokens with the same bytes or the same special role."""
    by_bytes: dict[bytes, int] = {}
    for token in reversed(range(ours.vocab_size)):  # keep the first of several duplicates
        by_bytes[ours.piece(token)] = token
    by_bytes.pop(b"", None)
    shared: dict[int, int] = {}
    for token in range(theirs.vocab_size):
        piece = theirs.piece(token)
        if token < ours.vocab_size and piece and ours.piece(token) == piece:
            shared[token] = token  # duplicates with equal ids map to each other
        elif piece in by_bytes:
            shared[token] = by_bytes[piece]
    for one, other in ((ours.bos, theirs.bos), (ours.eos, theirs.eos)):
        if one is not None and other is not None:
            shared[other] = one
    return shared

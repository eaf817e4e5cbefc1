"""Drafts from a second, smaller model, which evaluates the same text with its own cache."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localllm.engine import Engine
from localllm.generation.speculation.vocabulary import Mapping

EDGES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)  # bounds of the classes, in probability under the draft model
PRIORS = (0.1, 0.2, 0.3, 0.4, 0.55, 0.7, 0.8, 0.9, 0.95)  # prior acceptance rate of each class


class Followed:
    """The target's tokens that a draft model has evaluated, and the sequence in the draft model's cache."""

    def __init__(self, engine: Engine, mapping: Mapping) -> None:
        self._engine, self._mapping = engine, mapping
        self.sequence = engine.add()
        self.tokens: list[int] = []  # token ids of the target
        self._ends: list[int] = []  # number of tokens in the draft cache after each of `tokens`

    def forget(self, keep: int) -> None:
        """Keep the first `keep` tokens, or none if the draft model's sliding windows have moved too far."""
        del self.tokens[keep:], self._ends[keep:]
        if not self._engine.truncate(self.sequence, self._ends[-1] if self._ends else 0):
            self.tokens, self._ends = [], []

    def spelled(self, tokens: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the draft model's tokens for the next `tokens`, and the length of its cache after each of `tokens`."""
        new: list[int] = [] if self.tokens else list(self._mapping.begin)
        ends = []
        length = self._ends[-1] if self._ends else 0
        for token in tokens:
            new += self._mapping.to_draft(token)
            ends.append(length + len(new))
        return new, ends

    def took(self, tokens: Sequence[int], ends: Sequence[int]) -> None:
        """Record that the sequence holds the next `tokens`, with the `ends` that `spelled` returned."""
        self.tokens += tokens
        self._ends += ends

    def close(self) -> None:
        self._engine.release(self.sequence)


def trust_of(logits: NDArray[np.float32], token: int) -> int:
    """Return the class of a draft by its probability under the draft model's `logits` (V,)."""
    with np.errstate(over="ignore"):
        return bisect_right(EDGES, 1 / float(np.exp(logits - logits[token]).sum()))

"""The KV cache state of a draft model that evaluates the target's text."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localllm.engine import Engine
from localllm.generation.speculation.vocabulary import Mapping

EDGES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)  # class bounds: probability under the draft model
PRIORS = (0.1, 0.2, 0.3, 0.4, 0.55, 0.7, 0.8, 0.9, 0.95)  # prior acceptance rate of each class


class Followed:
    """The target tokens that a draft model has evaluated, and the sequence in the draft model's KV cache."""

    def __init__(self, engine: Engine, mapping: Mapping) -> None:
        self._engine, self._mapping = engine, mapping
        self.sequence = engine.add()
        self.tokens: list[int] = []  # target token ids
        self._ends: list[int] = []  # length of the draft cache after each token in `tokens`

    def forget(self, keep: int) -> None:
        """Keep the first `keep` tokens, or none if the draft model's sliding-window cache cannot be rolled back."""
        del self.tokens[keep:], self._ends[keep:]
        if not self._engine.truncate(self.sequence, self._ends[-1] if self._ends else 0):
            self.tokens, self._ends = [], []

    def spelled(self, tokens: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the draft tokens for the next target `tokens`, and the draft cache length after each target token."""
        new: list[int] = [] if self.tokens else list(self._mapping.begin)
        ends = []
        length = self._ends[-1] if self._ends else 0
        for token in tokens:
            new += self._mapping.to_draft(token)
            ends.append(length + len(new))
        return new, ends

    def took(self, tokens: Sequence[int], ends: Sequence[int]) -> None:
        """Record that the draft cache now contains `tokens`, with the `ends` that `spelled` returned."""
        self.tokens += tokens
        self._ends += ends

    def close(self) -> None:
        self._engine.release(self.sequence)


def trust_of(logits: NDArray[np.float32], token: int) -> int:
    """Return the class of a draft by its probability under the draft model's `logits` (V,)."""
    with np.errstate(over="ignore"):
        return bisect_right(EDGES, 1 / float(np.exp(logits - logits[token]).sum()))

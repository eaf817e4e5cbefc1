"""Drafts by a second, smaller model that follows the text with a separate cache."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from localllm.engine import Engine, Rows
from localllm.errors import LocalLLMError
from localllm.sampling.sampler import Sampler
from localllm.speculation.policy import Costs
from localllm.speculation.rule import Guess
from localllm.speculation.vocabulary import Mapping

EDGES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)  # bounds of classes by the draft's probability
PRIORS = (0.1, 0.2, 0.3, 0.4, 0.55, 0.7, 0.8, 0.9, 0.95)


class Followed:
    """The tokens of the target that a draft model has evaluated, in a sequence of its own."""

    def __init__(self, engine: Engine, mapping: Mapping) -> None:
        self._engine, self._mapping = engine, mapping
        self.sequence = engine.add()
        self.tokens: list[int] = []  # of the target
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


class ModelDrafter:
    """A text as the draft model sees it. The draft cache is updated only when a draft is needed."""

    name = "draft model"

    def __init__(self, engine: Engine, mapping: Mapping, costs: Costs) -> None:
        self._engine, self._mapping, self._costs = engine, mapping, costs
        self._followed = Followed(engine, mapping)  # the text, then drafts
        self._text: list[int] = []  # tokens of the target
        self._good = 0  # length of the common prefix of both
        self._row: NDArray[np.float32] | None = None  # logits after the last followed token

    @property
    def step_seconds(self) -> float:
        """Seconds per drafted token."""
        return self._costs.seconds(1)

    def begin(self, text: Sequence[int]) -> None:
        seen = self._followed.tokens
        pairs = zip(seen, text, strict=False)
        self._good = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(seen), len(text)))
        self._text = list(text)

    def accept(self, token: int) -> None:
        at, seen = len(self._text), self._followed.tokens
        if self._good == at < len(seen) and seen[at] == token:
            self._good += 1
        self._text.append(token)

    def delay(self) -> float:
        """Return the seconds to catch up, not counting the last two tokens, which every draft evaluates anyway."""
        missing = len(self._text) - self._good - 2
        return max(missing, 0) * self._costs.seconds(self._costs.most) / self._costs.most

    def propose(self, sampler: Sampler) -> Iterator[Guess]:
        """Yield drafted tokens, each after a pass of the draft model. The caller's sampler accepts each before it
        requests the next.

        Ends when the draft model's context is full or its logits are NaN.
        """
        began, late = perf_counter(), self.delay() > 0
        try:
            if not self._catch_up():
                return
            while True:
                assert self._row is not None
                guess = self._guess(sampler, self._mapping.logits(self._row))
                if not late:
                    self._costs.observe(1, perf_counter() - began)
                yield guess
                began, late = perf_counter(), False
                if not self._mapping.to_draft(guess.token):
                    return
                self._read([guess.token])
        except LocalLLMError:
            return

    def close(self) -> None:
        self._followed.close()

    def _guess(self, sampler: Sampler, logits: NDArray[np.float32]) -> Guess:
        if sampler.options.greedy:
            token = sampler.sample(logits)
            return Guess(token, trust_of(logits, token), None)
        ids, q = sampler.distribution(logits)
        token = sampler.draw(ids, q)
        return Guess(token, bisect_right(EDGES, float(q[ids == token].sum())), (ids, q))

    def _catch_up(self) -> bool:
        """Evaluate new tokens, or the last one again for its logits; False if the draft model has no token for it."""
        text, keep = self._text, min(self._good, len(self._text) - 1)
        while keep > 0 and not any(self._mapping.to_draft(token) for token in text[keep:]):
            keep -= 1
        self._followed.forget(keep)
        self._row = None
        self._read(text[len(self._followed.tokens) :])
        self._good = len(self._followed.tokens)
        return self._row is not None

    def _read(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens of the target."""
        new, ends = self._followed.spelled(tokens)
        length = self._followed.sequence.length
        try:
            for start in range(0, len(new), self._engine.limits.rows):
                self._row = self._evaluate(new[start : start + self._engine.limits.rows])
        except BaseException:
            self._engine.truncate(self._followed.sequence, length)
            raise
        self._followed.took(tokens, ends)

    def _evaluate(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Append draft tokens; return the logits (V,) after the last."""
        logits: NDArray[np.float32] = self._engine.step([Rows(self._followed.sequence, tokens)])[0].logits[-1]
        return logits

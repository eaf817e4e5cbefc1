"""Drafting with a multi-token-prediction head of the model (arXiv 2412.19437), which reads the model's hidden states.

Position t of the head's cache layer holds token t + 1, evaluated with the hidden state of token t. A first draft
follows from the newest token; further drafts follow from the head's own hidden states. The layer shares the cache
blocks of the model's layers, so a reused prefix includes it. The hidden state of the last reused token is unknown, and
that position is not written again: this can make a draft wrong, but not an answer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from localllm.engine import DraftRows, Engine
from localllm.generation.request_state import RequestState
from localllm.generation.speculation.model_drafter import Drafting, ModelDrafter
from localllm.generation.speculation.policy import Costs

_RATIO = 0.2  # expected cost of a pass, relative to the model's, until passes are observed
MOST_BEHIND = 256  # hidden states are evaluated when a request has this number, whether it drafts or not


class _Reading(Drafting):
    """The hidden states of a request that the head has not evaluated."""

    def __init__(self, one: RequestState) -> None:
        super().__init__(one)
        self.start = 0  # position of the first
        self.hidden: list[NDArray[np.float32]] = []  # (n, width) each
        self.following: NDArray[np.float32] | None = None  # the head's hidden state after the newest draft (1, width)

    @property
    def count(self) -> int:
        return sum(map(len, self.hidden))

    def rows(self, most: int, wanted: int) -> DraftRows:
        """Return at most `most` hidden states with the tokens that follow them. The caller removes them by `drop`."""
        sequence = self.one.sequence
        assert sequence is not None
        tokens = self.one.tokens[self.start + 1 : self.start + 1 + min(self.count, most)]
        return DraftRows(sequence, self.start, tokens, np.concatenate(self.hidden)[: len(tokens)], wanted)

    def drop(self, count: int) -> None:
        left = np.concatenate(self.hidden)[count:]
        self.hidden, self.start = [left] if len(left) else [], self.start + count


class HeadDrafter(ModelDrafter[_Reading]):
    """Drafts with the head of an engine's plan."""

    def __init__(self, engine: Engine, costs: Costs, verifying: Costs, longest: int) -> None:
        super().__init__(costs, verifying, longest, _RATIO, engine.clock)
        self._engine = engine
        self._reading_of: dict[int, _Reading] = {}  # by request number

    def end(self, one: RequestState) -> None:
        self._reading_of.pop(one.number, None)

    def close(self) -> None:
        self._reading_of.clear()

    def evaluated(self, one: RequestState, hidden: NDArray[np.float32]) -> None:
        each, sequence = self._of(one), one.sequence
        assert sequence is not None
        start = sequence.length - len(hidden)
        if each.start + each.count != start:  # the first tokens after a cached prefix, or after a preemption
            each.hidden, each.start = [], start
        each.hidden.append(hidden.copy())
        known = len(one.tokens) - 1 - each.start  # the token after the last hidden state may be unknown
        if min(each.count, known) >= MOST_BEHIND:
            rows = each.rows(min(known, self._engine.limits.rows), wanted=0)
            self._engine.draft([rows])
            each.drop(len(rows.tokens))

    def _of(self, one: RequestState) -> _Reading:
        if one.number not in self._reading_of:
            self._reading_of[one.number] = _Reading(one)
        return self._reading_of[one.number]

    def _draft(self, found: list[_Reading], rows: int, worth: float) -> None:
        found = [each for each in found if each.hidden and each.one.sequence is not None]
        room = [(each.one.sequence, each.room) for each in found if each.one.sequence is not None]
        with self._engine.drafting(room):
            super()._draft(found, rows, worth)

    def _caught_up(self, found: list[_Reading]) -> list[tuple[_Reading, list[int]]]:
        most = self._engine.limits.rows // max(len(found), 1)
        for each in found:
            while each.count > most:
                self._engine.draft([each.rows(most, wanted=0)])
                each.drop(most)
        parts = [each.rows(most, wanted=1) for each in found]
        guessed = self._evaluated(found, parts)
        for each, part in zip(found, parts, strict=True):
            each.drop(len(part.tokens))
        return guessed

    def _step(self, active: list[tuple[_Reading, list[int]]]) -> list[tuple[_Reading, list[int]]]:
        parts = []
        for each, tokens in active:
            assert each.one.sequence is not None
            assert each.following is not None
            start = len(each.one.tokens) + len(each.one.drafts) - 2  # the token before the newest draft
            parts.append(DraftRows(each.one.sequence, start, tokens, each.following, 1))
        return self._evaluated([each for each, _ in active], parts)

    def _evaluated(self, found: list[_Reading], parts: list[DraftRows]) -> list[tuple[_Reading, list[int]]]:
        """Evaluate one part per request in one step; return (request, [drafted token])."""
        if not parts:
            return []
        with self._timed(sum(len(part.tokens) for part in parts)):
            logits, following = self._engine.draft(parts)
        guessed = []
        for number, each in enumerate(found):
            each.following = following[number : number + 1].copy()
            if (draft := self.guess(each.one, logits[number])) is not None:
                each.one.drafts.append(draft)
                guessed.append((each, [draft.token]))
        return guessed

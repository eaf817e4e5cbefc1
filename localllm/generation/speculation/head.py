"""Drafting with the multi-token-prediction heads of a model (arXiv 2412.19437), which read the model's hidden states.

Position t of the cache layer of head k (from 1) holds token t + k, evaluated with a hidden state of position t. If a
model has one head, further drafts follow from the head's own hidden states. If it has several, each drafts one token.
The layers share the cache blocks of the model's layers, so a reused prefix includes them. The hidden state of the last
reused token is unknown, and that position is not written again: this can make a draft wrong, but not an answer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import BackendError
from localllm.engine import DraftRows, Engine
from localllm.generation.request_state import RequestState
from localllm.generation.speculation.model_drafter import Drafting, ModelDrafter
from localllm.generation.speculation.policy import Costs

F32 = NDArray[np.float32]
_RATIO = 0.2  # expected cost of a pass, relative to the model's, until passes are observed
MOST_BEHIND = 256  # hidden states are evaluated when a request has this number, whether it drafts or not
_NONE = np.empty((0, 0), np.float32)


class _Pending:
    """Hidden states that a head has not evaluated with the tokens that the text has."""

    def __init__(self) -> None:
        self.start = 0  # position of the first
        self.count = 0
        self._parts: list[F32] = []  # (n, width) each; joined when they are read, because one arrives per token

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def hidden(self) -> F32:
        """All hidden states (count, width)."""
        if len(self._parts) > 1:
            self._parts = [np.concatenate(self._parts)]
        return self._parts[0] if self._parts else _NONE

    def put(self, start: int, hidden: F32) -> None:
        """Store the hidden states from position `start`, replacing later ones."""
        if not self.start < start <= self.end:  # the first, or the first after a cached prefix or a preemption
            self._parts, self.start = [], start
        elif start < self.end:
            self._parts = [self.hidden[: start - self.start]]
        self._parts.append(hidden.copy())
        self.count = start + len(hidden) - self.start

    def drop(self, stop: int) -> None:
        """Forget the positions before `stop`."""
        if stop > self.start:
            self._parts = [self.hidden[stop - self.start :]]
            self.start, self.count = stop, self.end - stop


class _Reading(Drafting):
    """The hidden states of a request that the heads have not evaluated."""

    def __init__(self, one: RequestState, heads: int) -> None:
        super().__init__(one)
        self.pending = [_Pending() for _ in range(heads)]
        self.following = _NONE  # the only head's hidden state after the newest draft (1, width)

    def known(self, head: int) -> int:
        """Return the first position for which the text has no token that this head reads."""
        return len(self.one.tokens) - 1 - head

    def rows(self, head: int, stop: int, wanted: int) -> DraftRows:
        """Return a head's pending positions before `stop`, with tokens of the text and of the drafts."""
        sequence, pending = self.one.sequence, self.pending[head]
        assert sequence is not None
        drafted = [draft.token for draft in self.one.drafts]
        text = self.one.tokens[pending.start + head + 1 : stop + head + 1]
        tokens = [*text, *drafted][: stop - pending.start]
        return DraftRows(sequence, pending.start, tokens, pending.hidden[: len(tokens)], wanted)


class HeadDrafter(ModelDrafter[_Reading]):
    """Drafts with the heads of an engine's plan."""

    def __init__(self, engine: Engine, costs: Costs, verifying: Costs, longest: int) -> None:
        self._heads = engine.draft_heads
        most = longest if len(self._heads) == 1 else min(longest, len(self._heads))
        super().__init__(costs, verifying, most, _RATIO, engine.clock)
        self._engine = engine
        self._reading_of: dict[int, _Reading] = {}  # by request number

    def end(self, one: RequestState) -> None:
        self._reading_of.pop(one.number, None)

    def close(self) -> None:
        self._reading_of.clear()

    def evaluated(self, one: RequestState, hidden: F32) -> None:
        each, sequence = self._of(one), one.sequence
        assert sequence is not None
        if self._heads[0].shares_cache:  # it reads the hidden state of the newest token
            each.pending[0].drop(each.pending[0].end)
            each.pending[0].put(sequence.length - 1, hidden[-1:])
            return
        start = sequence.length - len(hidden)
        continues = each.pending[0].end == start
        for number, pending in enumerate(each.pending):
            if not self._follows(number):
                pending.put(start, hidden)
            elif not continues:
                pending.put(start, hidden[:0])
        if any(min(p.end, each.known(number)) - p.start >= MOST_BEHIND for number, p in enumerate(each.pending)):
            try:
                for number, pending in enumerate(each.pending):
                    self._catch_up(number, each, min(pending.end, each.known(number)))
            except BackendError:  # the heads skip these positions; a lost executable also fails the next step
                for pending in each.pending:
                    pending.drop(pending.end)

    def _of(self, one: RequestState) -> _Reading:
        if one.number not in self._reading_of:
            self._reading_of[one.number] = _Reading(one, len(self._heads))
        return self._reading_of[one.number]

    def _follows(self, number: int) -> bool:
        """Whether a head reads the hidden states of the head before it, and not the model's."""
        return self._heads[number].hidden.index != self._heads[0].hidden.index

    def _feeds(self, number: int) -> bool:
        """Whether the next head reads the hidden states of this one."""
        return number + 1 < len(self._heads) and self._follows(number + 1)

    def _draft(self, found: list[_Reading], rows: int, worth: float) -> None:
        found = [each for each in found if each.pending[0].count and each.one.sequence is not None]
        room = [(each.one.sequence, each.room) for each in found if each.one.sequence is not None]
        with self._engine.drafting(room):
            super()._draft(found, rows, worth)

    def _caught_up(self, found: list[_Reading]) -> list[tuple[_Reading, list[int]]]:
        return self._newest(0, found)

    def _step(self, active: list[tuple[_Reading, list[int]]]) -> list[tuple[_Reading, list[int]]]:
        found = [each for each, _ in active]
        if len(self._heads) > 1:
            return self._newest(len(found[0].one.drafts), found)
        parts = []
        for each, tokens in active:
            assert each.one.sequence is not None
            drafted = 0 if self._heads[0].shares_cache else len(each.one.drafts)
            start = len(each.one.tokens) + drafted - 2  # the token before the newest one, or the newest draft
            parts.append(DraftRows(each.one.sequence, start, tokens, each.following, 1))
        return self._evaluated(0, found, parts)

    def _newest(self, number: int, found: list[_Reading]) -> list[tuple[_Reading, list[int]]]:
        """Evaluate the pending positions of a head; return (request, [drafted token])."""
        most = self._engine.limits.rows // max(len(found), 1)
        for each in found:
            self._catch_up(number, each, min(each.pending[number].end - most, each.known(number)), most)
        return self._evaluated(number, found, [each.rows(number, each.pending[number].end, wanted=1) for each in found])

    def _catch_up(self, number: int, each: _Reading, stop: int, most: int = 0) -> None:
        """Evaluate the pending positions of a head before `stop`, at most `most` per step."""
        pending, most = each.pending[number], most or self._engine.limits.rows
        while pending.start < stop:
            part = each.rows(number, min(pending.start + most, stop), wanted=0)
            _, following = self._engine.draft([part], number)
            self._done(number, each, part, following)

    def _done(self, number: int, each: _Reading, part: DraftRows, following: F32) -> None:
        """Record that a head has evaluated `part`; it evaluates positions with drafted tokens again."""
        stop = part.start + len(part.tokens)
        if self._feeds(number):
            each.pending[number + 1].put(part.start, following)
        each.pending[number].drop(min(stop, each.known(number)))

    def _evaluated(
        self, number: int, found: list[_Reading], parts: list[DraftRows]
    ) -> list[tuple[_Reading, list[int]]]:
        """Evaluate one part per request in one step of a head; return (request, [drafted token])."""
        if not parts:
            return []
        with self._timed(sum(len(part.tokens) for part in parts)):
            logits, following = self._engine.draft(parts, number)
        counts = [len(part.tokens) if self._feeds(number) else 1 for part in parts]
        states = np.split(following, np.cumsum(counts[:-1]))
        guessed = []
        for each, part, row, own in zip(found, parts, logits, states, strict=True):
            each.following = own[-1:].copy()
            self._done(number, each, part, own)
            if (draft := self.guess(each.one, self._heads[number].spread(row))) is not None:
                each.one.drafts.append(draft)
                guessed.append((each, [draft.token]))
        return guessed

"""Drafting with a second, smaller model. Prompts are prefilled in chunks, in the same steps as others' drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from localllm.engine import Engine, Result, SequenceRows
from localllm.engine.prefix import same
from localllm.generation.request_state import RequestState
from localllm.generation.speculation.draft import Followed
from localllm.generation.speculation.model_drafter import Drafting, ModelDrafter
from localllm.generation.speculation.policy import Costs
from localllm.generation.speculation.vocabulary import Mapping

CATCH_UP = 64  # maximum prefill tokens in a step of the draft model; decoding requests wait for the step
_HORIZON = 128  # maximum number of tokens that an answer is assumed to still generate
_MOST_ENDED = 8  # maximum number of ended requests whose sequences are kept


class _Following(Drafting):
    """The draft model's state for one request."""

    def __init__(self, one: RequestState, followed: Followed) -> None:
        super().__init__(one)
        self.followed = followed
        self.good = 0  # number of leading tokens evaluated by the draft model

    def catch_up(self, most: int) -> tuple[list[int], bool]:
        """Return at most `most` tokens to evaluate next, and whether they reach the end of the text.

        The newest token is always included, even if it was already evaluated, because its logits are needed.
        """
        text = self.one.text_tokens  # the draft model sees no pictures
        self.followed.forget(min(len(text) - self.behind, len(text) - 1))
        self.good = len(self.followed.tokens)
        missing = text[self.good : self.good + most]
        return missing, self.good + len(missing) == len(text)

    @property
    def behind(self) -> int:
        """Number of tokens of the text that the draft model has not yet evaluated."""
        text, seen = self.one.text_tokens, self.followed.tokens
        while self.good < min(len(seen), len(text)) and seen[self.good] == text[self.good]:
            self.good += 1
        return len(text) - self.good


class DraftModel(ModelDrafter[_Following]):
    """Drafts with a second model, whose vocabulary `mapping` maps to the target model's."""

    def __init__(
        self,
        engine: Engine,
        mapping: Mapping,
        costs: Costs,
        verifying: Costs,
        longest: int,
        ratio: float = 0.1,
        clock: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(costs, verifying, longest, ratio, clock or engine.clock)
        self._engine, self._mapping = engine, mapping
        self._drafting: dict[int, _Following] = {}  # by request number
        self._ended: list[Followed] = []  # sequences of ended requests, reusable by the next turn of a chat

    def end(self, one: RequestState) -> None:
        """Keep the sequence of an ended request for later requests."""
        if (found := self._drafting.pop(one.number, None)) is not None:
            self._ended.append(found.followed)
            if len(self._ended) > _MOST_ENDED:
                self._ended.pop(0).close()

    def close(self) -> None:
        """Free all sequences."""
        for followed in [*self._ended, *(each.followed for each in self._drafting.values())]:
            followed.close()
        self._ended, self._drafting = [], {}

    def _pays(self, each: _Following, rows: int, worth: float) -> bool:
        """Whether drafting for the rest of the answer saves more time than the draft model's prefill takes."""
        missing = each.behind - self._longest
        if missing <= 0:
            return True
        rounds = max(min(each.one.tokens_left, _HORIZON) * (1 - self.acceptance.mean), 1.0)
        return self._outlook(1, 1.0, 0, rows, worth) * rounds > missing * self._seconds(self._costs.most) / (
            self._costs.most
        )

    def _continues(self, token: int) -> bool:
        return bool(self._mapping.to_draft(token))

    def _of(self, one: RequestState) -> _Following:
        if one.number not in self._drafting:
            self._drafting[one.number] = _Following(one, self._followed(one.text_tokens))
        return self._drafting[one.number]

    def _followed(self, tokens: Sequence[int]) -> Followed:
        """Return the ended request's sequence with the longest common prefix, or an empty sequence."""
        best = max(self._ended, key=lambda each: same(each.tokens, tokens), default=None)
        if best is None or not same(best.tokens, tokens):
            return Followed(self._engine, self._mapping)
        self._ended.remove(best)
        return best

    def _caught_up(self, found: list[_Following]) -> list[tuple[_Following, list[int]]]:
        """Evaluate tokens missing from the draft cache. Return the requests with a first draft, and that draft."""
        left, parts = CATCH_UP, []
        most = self._engine.limits.rows // len(found)
        for each in found:
            tokens, whole = each.catch_up(min(max(left, 0) + self._longest + 1, most))
            if not whole:
                left -= len(tokens)
            if tokens:
                parts.append((each, tokens, whole))
        return self._evaluated(parts)

    def _step(self, active: list[tuple[_Following, list[int]]]) -> list[tuple[_Following, list[int]]]:
        """Evaluate the newest drafts. Return the requests with another draft, and that draft."""
        return self._evaluated([(each, tokens, True) for each, tokens in active])

    def _evaluated(self, parts: list[tuple[_Following, list[int], bool]]) -> list[tuple[_Following, list[int]]]:
        """Evaluate (request, tokens, whether to draft) in one step; return (request, [drafted token])."""
        spelled = [each.followed.spelled(tokens) for each, tokens, _ in parts]
        chosen = [number for number, (new, _) in enumerate(spelled) if new]
        if not chosen:
            return []
        began = self._clock()
        rows = [
            SequenceRows(parts[i][0].followed.sequence, spelled[i][0], "last" if parts[i][2] else "none")
            for i in chosen
        ]
        while self._ended and not self._engine.fits([(each.sequence, len(each.tokens)) for each in rows]):
            self._ended.pop(0).close()
        results: list[Result] = self._engine.step(rows)
        count = sum(len(spelled[i][0]) for i in chosen)
        seconds = self._clock() - began
        self._passed(count, seconds)
        for i in chosen:
            new, whole = len(spelled[i][0]), parts[i][2]
            if new > 1:
                prefill = max(new - self._longest - 1, 0) if whole else new
                self._round.prefill.append((parts[i][0], seconds * prefill / count, whole))
        guessed = []
        for i, result in zip(chosen, results, strict=True):
            each, tokens, wanted = parts[i]
            each.followed.took(tokens, spelled[i][1])
            if wanted and (draft := self.guess(each.one, self._mapping.logits(result.logits[-1]))) is not None:
                each.one.drafts.append(draft)
                guessed.append((each, [draft.token]))
        return guessed

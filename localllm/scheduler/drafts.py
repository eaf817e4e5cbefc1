"""Drafted tokens in a batch: repetitions of each request's own text, or those of a draft model, verified where that
pays.

A drafted token is verified by a further row in the step. The row pays if the expected gain, the chance of its
acceptance times a request's share of a step, exceeds the time that it adds. Since drafters propose one token for each
place, accepting it when it equals the sampled one keeps the distribution, and even the tokens, of plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

from localllm.backends.base import Limits
from localllm.scheduler.answering import Answering
from localllm.scheduler.draft_model import DraftModel
from localllm.speculation import ngram
from localllm.speculation.ngram import NgramDrafter
from localllm.speculation.policy import Acceptance, Costs
from localllm.speculation.rule import Guess

_FRESH = 48  # steps with drafts after which one without is timed again
_HOPELESS = 0.05  # chance that all drafted tokens so far are accepted, below which drafting stops


class Drafts:
    """Proposes tokens for all requests of a scheduler."""

    def __init__(self, costs: Costs, longest: int, model: DraftModel | None = None, repeats: bool = True) -> None:
        """`repeats`: draft repetitions. `model` drafts for requests that have none that pay."""
        self._costs, self._longest, self._model, self._repeats = costs, longest, model, repeats
        self._acceptance = Acceptance(ngram.PRIORS)
        self._stale = 0  # steps since one without drafts

    def begin(self, one: Answering) -> None:
        """Let a request's drafter read its prompt."""
        one.drafting = True
        if self._repeats:
            one.drafter = NgramDrafter()
            one.drafter.begin(one.tokens)

    def end(self, one: Answering) -> None:
        """Let the draft model keep what it holds of a request for a later one, as far as its cache allows."""
        if self._model is not None:
            self._model.end(one)

    def propose(self, writing: Sequence[Answering], limits: Limits) -> None:
        """Set `guesses` and `verified` of the requests that are writing."""
        for one in writing:
            one.guesses, one.verified, one.modelled = self._guess(one, limits.positions), 0, False
        if writing and len(writing) < self._costs.most and self._stale < _FRESH:
            self._choose(writing, limits)
        self._stale = self._stale + 1 if any(one.verified for one in writing) else 0

    def _choose(self, writing: Sequence[Answering], limits: Limits) -> None:
        """Set `verified` where it pays, and draft with the model where repetitions do not."""
        rows = len(writing)
        pace = sum(one.pace for one in writing) / rows
        worth = pace * self._costs.seconds(rows) / rows  # seconds that a further token saves
        rows += self._verify(writing, rows, worth)
        rest = [one for one in writing if not one.verified]
        if self._model is None or not rest or rows >= self._costs.most:
            return
        for one in rest:
            one.guesses, one.modelled = [], True
        self._model.propose(rest, rows, worth, limits.positions)
        more = self._verify(rest, rows, worth)
        self._model.verified(self._costs.seconds(rows + more) - self._costs.seconds(rows))

    def observe(self, rows: int, prompt: int, seconds: float) -> None:
        """Record a step of `rows` rows in all. Only one without rows of prompts tells what decoding costs."""
        if not prompt and rows <= self._costs.most:
            self._costs.observe(rows, seconds)

    def plain_seconds(self, requests: int) -> float:
        """Return the seconds of a step that decodes so many requests without drafts."""
        return self._costs.seconds(min(requests, self._costs.most))

    def judge(self, one: Answering) -> None:
        """Record which guesses were right, also of those that were not verified."""
        acceptance = self._acceptance_of(one)
        for trust, right in one.outcome:
            acceptance.observe(trust, float(right))
        if self._model is not None and one.modelled:
            self._model.accepted(sum(right for _, right in one.outcome[: one.verified]))
        one.outcome.clear()

    def close(self) -> None:
        """Free what the draft model holds."""
        if self._model is not None:
            self._model.close()

    def _guess(self, one: Answering, positions: int) -> list[Guess]:
        if one.drafter is None:
            return []
        room = min(self._longest, one.left - 1, positions - len(one.tokens) - 1)
        found: list[Guess] = []
        stands = 1.0
        if room < 1:
            return []
        for guess in one.drafter.propose(one.sampler):
            found.append(guess)
            stands *= self._acceptance.expect(guess.trust)
            if len(found) >= room or stands < _HOPELESS:
                break
        return found[: one.sampler.valid([guess.token for guess in found])]  # a grammar may forbid the rest

    def _acceptance_of(self, one: Answering) -> Acceptance:
        return self._model.acceptance if self._model is not None and one.modelled else self._acceptance

    def _verify(self, ones: Sequence[Answering], rows: int, worth: float) -> int:
        """Set `verified` of requests in a step of `rows` rows so far; return how many rows that adds.

        The drafts of all requests compete for rows: the most likely ones come first.
        """
        chances: list[tuple[float, int]] = []  # that a draft and all before it are accepted, and whose it is
        for number, one in enumerate(ones):
            stands, acceptance = 1.0, self._acceptance_of(one)
            for guess in one.guesses:
                stands *= acceptance.expect(guess.trust)
                chances.append((stands, number))
        chances.sort(key=lambda each: -each[0])
        best, found, won = 0.0, 0, 0.0
        for count, (stands, _) in enumerate(chances[: self._costs.most - rows], 1):
            won += stands * worth
            gain = won - (self._costs.seconds(rows + count) - self._costs.seconds(rows))
            if gain > best:
                best, found = gain, count
        for _, number in chances[:found]:
            ones[number].verified += 1
        return found

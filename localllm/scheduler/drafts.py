"""Drafted tokens in a batch: repetitions of each request's own text, verified where that pays.

A drafted token is verified by a further row in the step. The row pays if the expected gain, the chance of its
acceptance times a request's share of a step, exceeds the time that it adds. Since the drafter proposes one token for
each place, accepting it when it equals the sampled one keeps the distribution, and even the tokens, of plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

from localllm.backends.base import Limits
from localllm.scheduler.answering import Answering
from localllm.speculation import ngram
from localllm.speculation.ngram import NgramDrafter
from localllm.speculation.policy import Acceptance, Costs
from localllm.speculation.rule import Guess

_HOPELESS = 0.05  # chance that all drafted tokens so far are accepted, below which drafting stops


class Drafts:
    """Proposes tokens for all requests of a scheduler."""

    def __init__(self, costs: Costs, longest: int) -> None:
        self._costs, self._longest = costs, longest
        self._acceptance = Acceptance(ngram.PRIORS)

    def begin(self, one: Answering) -> None:
        """Let a request's drafter read its prompt."""
        one.drafter = NgramDrafter()
        one.drafter.begin(one.tokens)

    def propose(self, writing: Sequence[Answering], limits: Limits) -> None:
        """Set `guesses` and `verified` of the requests that are writing."""
        rows = len(writing)
        for one in writing:
            one.guesses, one.verified = self._guess(one, limits.positions), 0
        if not rows or rows >= self._costs.most:
            return
        worth = self._costs.seconds(rows) / rows  # seconds that a further token saves
        for one in writing:
            one.verified = self._worth_verifying(one, rows, worth)
            rows += one.verified

    def observe(self, rows: int, prompt: int, seconds: float) -> None:
        """Record a step without prompt rows."""
        if not prompt and rows <= self._costs.most:
            self._costs.observe(rows, seconds)

    def judge(self, one: Answering) -> None:
        """Record which guesses were right, also of those that were not verified."""
        for trust, right in one.outcome:
            self._acceptance.observe(trust, float(right))
        one.outcome.clear()

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

    def _worth_verifying(self, one: Answering, rows: int, worth: float) -> int:
        best, found, stands, won = 0.0, 0, 1.0, 0.0
        for count, guess in enumerate(one.guesses, 1):
            if rows + count > self._costs.most:
                break
            stands *= self._acceptance.expect(guess.trust)
            won += stands * worth
            gain = won - (self._costs.seconds(rows + count) - self._costs.seconds(rows))
            if gain > best:
                best, found = gain, count
        return found

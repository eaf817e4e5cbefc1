"""Batched speculative decoding: drafts come from repetitions in each request's own text, or from a model.

Verifying a draft adds one token to the step. The token is added if the expected gain (the probability of acceptance
times a request's share of the step's time) exceeds the time that the token costs. Drafters propose a single token per
position, which is accepted if the sampler chooses the same token. The output is therefore identical to plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import Limits
from localllm.generation.request_state import RequestState
from localllm.generation.speculation import suffixes
from localllm.generation.speculation.earlier import EarlierByAccount, Following
from localllm.generation.speculation.model_drafter import ModelDrafter
from localllm.generation.speculation.policy import Acceptance, Costs
from localllm.generation.speculation.rule import DraftToken
from localllm.generation.speculation.suffixes import SuffixDrafter

_FRESH = 48  # maximum consecutive steps with drafts; a step without drafts then updates the cost of plain decoding
_HOPELESS = 0.05  # stop drafting when the probability that all drafts so far are accepted falls below this


class Drafts:
    """Drafts tokens for all requests of a scheduler."""

    def __init__(
        self,
        costs: Costs,
        longest: int,
        model: ModelDrafter[Any] | None = None,
        repeats: bool = True,
        earlier: int = 0,
    ) -> None:
        """`repeats`: draft from repetitions, also of `earlier` tokens of earlier answers. `model` drafts for requests
        without such drafts worth verifying.
        """
        self._earlier = EarlierByAccount(earlier) if earlier else None
        self._costs, self._longest, self._model, self._repeats = costs, longest, model, repeats
        self._acceptance = Acceptance(suffixes.PRIORS)
        self._stale = 0  # consecutive steps with drafts

    def begin(self, one: RequestState) -> None:
        """Start drafting for a request: with the repetitions in its prompt."""
        one.drafting = True
        if self._repeats:
            earlier = self._earlier.of(one.request.account) if self._earlier is not None else None
            one.drafter = SuffixDrafter(one.tokens, Following(earlier, one.tokens) if earlier is not None else None)

    def end(self, one: RequestState) -> None:
        """Stop drafting for a request. The draft model keeps its sequence for later requests."""
        if self._earlier is not None and one.done and one.request.reuse:
            self._earlier.add(one.request.account, one.tokens, one.prompt_tokens)
        if self._model is not None:
            self._model.end(one)

    def propose(self, decoding: Sequence[RequestState], limits: Limits) -> None:
        """Set `drafts` and `verified` of the decoding requests."""
        indexing = sum(one.drafter is not None and one.drafter.behind > 1 for one in decoding)
        most = suffixes.INDEXED // max(indexing, 1)
        for one in decoding:
            one.drafts, one.verified, one.modelled = self._guess(one, limits.positions, most), 0, False
        if decoding and len(decoding) < self._costs.most and self._stale < _FRESH:
            self._choose(decoding, limits)
        self._stale = self._stale + 1 if any(one.verified for one in decoding) else 0

    def _choose(self, decoding: Sequence[RequestState], limits: Limits) -> None:
        """Choose the drafts from repetitions to verify; use the draft model for requests without such drafts."""
        rows = len(decoding)
        pace = sum(one.pace for one in decoding) / rows
        worth = pace * self._costs.seconds(rows) / rows  # seconds that one more accepted token saves
        rows += self._verify(decoding, rows, worth)
        rest = [one for one in decoding if not one.verified]
        if self._model is None or not rest or rows >= self._costs.most:
            return
        for one in rest:
            one.drafts, one.modelled = [], True
        self._model.propose(rest, rows, worth, limits.positions)
        more = self._verify(rest, rows, worth)
        self._model.verified(self._costs.seconds(rows + more) - self._costs.seconds(rows))

    def observe(self, rows: int, prompt: int, seconds: float) -> None:
        """Record the duration of a step with `rows` tokens. Steps with prefill are ignored."""
        if not prompt and rows <= self._costs.most:
            self._costs.observe(rows, seconds)

    def plain_seconds(self, requests: int) -> float:
        """Return the expected duration, in seconds, of decoding `requests` requests in one step without drafts."""
        return self._costs.seconds(min(requests, self._costs.most))

    def evaluated(self, one: RequestState, hidden: NDArray[np.float32]) -> None:
        """Pass on the hidden states (T, width) of the newest tokens that a request keeps in the cache."""
        if self._model is not None and len(hidden):
            self._model.evaluated(one, hidden)

    def judge(self, one: RequestState) -> None:
        """Record which drafts matched the sampled tokens, including drafts that were not verified."""
        acceptance = self._acceptance_of(one)
        for trust, right in one.outcome:
            acceptance.observe(trust, float(right))
        if self._model is not None and one.modelled:
            self._model.accepted(sum(right for _, right in one.outcome[: one.verified]))
        one.outcome.clear()

    def close(self) -> None:
        """Free the draft model's sequences."""
        if self._model is not None:
            self._model.close()

    def _guess(self, one: RequestState, positions: int, most: int) -> list[DraftToken]:
        if one.drafter is None:
            return []
        room = min(self._longest, one.tokens_left - 1, positions - len(one.tokens) - 1)
        found: list[DraftToken] = []
        stands = 1.0
        if room < 1:
            return []
        for draft in one.drafter.propose(one.sampler, max(most, 2)):
            found.append(draft)
            stands *= self._acceptance.expect(draft.trust)
            if len(found) >= room or stands < _HOPELESS:
                break
        return found[: one.sampler.valid([draft.token for draft in found])]  # drop drafts that a grammar forbids

    def _acceptance_of(self, one: RequestState) -> Acceptance:
        return self._model.acceptance if self._model is not None and one.modelled else self._acceptance

    def _verify(self, ones: Sequence[RequestState], rows: int, worth: float) -> int:
        """Choose the drafts to verify in a step that has `rows` tokens so far; return the number of drafts chosen.

        The drafts of all requests compete for the step; the most probable drafts come first.
        """
        chances: list[tuple[float, int]] = []  # (probability that a draft and all earlier ones are accepted, request)
        for number, one in enumerate(ones):
            stands, acceptance = 1.0, self._acceptance_of(one)
            for draft in one.drafts:
                stands *= acceptance.expect(draft.trust)
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

"""Batched speculative decoding: drafts come from repetitions in each request's own text, or from a model.

Verifying a draft adds one token to the step. The token is added if the expected gain (the probability of acceptance
times a request's share of the step's time) exceeds the time that the token costs. Each request gets its drafts from
the source that promises the larger gain. Drafters propose a single token per position, which is accepted if the
sampler chooses the same token. The output is therefore identical to plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from operator import mul
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import Limits
from localllm.engine.prefix import same
from localllm.generation.request_state import RequestState
from localllm.generation.speculation import suffixes
from localllm.generation.speculation.earlier import EarlierByAccount, Following
from localllm.generation.speculation.policy import Acceptance, Budget, Costs
from localllm.generation.speculation.rule import DraftToken
from localllm.generation.speculation.suffixes import SuffixDrafter

if TYPE_CHECKING:
    from localllm.generation.speculation.model_drafter import ModelDrafter, Round

_TIRED = 8  # steps in sequence without a draft worth verifying, after which some steps do not look for drafts
_LOOKING = 0.005  # share of a step's time that looking may take then
_MOST_SKIPPED = 7  # maximum number of steps between two that look for drafts
_FRESH = 48  # maximum consecutive steps with drafts; a step without drafts then updates the cost of plain decoding
_HOPELESS = 0.05  # stop drafting when the probability that all drafts so far are accepted falls below this
_SHARE = 0.01  # maximum share of the steps' time to spend on looking for repetitions, in addition to `_SAVED`
_SAVED = 0.1  # share of the time that accepted repetitions have saved, which may be spent too
_INDEXED = 16  # tokens that are indexed at once, however little time may be spent
_MOST_CREDIT = 1.0  # maximum seconds saved up for looking for repetitions
_MOST_ENDED = 4  # maximum number of ended requests whose texts are kept for later turns


@dataclass(slots=True)
class Proposal:
    """The drafts of a step, until its results are known."""

    seconds: float = 0.0  # time spent on drafting
    rows: int = 0  # decode tokens without drafts
    verified: int = 0  # number of drafts that the step verifies
    requests: int = 0  # number of requests that share the cost: those with drafts
    draft_cost: float = 0.0  # time of verifying a draft, in plain tokens
    round: Round | None = None  # of the drafting model


class Drafts:
    """Drafts tokens for all requests of a scheduler."""

    def __init__(
        self,
        costs: Costs,
        longest: int,
        model: ModelDrafter[Any] | None = None,
        repeats: bool = True,
        shortest_pass: float = 0.0,
        reported: bool = True,
        waits: bool = False,
        clock: Callable[[], float] = perf_counter,
        earlier: int = 0,
    ) -> None:
        """`repeats`: draft from repetitions, also of `earlier` tokens of earlier answers. `model`: draft with a model
        as well.

        If `shortest_pass` (seconds) is given, only a small share of the time is spent on looking for repetitions, and
        drafting is `pointless` if forward passes are shorter than that. `reported`: statistics mention drafts even if
        none were made. `waits`: do not draft before the costs are known well. `clock` is the engine's.
        """
        self._earlier = EarlierByAccount(earlier) if earlier else None
        self._costs, self._longest, self._model, self._repeats = costs, longest, model, repeats
        self._acceptance = Acceptance(suffixes.PRIORS)
        self._budget = model.budget if model is not None else Budget()
        self._stale = 0  # consecutive steps with drafts
        self._shortest_pass, self._reported, self._waits = shortest_pass, reported, waits
        self.new_repeats: Callable[[Sequence[int], Following | None], SuffixDrafter] = SuffixDrafter
        self._credit = 0.0 if shortest_pass else inf  # seconds that may be spent on looking for repetitions
        self._indexing = 5e-6  # seconds per token to index
        self._clock = clock
        self._proposal = Proposal()  # of the next step
        self._judged = Proposal()  # of the step whose results are taken
        self._tired = self._skip = 0  # steps in sequence without a draft worth verifying; next steps that do not look
        self._looking = 0.0  # seconds that a step without a draft worth verifying spends on looking
        self._cost = 0.0  # seconds of the newest step, with its drafting
        self._rows = self._prompt = 0  # its decode tokens with drafts, and its prefill tokens
        self._worth = 0.0  # seconds that one more accepted token saves in this step
        self._ended: list[tuple[str, SuffixDrafter]] = []  # of ended requests by account, for the next turn of a chat

    @property
    def pointless(self) -> bool:
        """Whether forward passes are too short for drafting to save time."""
        return self._costs.sure and self._costs.seconds(1) < self._shortest_pass

    def skip_step(self) -> bool:
        """Skip a step that neither looks for repetitions nor decides about drafts of the model. Return whether it was
        skipped. If not, call `propose`.
        """
        looks = self._repeats and not self._skip
        if looks or not (self._model.skip_step() if self._model is not None else self._repeats):
            return False
        if self._skip:
            self._skip -= 1
        self.forget(self._proposal)  # of a step that found no room
        self._stale, self._proposal = 0, Proposal()
        return True

    def depart(self) -> Proposal:
        """Return the proposal of the step that begins now; `observe` takes it when the step has ended."""
        proposal, self._proposal = self._proposal, Proposal()
        return proposal

    def forget(self, proposal: Proposal) -> None:
        """Forget the proposal of a step that was not evaluated."""
        if self._model is not None and proposal.round is not None:
            self._model.forget(proposal.round)

    @property
    def _early(self) -> bool:
        """Whether a pass without drafts has to come first."""
        return not (self._costs.sure if self._waits else self._costs.known)

    def begin(self, one: RequestState) -> None:
        """Start drafting for a request: with the repetitions in its prompt."""
        one.drafting = self._reported
        if self._repeats:
            earlier = self._earlier.of(one.request.account) if self._earlier is not None else None
            following = Following(earlier, one.text_tokens) if earlier is not None else None
            one.drafter = self._extended(one, following) or self.new_repeats(one.text_tokens, following)

    def end(self, one: RequestState) -> None:
        """Stop drafting for a request. Its text and the draft model's sequence are kept for later requests."""
        if self._earlier is not None and one.done and one.request.reuse:
            text = one.text_tokens
            self._earlier.add(one.request.account, text, len(text) - one.answer_tokens)
        if one.drafter is not None and one.request.reuse:
            self._ended = [*self._ended, (one.request.account, one.drafter)][-_MOST_ENDED:]
        one.drafter = None
        if self._model is not None:
            self._model.end(one)

    def _extended(self, one: RequestState, following: Following | None) -> SuffixDrafter | None:
        """Return the drafter of an ended request of the same account, with whose whole text this request begins.
        Extend it to the whole text of this request.
        """
        text = one.text_tokens
        for number, (account, drafter) in enumerate(self._ended):
            if account == one.request.account and same(drafter.text, text) == len(drafter.text):
                del self._ended[number]
                drafter.extend(text, following)
                return drafter
        return None

    def propose(self, decoding: Sequence[RequestState], limits: Limits) -> None:
        """Set `drafts` and `verified` of the decoding requests."""
        began = self._clock()
        self.forget(self._proposal)  # of a step that found no room
        self._proposal = Proposal()
        for one in decoding:
            one.drafts, one.verified, one.modelled = [], 0, False
        worth = False
        if decoding and len(decoding) < self._costs.most and self._stale < _FRESH and not self._early:
            indexing = sum(one.drafter is not None and one.drafter.behind > 1 for one in decoding)
            most = max(suffixes.INDEXED // max(indexing, 1), 2)
            for one in decoding:
                one.drafts = self._guess(one, limits.positions, most)
            worth = self._choose(decoding, limits)
        self._proposal.rows = len(decoding)
        self._proposal.verified = sum(one.verified for one in decoding)
        self._stale = self._stale + 1 if self._proposal.verified else 0
        self._proposal.seconds = self._clock() - began
        self._tire(worth)

    def _tire(self, worth: bool) -> None:
        """Decide how many of the next steps do not look for drafts. `worth`: some draft was worth verifying."""
        self._tired = 0 if worth else self._tired + 1
        if worth or self._early:
            return
        self._looking += 0.2 * (self._proposal.seconds - self._looking)
        if self._tired > _TIRED:  # the schedule of a step with drafts takes as long again
            self._skip = min(int(2 * self._looking / (_LOOKING * self._costs.seconds(1))), _MOST_SKIPPED)

    def _choose(self, decoding: Sequence[RequestState], limits: Limits) -> bool:
        """Draft with the model where that promises more than the repetitions, and choose the drafts to verify. Return
        whether any draft is worth verifying.
        """
        rows = len(decoding)
        plain = self._costs.seconds(rows) / rows
        self._worth = worth = plain * sum(one.pace for one in decoding) / rows
        if self._model is not None:
            self._proposal.round = self._model.begin_round(plain)
            promised = self._model.promised(rows, worth)
            sharing = max(sum(bool(one.drafts) for one in decoding), 1)
            chosen = [one for one in decoding if promised > self._promised(one, rows, worth, sharing)]
            if chosen:
                self._with_model(chosen, rows, worth, limits.positions)
        return self._verify(decoding, rows, worth)

    def _with_model(self, chosen: Sequence[RequestState], rows: int, worth: float, positions: int) -> None:
        """Draft with the model. Requests for which it drafts nothing keep their drafts from repetitions."""
        assert self._model is not None
        repeats = [one.drafts for one in chosen]
        for one in chosen:
            one.drafts = []
        self._model.propose(chosen, rows, worth, positions)
        for one, found in zip(chosen, repeats, strict=True):
            one.modelled = bool(one.drafts)
            one.drafts = one.drafts or found

    def observe(self, rows: int, prompt: int, seconds: float, proposal: Proposal | None = None) -> None:
        """Record the duration of a step with `rows` tokens, before its results are taken. `prompt` of them are prefill,
        and costs are not learned from such steps.
        """
        self._judged = proposal or Proposal()
        if self._model is not None and self._judged.round is not None:
            self._judged.round.over = True
        self._cost, self._rows, self._prompt = self._judged.seconds + seconds, rows - prompt, prompt
        self._credit = min(self._credit + _SHARE * seconds, max(self._credit, _MOST_CREDIT))
        if not prompt and rows <= self._costs.most:
            self._costs.observe(rows, seconds)
        if rows > prompt:
            self._budget.passed()
        else:
            self._costs.read(rows, seconds)
        if self._judged.verified and self._costs.known:
            plain = self._costs.seconds(self._judged.rows)
            added = self._costs.seconds(self._judged.rows + self._judged.verified) - plain
            self._judged.draft_cost = added * self._judged.rows / plain / self._judged.verified

    def plain_seconds(self, requests: int, seconds: float) -> float:
        """Return the expected duration, in seconds, that the newest step, which took `seconds`, would have had without
        drafts. It decoded `requests` requests.
        """
        if not (self._judged.verified and self._costs.known and self._cost):
            return seconds
        most = self._costs.most
        plain = self._costs.seconds(min(requests, most))
        if self._prompt:  # a step with prefill takes longer than its decode tokens
            added = self._judged.seconds + self._costs.seconds(min(self._rows, most)) - plain
            plain = max(self._cost - added, plain)
        return seconds * plain / self._cost

    def evaluated(self, one: RequestState, hidden: NDArray[np.float32]) -> None:
        """Pass on the hidden states (T, width) of the newest tokens that a request keeps in the cache."""
        if self._model is not None and len(hidden):
            self._model.evaluated(one, hidden)

    def judge(self, one: RequestState) -> None:
        """Record which drafts matched the sampled tokens, including drafts that were not verified."""
        if not one.outcome:
            return
        acceptance = self._acceptance_of(one)
        for trust, right in one.outcome:
            acceptance.observe(trust, float(right))
        accepted = sum(right for _, right in one.outcome[: one.verified])
        judged = self._judged
        if judged.round is not None and one.modelled:
            judged.round.won += accepted - one.verified * judged.draft_cost
        elif self._costs.known:
            self._credit += _SAVED * accepted * self._worth
            if one.verified and judged.requests:
                self._budget.settle((accepted - one.verified * judged.draft_cost) / judged.requests)
        one.outcome.clear()

    def close(self) -> None:
        """Free the draft model's sequences."""
        self._ended = []
        if self._model is not None:
            self._model.close()

    def _guess(self, one: RequestState, positions: int, most: int) -> list[DraftToken]:
        """Return the drafts from repetitions, unless looking for them has taken too long so far."""
        room = min(self._longest, one.tokens_left - 1, positions - len(one.tokens) - 1)
        if one.drafter is None or self._credit < 0 or room < 1:
            return []
        began = self._clock()
        found: list[DraftToken] = []
        affordable = min(self._credit / self._indexing, most)
        indexed = min(one.drafter.behind, max(int(affordable), min(_INDEXED, most)))
        stands = 1.0
        for draft in one.drafter.propose(one.sampler, indexed):
            found.append(draft)
            stands *= self._acceptance.expect(draft.trust)
            if len(found) >= room or stands < _HOPELESS:
                break
        if found:
            del found[one.sampler.valid([draft.token for draft in found]) :]  # drop drafts that a grammar forbids
        spent = self._clock() - began
        if indexed > _INDEXED:
            self._indexing += 0.3 * (spent / indexed - self._indexing)
        self._credit -= spent
        return found

    def _acceptance_of(self, one: RequestState) -> Acceptance:
        return self._model.acceptance if self._model is not None and one.modelled else self._acceptance

    def _chances(self, one: RequestState) -> Iterator[float]:
        """Return the probabilities that a draft and all earlier ones are accepted, in order."""
        acceptance = self._acceptance_of(one)
        return accumulate((acceptance.expect(draft.trust) for draft in one.drafts), mul)

    def _best(self, chances: Sequence[float], rows: int, worth: float, requests: int = 0) -> tuple[int, float]:
        """Return the most profitable number of drafts, from the most probable ones, and their gain in seconds.

        The step has `rows` tokens without them. If `requests` have drafts, these must not cost more than the budget
        allows.
        """
        plain = self._costs.seconds(rows)
        won = list(accumulate(chances[: self._costs.most - rows], initial=0.0))
        added = [self._costs.seconds(rows + number) - plain for number in range(len(won))]
        few = [
            number for number in range(len(won))
            if not (number and requests)
            or self._budget.allows(added[number] * rows / (plain * requests), -(-number // requests))
        ]  # fmt: skip
        best = max(few, key=lambda number: won[number] * worth - added[number])
        pace = (plain + added[best]) / (rows + won[best])  # if the next steps are alike, a token saves only this
        if pace < worth:
            best = max(few, key=lambda number: won[number] * pace - added[number])
        return best, won[best] * worth - added[best]

    def _promised(self, one: RequestState, rows: int, worth: float, requests: int) -> float:
        """Return the expected gain, in seconds, of the drafts of one request alone, if `requests` have drafts."""
        if not one.drafts:
            return 0.0
        return self._best(list(self._chances(one)), rows, worth, requests)[1]

    def _verify(self, ones: Sequence[RequestState], rows: int, worth: float) -> bool:
        """Choose the drafts to verify in a step that has `rows` tokens so far; return whether any are worth it.

        The drafts of all requests compete for the step; the most probable drafts come first. Those that the budget does
        not allow are only compared with the sampled tokens, which updates the acceptance rates.
        """
        ranked = [(stands, number) for number, one in enumerate(ones) for stands in self._chances(one)]
        if not ranked:
            return False
        ranked.sort(key=lambda each: -each[0])
        chances = [stands for stands, _ in ranked]
        proposal = self._proposal
        proposal.requests = sum(bool(one.drafts) for one in ones)
        if (of := proposal.round) is not None and of.shared:  # the budget is settled with the same number
            proposal.requests = of.shared = max(of.shared, proposal.requests)
        found, _ = self._best(chances, rows, worth, proposal.requests)
        for _, number in ranked[:found]:
            ones[number].verified += 1
        return found > 0 or self._best(chances, rows, worth)[0] > 0

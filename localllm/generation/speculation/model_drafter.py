"""Batched drafting with a model: each step of the drafter evaluates one token per request.

The drafter proposes its most likely token. A draft is accepted if the sampler chooses the same token, so the output is
identical to plain decoding. Measured times and acceptance rates decide how much to draft. Drafting pauses after rounds
that lost time. draft_model.py drafts with a second model, head.py with a multi-token-prediction head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import BackendError
from localllm.base.errors import LocalLLMError
from localllm.generation.request_state import RequestState
from localllm.generation.speculation import draft
from localllm.generation.speculation.draft import trust_of
from localllm.generation.speculation.policy import Budget, Costs, Judge
from localllm.generation.speculation.rule import DraftToken
from localllm.sampling.chain import HIGHEST
from localllm.sampling.sampler import Sampler

_LONGEST_WAIT = 12  # maximum number of steps before the budget is compared with the costs again
_HOPELESS = 0.1  # stop drafting when the probability that all drafts so far are accepted falls below this


class Drafting:
    """The drafter's state for one request. `stands` is the probability that all its drafts are accepted."""

    def __init__(self, one: RequestState) -> None:
        self.one = one
        self.room, self.stands = 0, 1.0
        self.chargeable: float | None = None  # tokens of the budget that the rest of its prefill may take, once begun
        self.complete = False  # whether its first prefill is complete; pauses cause further prefill


@dataclass(slots=True, eq=False)
class Round:
    """The cost and the gain of drafting for one step."""

    spent: float = 0.0  # seconds of drafting, without prefill
    # of each request: its prefill in this round in seconds, and whether it is complete
    prefill: list[tuple[Drafting, float, bool]] = field(default_factory=list)
    won: float = 0.0  # accepted drafts, less the cost of their verification, in tokens
    shared: int = 0  # requests that share the cost: those for which the drafter ran, even if it drafted nothing
    over: bool = False  # whether the step has been evaluated


D = TypeVar("D", bound=Drafting)


class ModelDrafter(ABC, Generic[D]):
    """Drafts for the requests of a core. Only the stepping thread accesses it."""

    def __init__(self, costs: Costs, verifying: Costs, longest: int, ratio: float, clock: Callable[[], float]) -> None:
        """`costs` are the step times of the drafter, `verifying` the step times of the target model.

        `ratio` is the expected ratio of the two until `costs` are known. `clock` is the target engine's.
        """
        self._clock = clock
        self._costs, self._verifying, self._longest, self._ratio = costs, verifying, longest, ratio
        self._steps = 0  # forward passes in the last round
        self._waits = 0  # next steps for which the budget is expected to be too small for one draft
        self._judge = Judge(draft.PRIORS)
        self.acceptance, self.budget = self._judge.acceptance, Budget()
        self._round = Round()  # the newest
        self._rounds: deque[Round] = deque()  # of steps in flight, and of steps collected since the last draft
        self._passing = 0.0  # time of the forward passes in the last round
        self._expected = 0.0  # what its steps were expected to take
        self._besides = 0.0  # moving average of a step's time outside its forward pass

    # -- implemented by each drafter -------------------------------------------------------------------------------

    @abstractmethod
    def end(self, one: RequestState) -> None:
        """Forget a request that has ended."""

    @abstractmethod
    def close(self) -> None:
        """Free all sequences."""

    def evaluated(self, one: RequestState, hidden: NDArray[np.float32]) -> None:
        """Take the hidden states (T, width) of the newest tokens that the target model evaluated and keeps."""

    @abstractmethod
    def _of(self, one: RequestState) -> D:
        """Return the state of a request."""

    @abstractmethod
    def _caught_up(self, found: list[D]) -> list[tuple[D, list[int]]]:
        """Evaluate the missing tokens. Return the requests with a first draft, and that draft."""

    @abstractmethod
    def _step(self, active: list[tuple[D, list[int]]]) -> list[tuple[D, list[int]]]:
        """Evaluate the newest drafts. Return the requests with another draft, and that draft."""

    def _pays(self, each: D, rows: int, worth: float) -> bool:
        """Whether drafting for the rest of the answer saves more time than the drafter's prefill takes."""
        return True

    def _continues(self, token: int) -> bool:
        """Whether the drafter can evaluate this token."""
        return True

    def propose(self, ones: Sequence[RequestState], rows: int, worth: float, positions: int) -> None:
        """Draft for the decoding requests of a step that has `rows` tokens so far.

        `worth` is the time in seconds that one more accepted token saves. `positions` is the maximum length of a
        request.
        """
        found = [self._of(one) for one in ones]
        for each in found:
            tokens = len(each.one.tokens)
            each.room, each.stands = min(self._longest, each.one.tokens_left - 1, positions - tokens - 1), 1.0
        found = [each for each in found if each.room > 0 and self._pays(each, rows, worth)]
        if not found:
            return
        if self._outlook(len(found), float(len(found)), 0, rows, worth) <= 0:
            self._judge.rest()
            return
        worth = self._paced(len(found), rows, worth)
        began, self._passing, self._expected, self._steps = self._clock(), 0.0, 0.0, 0
        try:
            self._draft(found, rows, worth)
        except (BackendError, LocalLLMError):  # for example, the KV cache is full
            self._judge.rest()
        seconds = self._clock() - began
        if self._steps:
            besides = min(max(seconds - self._passing, 0.0) / self._steps, self._seconds(1))
            self._besides += 0.1 * (besides - self._besides)
        prefill = sum(each for _, each, _ in self._round.prefill)
        self._round.spent = min(seconds - prefill, 2 * self._expected)
        self._round.shared = len(found) if self._steps else 0

    def begin_round(self, plain: float) -> Round:
        """Record the gains of the rounds that are over, and return a new round. `plain` is the time in seconds of a
        token without drafts.
        """
        while self._rounds and self._rounds[0].over:
            last = self._rounds.popleft()
            if last.shared:
                won = (last.won - last.spent / plain) / last.shared
                self._judge.settle(won)
                self.budget.settle(won - self._charged(last, plain, won))
        self._round = Round()
        self._rounds.append(self._round)
        return self._round

    def _charged(self, last: Round, plain: float, won: float) -> float:
        """Return the cost to the budget, in tokens, of the prefill of a round that gained `won` besides. A request's
        first prefill also benefits later rounds, so it costs at most half of the budget. Prefill after a pause costs
        its full time, if the budget lasts: the text may grow faster than the budget. A part of a prefill leaves enough
        for one draft, so the next step continues it. The last part leaves a debt of one draft at most.
        """
        if not last.prefill:
            return 0.0
        most, charged, again = max(self.budget.tokens, 0.0) / 2, 0.0, 0.0
        for each, seconds, complete in last.prefill:
            cost = seconds / plain / last.shared
            if each.complete:
                again += cost
                continue
            left = most if each.chargeable is None else each.chargeable
            found = min(cost, left, most - charged)
            charged += found
            each.chargeable, each.complete = left - found, complete
        least = self._lost(1, 1, 1) * (-1 if all(complete for _, _, complete in last.prefill) else 1)
        return min(charged + again, max(self.budget.tokens + won - least, 0.0))

    def forget(self, round: Round) -> None:
        """Forget the round of a step that was not evaluated."""
        if round in self._rounds:
            self._rounds.remove(round)

    def skip_step(self) -> bool:
        """Skip a step in which there is nothing to decide or to record: in the middle of a pause, or while the budget
        is too small for one draft. Return whether it was skipped. If not, call `promised`.
        """
        if any(round.shared for round in self._rounds):
            return False
        if self._waits:
            self._waits -= 1
            return True
        return self._judge.skip_round()

    def promised(self, rows: int, worth: float) -> float:
        """Return the expected gain, in seconds, of drafting for one request of a step with `rows` tokens; 0 while
        drafting pauses. Call once per step.
        """
        if not self._judge.ready():
            return 0.0
        gain = self._outlook(1, 1.0, 0, rows, worth)
        if gain <= 0:
            self._judge.rest()
            return 0.0
        self._waits = min(self.budget.passes_until(self._lost(1, 1, rows)), _LONGEST_WAIT)
        return 0.0 if self._waits else gain

    def guess(self, one: RequestState, logits: NDArray[np.float32]) -> DraftToken | None:
        """Return the draft that follows from the drafter's logits (V,), or None."""
        return guess_token(one.sampler, logits)

    # -- costs and expected gain ------------------------------------------------------------------------------------

    def _allowed(self, requests: int, drafted: int, rows: int) -> bool:
        """Whether the budget allows that many drafts for each request of a step with `rows` rows without drafts."""
        return self.budget.allows(self._lost(requests, drafted, rows), drafted)

    def _lost(self, requests: int, drafted: int, rows: int) -> float:
        """Return the loss of a step, in tokens per request, if all drafts fail."""
        plain = self._verifying.seconds(rows) / rows
        return self._added(requests, drafted, rows) / (plain * requests)

    def _added(self, requests: int, drafted: int, rows: int) -> float:
        """Return the seconds that `drafted` steps of drafting for each request add, with their verification."""
        wider = self._verifying.seconds(min(rows + drafted * requests, self._verifying.most))
        return drafted * self._seconds(requests) + wider - self._verifying.seconds(rows)

    def _paced(self, requests: int, rows: int, worth: float) -> float:
        """Return what an accepted token saves, in seconds, if the next steps draft like this one: at most `worth`."""
        plain = self._verifying.seconds(rows)
        won, stands = [0.0], float(requests)
        for _ in range(min(self._longest, (self._verifying.most - rows) // requests)):
            stands *= self.acceptance.mean
            won.append(won[-1] + stands)
        added = [self._added(requests, number, rows) for number in range(len(won))]
        best = max(range(len(won)), key=lambda number: won[number] * worth - added[number])
        return min(worth, (plain + added[best]) / (rows + won[best]))

    def _outlook(self, requests: int, stands: float, drafted: int, rows: int, worth: float) -> float:
        """Return the maximum gain, in seconds, of further steps of the drafter.

        `stands` is the sum over the requests of the probability that all their drafts are accepted. `rows` is the
        number of rows of the target model's step, including all drafts so far.
        """
        best = won = 0.0
        most = self._verifying.most
        for more in range(1, self._longest - drafted + 1):
            wider = rows + more * requests
            if wider > most and more > 1:
                break
            stands *= self.acceptance.mean
            won += stands * worth - self._seconds(requests)
            best = max(best, won - (self._verifying.seconds(min(wider, most)) - self._verifying.seconds(rows)))
        return best

    def _seconds(self, rows: int) -> float:
        """Return the expected duration, in seconds, of a step with `rows` tokens."""
        rows = min(rows, self._costs.most)
        return self._besides + (
            self._costs.seconds(rows) if self._costs.known else self._ratio * self._verifying.seconds(rows)
        )

    @contextmanager
    def _timed(self, count: int) -> Iterator[None]:
        """Record the duration of a step with `count` tokens."""
        began = self._clock()
        yield
        self._passed(count, self._clock() - began)

    def _passed(self, count: int, seconds: float) -> None:
        self._steps += 1
        self._passing += seconds
        self._expected += self._seconds(count)
        if count <= self._costs.most:
            self._costs.observe(count, seconds)

    # -- drafting --------------------------------------------------------------------------------------------------

    def _draft(self, found: list[D], rows: int, worth: float) -> None:
        """Draft until another step is not expected to save time."""
        with ExitStack() as undo:
            for each in found:
                sampler = each.one.sampler
                undo.enter_context(sampler.drafting())
                undo.callback(sampler.restore, sampler.snapshot())
            active = self._caught_up(found)
            drafted, plain = 0, rows
            while active:
                drafted += 1
                rows += len(active)
                active = [(each, tokens) for each, tokens in active if self._goes_on(each)]
                stands = sum(each.stands for each, _ in active)
                if not active or rows >= self._verifying.most:
                    return
                if self._outlook(len(active), stands, drafted, rows, worth) <= 0:
                    return
                if not self._allowed(len(active), drafted + 1, plain):
                    return
                active = self._step(active)

    def _goes_on(self, each: D) -> bool:
        """Accept the request's newest draft unless a grammar forbids it; return whether to draft another token."""
        one = each.one
        draft = one.drafts[-1]
        if one.sampler.valid([each.token for each in one.drafts]) < len(one.drafts):  # the grammar forbids it
            self.acceptance.observe(draft.trust, 0.0)
            one.drafts.pop()
            return False
        each.stands *= self.acceptance.expect(draft.trust)
        one.sampler.accept(draft.token)
        return len(one.drafts) < each.room and each.stands >= _HOPELESS and self._continues(draft.token)


def guess_token(sampler: Sampler, logits: NDArray[np.float32]) -> DraftToken | None:
    """Return the most likely token, after penalties if sampling is greedy; None if the logits are unusable."""
    token = int(logits.argmax())
    if not abs(float(logits[token])) < HIGHEST:
        return None
    if sampler.options.greedy:
        try:
            token = sampler.sample(logits)
        except LocalLLMError:  # penalties exclude every token
            return None
    return DraftToken(token, trust_of(logits, token))

"""Batched drafting with a draft model: each step of the draft engine evaluates one token per request.

The draft model proposes its most likely token. A draft is accepted if the sampler chooses the same token, so the output
is identical to plain decoding. Prompts are prefilled in chunks, in the same steps as drafts of other requests. Measured
times and acceptance rates decide how much to draft. Drafting pauses after rounds that lost time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import BackendError
from localllm.base.errors import LocalLLMError
from localllm.engine import Engine, Result, SequenceRows
from localllm.engine.prefix import same
from localllm.generation.request_state import RequestState
from localllm.generation.speculation import draft
from localllm.generation.speculation.draft import Followed, trust_of
from localllm.generation.speculation.policy import Costs, Judge
from localllm.generation.speculation.rule import DraftToken
from localllm.generation.speculation.vocabulary import Mapping
from localllm.sampling.chain import HIGHEST
from localllm.sampling.sampler import Sampler

CATCH_UP = 64  # maximum prefill tokens in a step of the draft model; decoding requests wait for the step
_HORIZON = 128  # maximum number of tokens that an answer is assumed to still generate
_MOST_ENDED = 8  # maximum number of ended requests whose sequences are kept
_HOPELESS = 0.1  # stop drafting when the probability that all drafts so far are accepted falls below this


class _Drafting:
    """The draft model's state for one request. `stands` is the probability that all its drafts are accepted."""

    def __init__(self, one: RequestState, followed: Followed) -> None:
        self.one, self.followed = one, followed
        self.good = 0  # number of leading tokens evaluated by the draft model
        self.room, self.stands = 0, 1.0

    def catch_up(self, most: int) -> tuple[list[int], bool]:
        """Return at most `most` tokens to evaluate next, and whether they reach the end of the text.

        The newest token is always included, even if it was already evaluated, because its logits are needed.
        """
        text = self.one.tokens
        self.followed.forget(min(len(text) - self.behind, len(text) - 1))
        self.good = len(self.followed.tokens)
        missing = text[self.good : self.good + most]
        return missing, self.good + len(missing) == len(text)

    @property
    def behind(self) -> int:
        """Number of tokens of the text that the draft model has not yet evaluated."""
        text, seen = self.one.tokens, self.followed.tokens
        while self.good < min(len(seen), len(text)) and seen[self.good] == text[self.good]:
            self.good += 1
        return len(text) - self.good


class DraftModel:
    """Drafts for the requests of a core. Only the stepping thread accesses it."""

    def __init__(self, engine: Engine, mapping: Mapping, costs: Costs, verifying: Costs, longest: int) -> None:
        """`costs` are the step times of the draft model, `verifying` the step times of the target model."""
        self._engine, self._mapping = engine, mapping
        self._costs, self._verifying, self._longest = costs, verifying, longest
        self._judge = Judge(draft.PRIORS)
        self.acceptance = self._judge.acceptance
        self._drafting: dict[int, _Drafting] = {}  # by request number
        self._ended: list[Followed] = []  # sequences of ended requests, reusable by the next turn of a chat
        self._spent, self._won, self._shared = 0.0, 0, 0  # last round: seconds, accepted drafts, requests
        self._reading = 0.0  # prefill time in the last round, which also benefits later rounds

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

    def propose(self, ones: Sequence[RequestState], rows: int, worth: float, positions: int) -> None:
        """Draft for the decoding requests of a step that has `rows` tokens so far.

        `worth` is the time in seconds that one more accepted token saves. `positions` is the maximum length of a
        request.
        """
        self._settle(worth)
        found = [self._of(one) for one in ones]
        for each in found:
            tokens = len(each.one.tokens)
            each.room, each.stands = min(self._longest, each.one.tokens_left - 1, positions - tokens - 1), 1.0
        found = [each for each in found if each.room > 0 and self._pays(each, rows, worth)]
        if not found or not self._judge.ready():
            return
        if self._outlook(len(found), float(len(found)), 0, rows, worth) <= 0:
            self._judge.rest()
            return
        began, self._reading = perf_counter(), 0.0
        try:
            self._draft(found, rows, worth)
        except (BackendError, LocalLLMError):  # for example, the draft model's KV cache is full
            self._judge.rest()
        self._spent = perf_counter() - began - self._reading
        self._shared = sum(bool(each.one.drafts) for each in found)

    def verified(self, seconds: float) -> None:
        """Add the estimated seconds that verifying this round's drafts adds to the target model's step."""
        self._spent += seconds

    def accepted(self, count: int) -> None:
        """Add to the number of accepted drafts of this round."""
        self._won += count

    # -- expected gain ---------------------------------------------------------------------------------------------

    def _settle(self, worth: float) -> None:
        """Record the gain of the last round, in tokens per request."""
        if self._shared:
            self._judge.settle((self._won - self._spent / worth) / self._shared)
        self._spent, self._won, self._shared = 0.0, 0, 0

    def _pays(self, each: _Drafting, rows: int, worth: float) -> bool:
        """Whether drafting for the rest of the answer saves more time than the draft model's prefill takes."""
        missing = each.behind - self._longest
        if missing <= 0:
            return True
        rounds = max(min(each.one.tokens_left, _HORIZON) * (1 - self.acceptance.mean), 1.0)
        return self._outlook(1, 1.0, 0, rows, worth) * rounds > missing * self._seconds(self._costs.most) / (
            self._costs.most
        )

    def _outlook(self, requests: int, stands: float, drafted: int, rows: int, worth: float) -> float:
        """Return the maximum gain, in seconds, of further steps of the draft model.

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
        return self._costs.seconds(min(rows, self._costs.most))

    # -- drafting --------------------------------------------------------------------------------------------------

    def _of(self, one: RequestState) -> _Drafting:
        if one.number not in self._drafting:
            self._drafting[one.number] = _Drafting(one, self._followed(one.tokens))
        return self._drafting[one.number]

    def _followed(self, tokens: Sequence[int]) -> Followed:
        """Return the ended request's sequence with the longest common prefix, or an empty sequence."""
        best = max(self._ended, key=lambda each: same(each.tokens, tokens), default=None)
        if best is None or not same(best.tokens, tokens):
            return Followed(self._engine, self._mapping)
        self._ended.remove(best)
        return best

    def _draft(self, found: list[_Drafting], rows: int, worth: float) -> None:
        """Draft until another step is not expected to save time."""
        with ExitStack() as undo:
            for each in found:
                sampler = each.one.sampler
                undo.enter_context(sampler.drafting())
                undo.callback(sampler.restore, sampler.snapshot())
            active = self._caught_up(found)
            drafted = 0
            while active:
                drafted += 1
                rows += len(active)
                active = [(each, tokens) for each, tokens in active if self._goes_on(each)]
                stands = sum(each.stands for each, _ in active)
                if not active or rows >= self._verifying.most:
                    return
                if self._outlook(len(active), stands, drafted, rows, worth) <= 0:
                    return
                active = self._step(active)

    def _caught_up(self, found: list[_Drafting]) -> list[tuple[_Drafting, list[int]]]:
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

    def _step(self, active: list[tuple[_Drafting, list[int]]]) -> list[tuple[_Drafting, list[int]]]:
        """Evaluate the newest drafts. Return the requests with another draft, and that draft."""
        return self._evaluated([(each, tokens, True) for each, tokens in active])

    def _evaluated(self, parts: list[tuple[_Drafting, list[int], bool]]) -> list[tuple[_Drafting, list[int]]]:
        """Evaluate (request, tokens, whether to draft) in one step; return (request, [drafted token])."""
        spelled = [each.followed.spelled(tokens) for each, tokens, _ in parts]
        chosen = [number for number, (new, _) in enumerate(spelled) if new]
        if not chosen:
            return []
        began = perf_counter()
        rows = [
            SequenceRows(parts[i][0].followed.sequence, spelled[i][0], "last" if parts[i][2] else "none")
            for i in chosen
        ]
        while self._ended and not self._engine.fits([(each.sequence, len(each.tokens)) for each in rows]):
            self._ended.pop(0).close()
        results: list[Result] = self._engine.step(rows)
        count = sum(len(spelled[i][0]) for i in chosen)
        seconds = perf_counter() - began
        if count <= self._costs.most:
            self._costs.observe(count, seconds)
        newest = sum(min(len(spelled[i][0]), self._longest + 1) for i in chosen if parts[i][2])
        self._reading += seconds * (1 - newest / count)
        guessed = []
        for i, result in zip(chosen, results, strict=True):
            each, tokens, wanted = parts[i]
            each.followed.took(tokens, spelled[i][1])
            if wanted and (draft := _guess(each.one.sampler, self._mapping.logits(result.logits[-1]))) is not None:
                each.one.drafts.append(draft)
                guessed.append((each, [draft.token]))
        return guessed

    def _goes_on(self, each: _Drafting) -> bool:
        """Accept the request's newest draft unless a grammar forbids it; return whether to draft another token."""
        one = each.one
        draft = one.drafts[-1]
        if one.sampler.valid([each.token for each in one.drafts]) < len(one.drafts):  # the grammar forbids it
            one.drafts.pop()
            return False
        each.stands *= self.acceptance.expect(draft.trust)
        one.sampler.accept(draft.token)
        return len(one.drafts) < each.room and each.stands >= _HOPELESS and bool(self._mapping.to_draft(draft.token))


def _guess(sampler: Sampler, logits: NDArray[np.float32]) -> DraftToken | None:
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

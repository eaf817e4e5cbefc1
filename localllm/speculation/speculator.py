"""The loop of a speculative answer: return the next token, accept it, and run a pass when no verified row is left.

A round is one pass: the last token and the drafts after it. Every row gives the next token, as if the tokens before it
had been evaluated one by one. Rows are used while drafts are accepted; tokens after a rejected draft are removed from
the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from localllm.generation.decoding import Deciding
from localllm.generation.prompt import Evaluates
from localllm.generation.statistics import Speculated
from localllm.sampling.sampler import Sampler
from localllm.speculation.drafter import Drafting
from localllm.speculation.policy import Costs, Judge, outlook, worth_checking
from localllm.speculation.rule import Guess, choose

_FRESH = 48  # rounds after which a pass of one row is timed again
_HORIZON = 128  # assumed remaining tokens of an answer of unknown length
_HOPELESS = 0.1  # minimum probability that all drafts so far are accepted
_FADING = 0.95  # decay of the pace, per round


@dataclass(frozen=True, slots=True)
class Speculator:
    """Speculation in a session: its drafters and their costs."""

    draftings: tuple[Drafting, ...]
    costs: Costs
    longest: int

    def decode(self, session: Evaluates, sampler: Sampler, prompt: Sequence[int]) -> SpeculativeDecoding:
        """Return the decoding of one answer after `prompt`."""
        return SpeculativeDecoding(self, session, sampler, prompt)

    def close(self) -> None:
        for drafting in self.draftings:
            drafting.drafter.close()


class SpeculativeDecoding:
    """`sample` and `feed` alternate: one returns the next token, the other evaluates it. After `close` the cache holds
    exactly the fed tokens."""

    def __init__(self, speculator: Speculator, session: Evaluates, sampler: Sampler, prompt: Sequence[int]) -> None:
        self._costs, self._longest = speculator.costs, speculator.longest
        self._draftings = speculator.draftings
        self._session, self._sampler = session, sampler
        self.held = len(prompt)
        self._rows: NDArray[np.float32] | None = None  # logits of the last pass
        self._at = 0  # the current row
        self._guesses: list[Guess] = []  # a draft after each row; drafts after `_checked` were not in the pass
        self._checked = 0
        self._by: Drafting | None = None  # the drafter of this round
        self._seconds = 0.0  # seconds of this round
        self._reading = 0.0  # seconds of these for catching up of the draft model, which also serve later rounds
        self._paced, self._pace_tokens = 0.0, 0.0
        self._fed = 0
        self._stale = 0  # rounds since one row was last timed
        self.passes = 0
        self._rounds = self._drafted = self._accepted = 0
        self._plain_seconds = 0.0
        for drafting in self._draftings:
            drafting.drafter.begin(prompt)

    def start(self, logits: NDArray[np.float32]) -> None:
        """Take the logits (1, V) after the prompt."""
        self._rows = logits

    def sample(self) -> int:
        assert self._rows is not None
        guess = self._guesses[self._at] if self._at < len(self._guesses) else None
        if guess is None or self._by is None:
            return self._sampler.sample(self._rows[self._at])
        token, likelihood = choose(self._sampler, self._rows[self._at], guess)
        self._by.judge.acceptance.observe(guess.trust, likelihood)  # also of unverified drafts
        return token

    def deciding(self) -> Deciding:
        assert self._rows is not None
        row = self._rows[self._at]
        if self._at >= len(self._guesses) or self._by is None:
            return Deciding(row)
        return Deciding(row, self._guesses[self._at].token, self._at < self._checked, self._by.drafter.name)

    def feed(self, token: int, wanted: int) -> None:
        """Feed the token that the sampler has accepted; at most `wanted` more will be requested."""
        for drafting in self._draftings:
            drafting.drafter.accept(token)
        self._fed += 1
        self._plain_seconds += self._costs.seconds(1)
        if self._at < self._checked and self._guesses[self._at].token == token:
            self._at += 1
            self.held += 1
            self._accepted += 1
            return
        self._settle()
        self._round(token, wanted)

    def close(self) -> None:
        self._session.rewind(min(self.held, self._session.length))

    def speculated(self) -> Speculated:
        return Speculated(self._drafted, self._accepted, self._rounds, self._plain_seconds)

    # -- a round ---------------------------------------------------------------------------------------------------

    def _round(self, token: int, wanted: int) -> None:
        began, self._reading = perf_counter(), 0.0
        session = self._session
        session.rewind(self.held)
        room = min(self._longest, wanted - 1, session.room - 1)
        self._by, self._guesses, self._checked = self._draft(room, wanted)
        before = perf_counter()
        tokens = [token, *(guess.token for guess in self._guesses[: self._checked])]
        rows = session.evaluate(tokens, logits=True)
        self._rows = rows.copy() if self._checked else rows  # a row after a draft is read later, after other steps
        after = perf_counter()
        self._costs.observe(len(tokens), after - before)
        self._stale = 0 if len(tokens) == 1 else self._stale + 1
        self.held += 1
        self._at = 0
        self.passes += 1
        self._drafted += self._checked
        self._rounds += self._checked > 0
        self._seconds = after - began

    def _settle(self) -> None:
        """Record the gain of the last round, now that its tokens are known."""
        if not self._seconds:
            return
        tokens, plain = self._at + 1, self._costs.seconds(1)
        self._paced = self._paced * _FADING + self._seconds
        self._pace_tokens = self._pace_tokens * _FADING + tokens
        if self._by is not None and (self._checked or self._by.drafter.step_seconds):
            self._by.judge.settle(tokens - max(self._seconds - self._reading, 0.0) / plain)
        self._seconds = 0.0

    @property
    def _pace(self) -> float:
        """Current seconds per token: the value of an additional token."""
        plain = self._costs.seconds(1)
        return min(plain, self._paced / self._pace_tokens) if self._pace_tokens else plain

    # -- drafts ----------------------------------------------------------------------------------------------------

    def _draft(self, room: int, wanted: int) -> tuple[Drafting | None, list[Guess], int]:
        """Return the drafter, its drafts, and how many of them to verify."""
        if room < 1 or self._stale >= _FRESH:
            return None, [], 0
        best: tuple[Drafting | None, list[Guess], int] = (None, [], 0)
        won = 0.0
        for drafting in self._draftings:  # drafters without cost come first
            judge, drafter = drafting.judge, drafting.drafter
            if not judge.ready():
                continue
            if drafter.step_seconds:
                hoped = self._hope(judge, drafting, room, wanted)
                if hoped <= 0:
                    judge.rest()
                if hoped <= won:
                    continue
            guesses, likelihoods = self._propose(drafting, room)
            if not guesses:
                judge.settle(-drafter.step_seconds / self._costs.seconds(1))
                continue
            count, gain = worth_checking(self._costs, self._pace, likelihoods)
            if gain >= won:
                best, won = (drafting, guesses, count), gain
        return best

    def _hope(self, judge: Judge, drafting: Drafting, room: int, wanted: int) -> float:
        """Return the expected gain in seconds of a round with this drafter, minus the round's share of catching up."""
        drafter = drafting.drafter
        mean = judge.acceptance.mean
        won = outlook(self._costs, self._pace, 0, 1.0, mean, drafter.step_seconds, room)
        rounds = max(min(wanted, max(_HORIZON, self._fed)) * (1 - mean), 1.0)
        return won - drafter.delay() / rounds

    def _propose(self, drafting: Drafting, room: int) -> tuple[list[Guess], list[float]]:
        """Draft as long as another token is expected to pay; return the drafts and their acceptance probabilities.

        Drafts end before the first token that a grammar forbids.
        """
        sampler, drafter, acceptance = self._sampler, drafting.drafter, drafting.judge.acceptance
        guesses: list[Guess] = []
        likelihoods: list[float] = []
        stands = 1.0
        self._reading += drafter.delay()
        before = sampler.snapshot()
        try:
            with sampler.drafting():
                for guess in drafter.propose(sampler):
                    guesses.append(guess)
                    likelihoods.append(acceptance.expect(guess.trust))
                    stands *= likelihoods[-1]
                    if len(guesses) == room or stands < _HOPELESS:
                        break
                    step, mean = drafter.step_seconds, acceptance.mean
                    if step and sampler.valid([guess.token for guess in guesses]) < len(guesses):
                        break
                    if step and outlook(self._costs, self._pace, len(guesses), stands, mean, step, room) <= 0:
                        break
                    sampler.accept(guess.token)
        finally:
            sampler.restore(before)
        valid = sampler.valid([guess.token for guess in guesses])
        return guesses[:valid], likelihoods[:valid]

"""Drafts for an answer that is held to a grammar: whoever guesses, the tokens are those that the grammar allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.options import SamplingOptions
from localllm.sampling.errors import SamplingError
from localllm.sampling.sampler import Sampler
from localllm.speculation.rule import Guess
from localllm.speculation.speculator import SpeculativeDecoding
from tests.localllm.speculation.support import GREEDY, Clock, TableSession, ToldDrafter, reckless, write
from tests.localllm.speculation.test_rule import ALL_ON, DRAFTERS, PLAIN, PROMPT, V, chi_square, table

COSTS = dict.fromkeys(range(1, 17), 1.0)


class Steps:
    """A constraint: every token is 1 to 3 more than the one before, counted round; any token comes first."""

    finished = False

    def __init__(self) -> None:
        self.last = -1

    def allowed(self) -> NDArray[np.bool_] | None:
        return None if self.last < 0 else self.after(self.last)

    def accept(self, token: int) -> None:
        assert self.last < 0 or self.after(self.last)[token]
        self.last = token

    def validate(self, tokens: Sequence[int]) -> int:
        last = self.last
        for count, token in enumerate(tokens):
            if last >= 0 and not self.after(last)[token]:
                return count
            last = token
        return len(tokens)

    @staticmethod
    def after(token: int) -> NDArray[np.bool_]:
        return np.isin(np.arange(V), [(token + step) % V for step in (1, 2, 3)])


def plain(options: SamplingOptions, count: int) -> list[int]:
    """The answer of plain decoding."""
    sampler, text = Sampler(options), list(PROMPT)
    sampler.constrain(Steps())
    for token in PROMPT:
        sampler.accept(token)
    for _ in range(count):
        text.append(sampler.sample(table(1)(text)))
        sampler.write(text[-1])
    return text[len(PROMPT) :]


def drafted(options: SamplingOptions, drafter: str, count: int, sampler: Sampler | None = None) -> list[int]:
    """The answer with drafts, all of which are verified."""
    sampler, clock = sampler or Sampler(options), Clock()
    sampler.restore(0)
    sampler.constrain(Steps())
    session = TableSession(table(1), clock, COSTS)
    told = ToldDrafter(DRAFTERS[drafter], clock)
    decoding = SpeculativeDecoding(reckless(told, 3), session, sampler, PROMPT)  # type: ignore[arg-type]
    return write(decoding, sampler, session, PROMPT, count)


def test_the_constraint_is_kept_and_matters() -> None:
    answer = plain(PLAIN, 200)
    assert all((after - before) % V in (1, 2, 3) for before, after in pairwise(answer))
    assert len(Counter(answer)) == V


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_answers_are_those_of_plain_decoding(drafter: str) -> None:
    assert drafted(GREEDY, drafter, 100) == plain(GREEDY, 100)


@pytest.mark.parametrize("options", [ALL_ON, PLAIN], ids=["all on", "plain"])
def test_sampled_answers_are_those_of_plain_decoding_if_a_draft_had_no_choice(options: SamplingOptions) -> None:
    assert drafted(options, "certain", 100) == plain(options, 100)


class Allowed(TableSession):
    """A session that evaluates only what the constraint allows."""

    def __init__(self) -> None:
        super().__init__(table(1), Clock(), COSTS)
        self.verified = 0

    def evaluate(self, tokens: Sequence[int], logits: bool) -> NDArray[np.float32]:
        if len(self.tokens) > len(PROMPT):
            text = [self.tokens[-1], *tokens]
            assert all((after - before) % V in (1, 2, 3) for before, after in pairwise(text)), text
            self.verified += len(tokens) - 1
        return super().evaluate(tokens, logits)


@pytest.mark.parametrize("seconds", [0.0, 1e-9], ids=["free", "a model"])
def test_what_the_grammar_forbids_is_not_verified(seconds: float) -> None:
    """Drafts of three, the first of which is allowed, the second often and the third never."""

    def guess(text: list[int], sampler: Sampler) -> Guess:
        drafted = len(text) - len(told.text)
        return Guess((text[-1] + (2, 3 + drafted % 2, V // 2)[drafted % 3]) % V, 0, None)

    told = ToldDrafter(guess, Clock(), seconds)
    sampler, session = Sampler(PLAIN), Allowed()
    sampler.constrain(Steps())
    decoding = SpeculativeDecoding(reckless(told, 3), session, sampler, PROMPT)  # type: ignore[arg-type]
    assert write(decoding, sampler, session, PROMPT, 100) == plain(PLAIN, 100)
    assert session.verified > 60


def exactly(length: int) -> dict[tuple[int, ...], float]:
    """The probability of every answer, by the definition."""
    found = {(): 1.0}
    for _ in range(length):
        longer = {}
        for answer, probability in found.items():
            sampler, constraint = Sampler(PLAIN), Steps()
            for token in answer:
                constraint.accept(token)
            sampler.constrain(constraint)
            for token, p in zip(*sampler.distribution(table(1)([*PROMPT, *answer])), strict=True):
                longer[(*answer, int(token))] = probability * float(p)
        found = longer
    return found


@pytest.mark.parametrize("drafter", ["alike", "hostile"])
def test_drawn_drafts_keep_the_distribution(drafter: str) -> None:
    sampler = Sampler(PLAIN)
    counts = Counter(tuple(drafted(PLAIN, drafter, 3, sampler)) for _ in range(800))
    statistic, most = chi_square(counts, exactly(3))
    assert statistic < most


class Nothing(Steps):
    """Allows a token whose logit is -inf, or none at all."""

    def __init__(self, *tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def allowed(self) -> NDArray[np.bool_]:
        return np.isin(np.arange(V), self.tokens)


@pytest.mark.parametrize("options", [GREEDY, PLAIN], ids=["greedy", "sampled"])
@pytest.mark.parametrize("tokens", [(), (3,)])
def test_a_grammar_that_leaves_no_token_is_a_line(options: SamplingOptions, tokens: tuple[int, ...]) -> None:
    sampler, logits = Sampler(options), np.zeros(V, np.float32)
    logits[3] = -np.inf
    sampler.constrain(Nothing(*tokens))
    with pytest.raises(SamplingError, match="grammar allows no token"):
        sampler.sample(logits)


def test_all_logits_are_wanted_while_a_constraint_is_on() -> None:
    sampler = Sampler(GREEDY)
    assert sampler.looks_at == 1
    sampler.constrain(Steps())
    assert sampler.looks_at == 0
    sampler.constrain(None)
    assert sampler.looks_at == 1

"""Guessing pays, or it is left: costs, likelihoods, and whole answers against a clock that says what passes take."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

import localllm.speculation.speculator as speculator_module
from localllm.sampling.sampler import Sampler
from localllm.speculation import draft, ngram
from localllm.speculation.drafter import Drafting
from localllm.speculation.ngram import NgramDrafter
from localllm.speculation.policy import Acceptance, Costs, Judge, outlook, worth_checking
from localllm.speculation.rule import Guess
from localllm.speculation.speculator import SpeculativeDecoding, Speculator
from tests.localllm.speculation.support import GREEDY, MEASURED, Clock, TableSession, ToldDrafter, write

V = 50
EVERY_ROW = dict.fromkeys(range(1, 17), 20.0)  # checking is free
NO_GAIN = {rows: 20.0 * rows for rows in range(1, 17)}  # checking gains nothing
SHAPES = {"measured": MEASURED, "free": EVERY_ROW, "no gain": NO_GAIN}


def best_fixed(likelihood: float, step: float, costs: dict[int, float]) -> float:
    """Speedup of the best number of guesses, were it known and the same in every round."""
    return max(
        sum(likelihood**i for i in range(k + 1)) / (costs[k + 1] + k * step) * costs[1] for k in range(len(costs))
    )


def speedup(
    monkeypatch: pytest.MonkeyPatch, likelihood: float, step: float, costs: dict[int, float], tokens: int = 512
) -> float:
    """Of an answer with a draft model whose guesses are right with this likelihood."""
    random = np.random.RandomState(1)
    text = random.randint(0, V, tokens + 40).tolist()
    right = (random.random_sample(len(text)) < likelihood).tolist()
    clock = Clock()
    monkeypatch.setattr(speculator_module, "perf_counter", clock)
    session = TableSession(lambda seen: np.eye(V, dtype=np.float32)[text[len(seen)]], clock, costs)

    def guess(seen: list[int], sampler: Sampler) -> Guess:
        wanted = text[len(seen)]
        return Guess(wanted if right[len(seen)] else (wanted + 1) % V, 5, None)

    drafting = Drafting(ToldDrafter(guess, clock, step), Judge(draft.PRIORS))
    known = {rows: costs[rows] for rows in (1, 2, 3, 4, 6, 8, 12, 16)}
    sampler = Sampler(GREEDY)
    decoding = SpeculativeDecoding(Speculator((drafting,), Costs(known), 15), session, sampler, text[:1])  # type: ignore[arg-type]
    assert write(decoding, sampler, session, text[:1], tokens) == text[1 : tokens + 1]
    return tokens * costs[1] / clock.now


@pytest.mark.parametrize("likelihood", [0, 0.2, 0.4, 0.6, 0.8, 0.95, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_answer_is_nearly_as_fast_as_were_all_known_before(
    monkeypatch: pytest.MonkeyPatch, likelihood: float, shape: str
) -> None:
    """And never slower than 0.97 of plain decoding."""
    gained = speedup(monkeypatch, likelihood, 2.0, SHAPES[shape])
    assert gained > 0.97
    assert gained > 0.9 * best_fixed(likelihood, 2.0, SHAPES[shape])


def test_a_draft_as_slow_as_the_model_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert speedup(monkeypatch, 0.9, 25.0, MEASURED) > 0.97


def test_passes_that_cost_more_than_was_measured_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs that were wrong when the model was opened."""
    random = np.random.RandomState(2)
    text = random.randint(0, V, 600).tolist()
    clock = Clock()
    monkeypatch.setattr(speculator_module, "perf_counter", clock)
    session = TableSession(lambda seen: np.eye(V, dtype=np.float32)[text[len(seen)]], clock, NO_GAIN)
    told = ToldDrafter(lambda seen, sampler: Guess((text[len(seen)] + len(seen) % 2) % V, 5, None), clock)
    wrong = Costs({1: 20.0, 16: 21.0})
    sampler = Sampler(GREEDY)
    speculator = Speculator((Drafting(told, Judge(draft.PRIORS)),), wrong, 15)
    decoding = SpeculativeDecoding(speculator, session, sampler, text[:1])  # type: ignore[arg-type]
    write(decoding, sampler, session, text[:1], 512)
    assert 512 * 20.0 / clock.now > 0.93


def test_repeated_text_is_guessed_from_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(speculator_module, "perf_counter", clock)
    text = list(range(40)) * 8
    session = TableSession(lambda seen: np.eye(V, dtype=np.float32)[text[len(seen)]], clock, MEASURED)
    sampler = Sampler(GREEDY)
    speculator = Speculator((Drafting(NgramDrafter(), Judge(ngram.PRIORS)),), Costs(MEASURED), 15)
    decoding = SpeculativeDecoding(speculator, session, sampler, text[:60])  # type: ignore[arg-type]
    before = clock.now
    session._costs = MEASURED | {60: 0.0}
    assert write(decoding, sampler, session, text[:60], 240) == text[60:300]
    assert 240 * MEASURED[1] / (clock.now - before) > 2.5
    done = decoding.speculated()
    assert done.accepted > 0.9 * done.drafted
    assert done.accepted + decoding.passes == 239  # a token a pass, and the guesses that stood


# -- the parts -------------------------------------------------------------------------------------------------------


def test_costs_between_those_measured_lie_between_them() -> None:
    costs = Costs({1: 10.0, 4: 16.0, 16: 40.0})
    assert [costs.seconds(n) for n in (1, 2, 4, 10, 16)] == pytest.approx([10, 12, 16, 28, 40])
    assert costs.most == 16


def test_costs_follow_what_passes_take() -> None:
    """One row does not follow several, nor they one; a pass that stood still for a minute hardly counts."""
    costs = Costs({1: 10.0, 16: 40.0})
    for _ in range(100):
        costs.observe(8, 60.0)
    assert costs.seconds(8) == pytest.approx(60, rel=0.01)
    assert costs.seconds(16) > 60
    assert costs.seconds(1) == 10
    for _ in range(100):
        costs.observe(1, 15.0)
    costs.observe(1, 60.0 * 1000)
    assert costs.seconds(1) < 15 * 1.1


def test_acceptance_is_learned_class_by_class() -> None:
    acceptance = Acceptance([0.5, 0.5])
    for _ in range(100):
        acceptance.observe(0, 1.0)
        acceptance.observe(1, 0.0)
    assert acceptance.expect(0) > 0.95
    assert acceptance.expect(1) < 0.05
    assert acceptance.mean == pytest.approx(0.5, abs=0.1)
    for _ in range(100):  # the text has changed
        acceptance.observe(0, 0.0)
    assert acceptance.expect(0) < 0.1


def test_what_is_checked_wins_most() -> None:
    """Against trying every number of guesses."""
    random = np.random.RandomState(3)
    costs = Costs(MEASURED)
    for pace in (5.0, 15.0, 24.6):
        for _ in range(50):
            likelihoods = random.random_sample(15) ** 0.3
            gains = [np.cumprod(likelihoods[:k]).sum() * pace - (MEASURED[k + 1] - MEASURED[1]) for k in range(16)]
            checked, won = worth_checking(costs, pace, likelihoods.tolist())
            assert won == pytest.approx(max(gains))
            assert checked == int(np.argmax(gains))


def test_a_step_in_the_costs_is_looked_over() -> None:
    """Three rows are cheap, four are not, sixteen are again: worth it for guesses that surely stand."""
    costs = Costs({1: 10.0, 3: 10.0, 4: 30.0, 16: 31.0})
    assert outlook(costs, 10.0, 2, 1.0, 0.99, 0.1, 15) > 0
    assert outlook(costs, 10.0, 2, 1.0, 0.6, 0.1, 15) == 0
    assert outlook(costs, 10.0, 0, 1.0, 0.6, 0.1, 15) > 0


def test_rests_grow_with_every_loss_and_end_with_a_gain() -> None:
    judge = Judge([0.5])

    def rest() -> int:
        return next(n for n in count() if judge.ready())

    assert rest() == 0
    rests = []
    for _ in range(4):
        judge.settle(-2.0)
        rests.append(rest())
    assert rests == [8, 16, 32, 64]
    for _ in range(4):
        judge.settle(1.5)
    judge.settle(-3.0)
    judge.settle(-3.0)
    assert rest() == 8

"""The parts of the drafting policy: costs of passes, acceptance rates, the budget and pauses."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from localllm.generation.speculation.policy import Acceptance, Budget, Costs, Judge, outlook


def test_costs_between_those_measured_lie_between_them() -> None:
    costs = Costs({1: 10.0, 4: 16.0, 16: 40.0})
    assert [costs.seconds(n) for n in (1, 2, 4, 10, 16)] == pytest.approx([10, 12, 16, 28, 40])
    assert costs.most == 16


def test_costs_follow_what_passes_take() -> None:
    """A single forward pass of a minute hardly changes the measured costs."""
    costs = Costs({1: 10.0, 16: 40.0})
    for _ in range(100):
        costs.observe(8, 60.0)
    assert costs.seconds(8) == pytest.approx(60, rel=0.01)
    assert costs.seconds(16) >= costs.seconds(8)
    assert costs.seconds(1) == pytest.approx(10, rel=0.1)
    for _ in range(100):
        costs.observe(1, 15.0)
    costs.observe(1, 60.0 * 1000)
    assert costs.seconds(1) < 15 * 1.1


def test_costs_are_learned_from_nothing() -> None:
    """Whatever the first pass has, its cost and the expected cost of more rows are known then."""
    for rows in (1, 4):
        costs = Costs.unknown(16)
        assert (costs.known, costs.sure) == (False, False)
        costs.observe(rows, 8.0)
        assert costs.known
        assert costs.seconds(rows) == pytest.approx(8)
    costs = Costs.unknown(16)
    truth = {1: 10.0, 2: 11.0, 4: 20.0, 6: 25.0}
    for _ in range(30):
        for number, seconds in truth.items():
            costs.observe(number, seconds)
    assert costs.sure
    assert {number: costs.seconds(number) for number in truth} == pytest.approx(truth, rel=0.02)
    assert 11 <= costs.seconds(3) <= 20
    assert costs.seconds(16) > 35


def test_a_cost_that_was_measured_at_a_busy_moment_is_tried_again() -> None:
    costs = Costs.unknown(16)
    for number, seconds in ((1, 10.0), (2, 20.0), (2, 20.0)):
        costs.observe(number, seconds)
    dear = costs.seconds(2)
    assert dear > 14
    for _ in range(32):
        costs.observe(1, 10.0)
    assert costs.seconds(2) == dear
    for _ in range(400):
        costs.observe(1, 10.0)
    assert costs.seconds(2) - 10 < 0.5 * (dear - 10)


def test_one_more_row_than_ever_observed_is_not_shunned_for_ever() -> None:
    costs = Costs.unknown(8)
    for _ in range(100):
        costs.observe(1, 1.0)
        costs.observe(5, 1.2)
    assert costs.seconds(6) == pytest.approx(1.25, abs=0.02)


def test_a_busy_machine_hardly_changes_the_costs() -> None:
    """A quarter of the passes take twice to ten times as long."""
    random, costs = np.random.default_rng(4), Costs.unknown(16)
    for _ in range(400):
        for number, seconds in ((1, 10.0), (4, 16.0)):
            delayed = random.random() < 0.25
            costs.observe(number, seconds * (random.uniform(2, 10) if delayed else 1.0))
    assert costs.seconds(1) == pytest.approx(10, rel=0.2)
    assert costs.seconds(4) / costs.seconds(1) == pytest.approx(1.6, rel=0.15)


def test_acceptance_is_learned_class_by_class() -> None:
    acceptance = Acceptance([0.5, 0.5])
    for _ in range(100):
        acceptance.observe(0, 1.0)
        acceptance.observe(1, 0.0)
    assert acceptance.expect(0) > 0.95
    assert acceptance.expect(1) < 0.05
    assert acceptance.mean == pytest.approx(0.5, abs=0.1)
    for _ in range(100):  # a text with other acceptance rates follows
        acceptance.observe(0, 0.0)
    assert acceptance.expect(0) < 0.1


def test_failures_in_some_classes_lower_the_others() -> None:
    acceptance = Acceptance([0.9, 0.9, 0.9])
    for _ in range(10):
        acceptance.observe(0, 0.0)
        acceptance.observe(1, 0.0)
    assert acceptance.expect(2) < 0.5
    for _ in range(100):  # lower rates that come true do not count as failures
        acceptance.observe(0, 0.0)
        acceptance.observe(1, 1.0)
    assert acceptance.expect(2) > 0.85
    assert acceptance.expect(1) > 0.9


def test_a_step_in_the_costs_is_looked_over() -> None:
    """Three tokens are cheap, four are not, and sixteen are again. So long drafts are worthwhile if their
    acceptance is nearly certain.
    """
    costs = Costs({1: 10.0, 3: 10.0, 4: 30.0, 16: 31.0})
    assert outlook(costs, 10.0, 2, 1.0, 0.99, 0.1, 15) > 0
    assert outlook(costs, 10.0, 2, 1.0, 0.6, 0.1, 15) == 0
    assert outlook(costs, 10.0, 0, 1.0, 0.6, 0.1, 15) > 0


def test_drafts_lose_no_more_than_the_budget() -> None:
    """It begins with 1.2 tokens. Several drafts may take half. Gains are kept, and passes restore the 1.2 tokens."""
    budget = Budget()
    assert budget.allows(0.6, 3)
    assert not budget.allows(0.61, 2)
    assert budget.allows(1.2, 1)
    budget.settle(-1.1)
    assert budget.allows(0.09, 1)
    assert not budget.allows(0.11, 1)
    assert [budget.passes_until(tokens) for tokens in (0.09, 0.11, 0.2)] == [0, 4, 34]
    for _ in range(1000):
        budget.passed()
    assert budget.tokens == 1.2
    budget.settle(2.0)
    budget.passed()
    assert budget.tokens == pytest.approx(3.2)
    budget.settle(100.0)
    assert budget.tokens == 8


def test_rests_grow_with_every_loss_and_end_with_a_gain() -> None:
    judge = Judge([0.5])

    def rest() -> int:
        return next(n for n in count() if judge.ready())

    assert rest() == 0
    rests = []
    for _ in range(6):
        judge.rest()
        rests.append(rest())
    assert rests == [12, 36, 108, 324, 512, 512]
    judge.settle(0.4)
    judge.rest()
    assert rest() == 512
    judge.settle(1.5)
    judge.rest()
    assert rest() == 12


def test_a_prompt_shows_what_further_rows_cost() -> None:
    """A prompt's row takes a third of a pass of one row, so each row beyond those observed is expected to."""
    costs = Costs.unknown(16)
    costs.read(8, 90.0)  # too few rows: their weights are read from memory
    costs.read(32, 96.0)
    costs.read(64, 320.0)  # a busy moment
    costs.observe(1, 9.0)
    assert costs.seconds(2) == pytest.approx(12)
    assert costs.seconds(16) == pytest.approx(54)
    for _ in range(20):
        costs.observe(2, 9.0)
    assert costs.seconds(3) == pytest.approx(9, abs=0.3)


def test_a_clock_that_measures_no_time_ends_nothing() -> None:
    """The clock of Windows has steps of 15.6 ms, so short passes seem to take 0 s."""
    for costs in (Costs.unknown(16), Costs({1: 0.0, 16: 0.0})):
        costs.read(32, 0.0)
        for _ in range(40):
            costs.observe(1, 0.0)
            costs.observe(2, 0.0)
        assert 0 < costs.seconds(1) <= costs.seconds(16)

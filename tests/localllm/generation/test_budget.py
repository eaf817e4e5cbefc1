"""The number of prompt tokens per step, worked out by hand from given costs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from localllm.generation.budget import (
    FEWEST,
    LEAST,
    LEAST_SLICE,
    MEDIA_SHARE,
    PER_REQUEST,
    SLICE,
    STRIDE,
    TARGET,
    Budget,
)

ROW, DECODE = 0.002, 0.05  # seconds per prompt token, seconds of a decode step


def even(rows: int) -> float:
    """Return the time of a step whose prompt tokens cost the same at every size."""
    return DECODE + (rows - 4) * ROW


def run(budget: Budget, cost: Callable[[int], float], steps: int, decoding: int = 4) -> list[int]:
    """Run steps that decode and prefill, with every tenth one without prefill. Return their total rows."""
    found = []
    for number in range(steps):
        prompt = 0 if number % 10 == 0 else budget.prompt_rows(decoding)
        budget.observe(decoding, prompt, cost(decoding + prompt) if prompt else DECODE)
        found.append(decoding + prompt)
    return [total for total in found if total != decoding]


def test_nobody_reads_so_a_step_takes_all_it_can() -> None:
    assert Budget(512, 0.2).prompt_rows(0) == 512
    budget = Budget(512, 0.2)
    run(budget, even, 100)
    assert budget.prompt_rows(0) == 512


def test_before_anything_is_measured_a_step_takes_few() -> None:
    assert Budget(512, 0.2).prompt_rows(4) == 3 * STRIDE - 4
    assert Budget(16, 0.2).prompt_rows(4) == 12


@pytest.mark.parametrize(("seconds", "rows", "total"), [(0.2, 512, 64), (0.4, 512, 176), (0.4, 100, 96)])
def test_a_step_lasts_at_most_as_long_as_asked(seconds: float, rows: int, total: int) -> None:
    """4 rows decode, (0.2 - 0.05) / 0.002 is 75, and the largest multiple of 16 up to 79 is 64."""
    budget = Budget(rows, seconds)
    run(budget, even, 300)
    assert set(run(budget, even, 300)) == {total}


def test_a_size_that_costs_more_than_its_rows_is_found_by_measuring() -> None:
    """Above 16 rows, the kernels unpack weights first, which doubles the time."""
    budget = Budget(512, 0.15)
    run(budget, lambda rows: 0.1 if rows <= 16 else 0.2, 100)
    found = run(budget, lambda rows: 0.1 if rows <= 16 else 0.2, 1000)
    assert found.count(16) > 0.97 * len(found)


def test_a_size_that_was_slow_is_tried_again() -> None:
    """The machine is busy for a while."""
    budget = Budget(512, 0.2)
    run(budget, lambda rows: 4 * even(rows), 100)
    assert set(run(budget, lambda rows: 4 * even(rows), 10)) == {4 + FEWEST}
    run(budget, even, 3000)
    assert set(run(budget, even, 10)) == {64}


def test_many_answers_leave_prompts_as_much_time_as_they_take() -> None:
    """Without a target, decoding takes 0.26 s, so a step may take 0.52 s."""
    budget = Budget(512, 0.0)
    for _ in range(100):
        budget.observe(16, 0, 0.26)
        budget.observe(16, 16, 0.26 + 16 * ROW)
    assert budget.prompt_rows(16) == 128  # 0.26 / 0.002 = 130
    quick = Budget(512, 0.0)
    run(quick, even, 300)
    assert quick.prompt_rows(4) + 4 == 16  # even(32) is 0.106, and a step may take 0.1


def test_a_step_may_take_longer_with_more_requests_unless_there_is_a_target() -> None:
    budget = Budget(512, 0.0)
    for number in range(2000):
        rows = budget.prompt_rows(4, 4 + number % 30) if number % 10 else 0
        budget.observe(4, rows, 0.01 + rows * ROW)
    assert even(4) < TARGET
    found = [budget.prompt_rows(4, 4 + waiting) + 4 for waiting in (1, 4, 12, 28)]
    limits = [max(TARGET, PER_REQUEST * (4 + waiting)) for waiting in (1, 4, 12, 28)]
    for total, limit in zip(found, limits, strict=True):
        assert 0.01 + (total - 4) * ROW < 1.05 * limit
        assert 0.01 + (total + STRIDE - 4) * ROW > 0.95 * limit
    budget.seconds = 0.19
    assert budget.prompt_rows(4, 100) == budget.prompt_rows(4, 1) > 28


def test_noise_does_not_make_steps_smaller() -> None:
    """Other programs stretch some steps to twice their time; the average is what counts."""
    budget, number = Budget(512, 0.2), iter(range(10_000))
    found = run(budget, lambda rows: even(rows) * (0.8 if next(number) % 4 else 1.6), 600)
    assert found[300:].count(64) > 0.8 * len(found[300:])


def test_a_target_holds_even_if_decoding_takes_most_of_it() -> None:
    budget = Budget(512, 0.2)
    for _ in range(100):
        budget.observe(16, 0, 0.16)
        budget.observe(16, 16, 0.16 + 16 * ROW)
    assert budget.prompt_rows(16) == 16


def test_a_step_takes_a_few_rows_however_slow_they_are() -> None:
    for decoding in range(1, 40):
        budget = Budget(512, 0.001)
        for _ in range(100):
            budget.observe(decoding, 0, 0.001)
            budget.observe(decoding, 16, 10.0)
        assert budget.prompt_rows(decoding) == FEWEST
        budget.seconds = 0.0
        assert LEAST <= budget.prompt_rows(decoding) < LEAST + STRIDE


def test_a_target_below_the_smallest_usual_step_gets_smaller_ones() -> None:
    """4 rows take 0.05 s, 16 rows 0.122 s: with a target of 0.1 s, 12 rows fit. Without it, steps have 16 rows."""
    cost: Callable[[int], float] = lambda rows: 0.05 + 0.006 * (rows - 4)  # noqa: E731
    budget, plain = Budget(512, 0.1), Budget(512, 0.0)
    run(budget, cost, 300)
    assert run(budget, cost, 300).count(12) > 0.97 * 270  # 16 rows are tried again now and then
    run(plain, cost, 300)
    assert set(run(plain, cost, 300)) == {16}
    assert run(budget, cost, 300, decoding=8).count(12) > 0.97 * 270
    for _ in range(50):  # the last chunks of prompts are shorter, which says nothing about whole steps
        budget.observe(4, 9, cost(13))
    assert run(budget, cost, 300).count(12) > 0.97 * 270


def test_a_stall_of_the_machine_counts_little() -> None:
    budget = Budget(512, 0.2)
    run(budget, even, 300)
    budget.observe(4, 60, 60.0)
    assert budget.prompt_rows(4) + 4 == 48
    run(budget, even, 1000)
    assert budget.prompt_rows(4) + 4 == 64


def test_prompts_alone_cost_their_rows() -> None:
    budget = Budget(512, 0.2)
    budget.observe(4, 0, 0.05)
    budget.observe(0, 100, 0.2)  # the step decodes no token
    assert budget.prompt_rows(4) + 4 == 64


def test_the_encoder_and_prompts_with_pictures_leave_most_of_the_time_to_decode() -> None:
    budget = Budget(512, 0.0)
    assert budget.encoder_seconds(False) == SLICE
    run(budget, even, 300)
    assert budget.encoder_seconds(True) == pytest.approx((MEDIA_SHARE - 1) * DECODE)
    rows = budget.prompt_rows(4, 2, media=True)
    assert rows < budget.prompt_rows(4, 2)
    assert even(4 + rows) <= MEDIA_SHARE * DECODE + ROW
    assert budget.prompt_rows(4, 2, media=True, spent=0.3 * DECODE) == FEWEST  # after the encoder, the fewest
    asked = Budget(512, 0.2)
    run(asked, even, 300)
    assert asked.encoder_seconds(True) == pytest.approx((0.2 - DECODE) / 2)
    assert asked.prompt_rows(4, 2, spent=asked.encoder_seconds(True)) > FEWEST  # prompts of text get the other half
    tight = Budget(512, DECODE / 2)
    run(tight, even, 300)
    assert tight.encoder_seconds(True) == pytest.approx(max(0.1 * DECODE, LEAST_SLICE))

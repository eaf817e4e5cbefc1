"""The number of prompt tokens per step, worked out by hand from given costs."""

from __future__ import annotations

import pytest

from localllm.generation.schedule import LEAST, Budget

ROW, DECODE = 0.002, 0.05  # seconds per prompt token, seconds of a decode step


def measured(seconds: float = 0.2, rows: int = 512) -> Budget:
    budget = Budget(rows, seconds)
    for _ in range(100):
        budget.observe(4, 0, DECODE)
        budget.observe(4, 100, DECODE + 100 * ROW)
    return budget


def test_nobody_reads_so_a_step_takes_all_it_can() -> None:
    assert Budget(512, 0.2).prompt_rows(0) == 512
    assert measured().prompt_rows(0) == 512


def test_before_anything_is_measured_a_step_takes_few() -> None:
    assert Budget(512, 0.2).prompt_rows(4) == 4 * LEAST
    assert Budget(40, 0.2).prompt_rows(4) == 36


def test_a_step_lasts_as_long_as_asked() -> None:
    """(0.2 - 0.05) / 0.002 is 75, and the largest multiple of 16 up to 75 is 64."""
    assert measured().prompt_rows(4) == 64
    assert measured(0.4).prompt_rows(4) == 160
    assert measured(0.4, rows=100).prompt_rows(4) == 96


def test_if_more_wait_than_are_written_steps_may_last_longer() -> None:
    """With 8 requests waiting and 4 running, a step may last twice as long as asked. The maximum is 2.5 times."""
    assert measured().prompt_rows(4, 8) == 160  # (0.4 - 0.05) / 0.002 = 175
    assert measured().prompt_rows(4, 100) == 224  # (0.5 - 0.05) / 0.002 = 225


def test_many_answers_leave_prompts_as_much_time_as_they_take() -> None:
    """Decoding takes 0.16 s of the 0.2 s asked for, so a step may last 0.32 s. The remaining 0.16 s are
    enough for 80 prompt tokens.
    """
    budget = Budget(512, 0.2)
    for _ in range(100):
        budget.observe(16, 0, 0.16)
        budget.observe(16, 100, 0.16 + 100 * ROW)
    assert budget.prompt_rows(16) == 80


def test_a_step_takes_a_few_rows_however_slow_they_are() -> None:
    budget = Budget(512, 0.001)
    for _ in range(100):
        budget.observe(4, 0, 0.001)
        budget.observe(4, 100, 0.001 + 100 * ROW)
    assert budget.prompt_rows(4) == LEAST


def test_a_stall_of_the_machine_counts_little() -> None:
    budget = measured()
    budget.observe(4, 100, 60.0)
    assert budget.prompt_rows(4) >= 48
    budget.observe(4, 0, 60.0)
    assert budget.prompt_rows(4) >= 32


def test_steps_with_few_prompt_rows_do_not_count() -> None:
    budget = measured()
    for _ in range(100):
        budget.observe(4, LEAST - 1, 10.0)
    assert budget.prompt_rows(4) == 64


def test_rows_cost_something_even_if_decoding_seems_to_cost_all() -> None:
    budget = Budget(512, 0.2)
    budget.observe(4, 0, 0.1)
    budget.observe(4, 100, 0.09)
    assert budget.prompt_rows(4) == pytest.approx(512 - 4, abs=8)


def test_prompts_alone_cost_their_rows() -> None:
    budget = Budget(512, 0.2)
    budget.observe(4, 0, 0.05)
    budget.observe(0, 100, 0.2)  # the step decodes no token
    assert budget.prompt_rows(4) == 64

"""Forecasts of a model in stages: the arithmetic, against a simulation of the loop that runs the steps."""

from __future__ import annotations

import heapq
from dataclasses import replace
from itertools import count

import pytest

from localllm.cluster.forecast import HANDLING, Network, StageSpeed, first_token, tokens_per_second


def stages(*seconds: float, prompt: float = 0.001, sent: int = 8192) -> list[StageSpeed]:
    return [
        StageSpeed(lambda rows, own=own: own * (0.8 + 0.2 * rows), lambda rows: prompt * rows, sent) for own in seconds
    ]


def simulated(speeds: list[StageSpeed], network: Network, sequences: int, steps: int = 2000) -> float:
    """Return the tokens per second of groups of sequences that travel around the ring of stages."""
    groups = min(sequences, len(speeds))
    rows = sequences / groups
    free, numbers = [0.0] * len(speeds), count()
    events = [(0.0, next(numbers), group, 0) for group in range(groups)]
    done, ended = 0, 0.0
    while done < steps:
        now, _, group, stage = heapq.heappop(events)
        if stage == len(speeds):
            done, ended = done + 1, now
            heapq.heappush(events, (now, next(numbers), group, 0))
            continue
        free[stage] = max(now, free[stage]) + speeds[stage].step(round(rows))
        arrived = free[stage] + (network.hop(speeds[stage].sent * round(rows)) if len(speeds) > 1 else 0.0)
        heapq.heappush(events, (arrived, next(numbers), group, stage + 1))
    return done * rows / ended


@pytest.mark.parametrize("delay", [0.0, 0.001, 0.02])
@pytest.mark.parametrize("seconds", [(0.03,), (0.02, 0.01), (0.01, 0.01), (0.01, 0.005, 0.02), (0.01,) * 4])
@pytest.mark.parametrize("sequences", [1, 2, 4, 8])
def test_tokens_per_second_are_those_of_a_simulation(seconds: tuple[float, ...], sequences: int, delay: float) -> None:
    if sequences % min(sequences, len(seconds)):
        return
    network = Network(delay, 125e6)
    found = tokens_per_second(stages(*seconds), network, sequences)
    assert found == pytest.approx(simulated(stages(*seconds), network, sequences), rel=0.02)


def test_a_hop_takes_its_delay_and_its_bytes() -> None:
    assert Network(0.001, 1e6).hop(5000) == pytest.approx(0.001 + 0.005 + HANDLING)
    assert Network(0.001).hop(5000) == pytest.approx(0.001 + HANDLING)
    one, two = (tokens_per_second(stages(*each), Network(0.001), 1) for each in ((0.02,), (0.01, 0.01)))
    assert 1 / two - 1 / one == pytest.approx(2 * (0.001 + HANDLING))


def test_a_prompt_fills_the_pipe() -> None:
    network = Network(0.0)
    alone = first_token(stages(0.02), network, 512, 512)
    assert alone == pytest.approx(0.512)
    halves = stages(0.01, 0.01, prompt=0.0005)
    assert first_token(halves, network, 512, 512) == pytest.approx(0.512 * (8 + 1) / 16, rel=0.01)
    assert first_token(halves, network, 60, 512) == pytest.approx(0.060, rel=0.02)  # too short to be divided


def test_stages_on_one_machine_share_it() -> None:
    """Each has a thread. Both threads together read the weights only 1.25 times as fast as one."""
    network = Network(0.0)
    alone = stages(0.015, 0.015)
    both = stages(0.015 / 1.25, 0.015 / 1.25, prompt=0.0004)
    shared = [replace(stage, together=faster) for stage, faster in zip(alone, both, strict=True)]
    for sequences in (1, 2, 8):
        apart, found = (tokens_per_second(each, network, sequences) for each in (alone, shared))
        once = 2 * alone[0].step(max(sequences // 2, 1)) / 1.25
        most = max(sequences // 2, 1) / once
        assert found == pytest.approx(min(apart, most))
        assert (found < apart) == (sequences > 1)  # one sequence uses one stage at a time
    prompts = [replace(stage, prompt=lambda rows: 0.0005 * rows) for stage in shared]
    pieces, each = 8, 64
    expected = each * 0.001 + (pieces - 1) * each * 0.0008
    assert first_token(prompts, network, 512, 512) == pytest.approx(expected, rel=0.03)


def test_passes_of_a_prompt_have_the_rows_of_the_loop() -> None:
    rows: list[int] = []

    def prompt(count: int) -> float:
        rows.append(count)
        return 0.001 * count

    first_token([StageSpeed(lambda count: 0.0, prompt, 0)], Network(0.0), 700, 512)
    assert rows == [512, 188]
    rows.clear()
    first_token([StageSpeed(lambda count: 0.0, prompt, 0)] * 2, Network(0.0), 512, 512)
    assert set(rows) == {64}

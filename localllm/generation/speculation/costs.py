"""Measures forward passes of one sequence, for 40 ms or one round, whichever is longer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np

from localllm.engine import DraftRows, Engine, SequenceRows
from localllm.generation.speculation.policy import Costs

Clock = Callable[[], float]
MOST_ROWS = 16  # maximum number of tokens of a pass that verifies drafts
VERIFYING = (1, 2, 3, 4, 6, 8, 12, MOST_ROWS)  # numbers of tokens to measure; costs in between are interpolated
ENOUGH = 0.04  # minimum measuring time in seconds


def unknown_costs(engine: Engine) -> Costs:
    """Return costs to be learned from the engine's passes."""
    return Costs.unknown(most_rows(engine))


def most_rows(engine: Engine) -> int:
    return min(engine.limits.positions, engine.limits.logit_rows, MOST_ROWS)


def measure_costs(engine: Engine, vocabulary: int, rows: Sequence[int] = (1,), clock: Clock | None = None) -> Costs:
    """Return the costs of forward passes with logits for every token, with an empty cache and varied tokens.

    By default, only passes of one token are measured. The cost of more tokens is learned while drafting. `clock`
    defaults to the engine's.
    """
    sequence = engine.add()

    def step(tokens: list[int]) -> None:
        engine.truncate(sequence, 0)
        engine.step([SequenceRows(sequence, tokens, "all")])

    try:
        return _measured(step, _counts(engine, rows), vocabulary, most_rows(engine), clock or engine.clock)
    finally:
        engine.release(sequence)


def measure_head_costs(engine: Engine, vocabulary: int, rows: Sequence[int] = (1,)) -> Costs:
    """Return the costs of passes of the multi-token-prediction head, as `measure_costs` does."""
    assert engine.draft_head is not None
    width, counts, sequence = engine.draft_head.hidden.width, _counts(engine, rows), engine.add()

    def step(tokens: list[int]) -> None:
        hidden = np.ones((len(tokens), width), np.float32)
        engine.draft([DraftRows(sequence, 0, tokens, hidden, len(tokens))])

    try:
        with engine.alone, engine.drafting([(sequence, max(counts))]):
            return _measured(step, counts, vocabulary, most_rows(engine), engine.clock)
    finally:
        engine.release(sequence)


def _counts(engine: Engine, rows: Sequence[int]) -> list[int]:
    return [count for count in rows if count <= most_rows(engine)]


def _measured(
    step: Callable[[list[int]], None], counts: Sequence[int], vocabulary: int, most: int, clock: Clock
) -> Costs:
    """Return the shortest time of `step` for each number of tokens."""
    tokens = np.linspace(0, vocabulary - 1, max(counts)).astype(np.int32).tolist()
    best = dict.fromkeys(counts, float("inf"))
    began = perf_counter()
    step(tokens[:1])  # warm-up: touches new memory
    while perf_counter() - began < ENOUGH or best[counts[-1]] == float("inf"):
        for count in counts:
            start = clock()
            step(tokens[:count])
            best[count] = min(best[count], clock() - start)
    return Costs(best, most)

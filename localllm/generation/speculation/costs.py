"""Measures forward passes over 1 to 16 tokens of one sequence, for 40 ms or one round, whichever is longer."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import numpy as np

from localllm.engine import Engine, SequenceRows
from localllm.generation.speculation.policy import Costs

VERIFYING = (1, 2, 3, 4, 6, 8, 12, 16)  # numbers of tokens to measure; costs in between are interpolated
DRAFTING = (1, 16)
ENOUGH = 0.04  # minimum measuring time in seconds


def measure_costs(engine: Engine, vocabulary: int, rows: Sequence[int]) -> Costs:
    """Return the shortest measured time for each number of tokens, with an empty cache and varied tokens."""
    most = min(engine.limits.positions, engine.limits.logit_rows)
    counts = [n for n in rows if n <= most]
    tokens = np.linspace(0, vocabulary - 1, max(counts)).astype(np.int32).tolist()
    best = dict.fromkeys(counts, float("inf"))
    sequence = engine.add()
    began = perf_counter()
    try:
        engine.step([SequenceRows(sequence, tokens[:1], "all")])  # warm-up: touches new memory
        while perf_counter() - began < ENOUGH or best[counts[-1]] == float("inf"):
            for count in counts:
                engine.truncate(sequence, 0)
                start = perf_counter()
                engine.step([SequenceRows(sequence, tokens[:count], "all")])
                best[count] = min(best[count], perf_counter() - start)
    finally:
        engine.release(sequence)
    return Costs(best)

"""Times passes of 1 to 16 rows of one sequence, for 40 milliseconds or one round, whichever is longer."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import numpy as np

from localllm.engine import Engine, SequenceRows
from localllm.generation.speculation.policy import Costs

VERIFYING = (1, 2, 3, 4, 6, 8, 12, 16)  # rows timed; costs between these are interpolated
DRAFTING = (1, 16)
ENOUGH = 0.04  # minimum seconds to measure for


def measure_costs(engine: Engine, vocabulary: int, rows: Sequence[int]) -> Costs:
    """Return the best time for each number of rows, with an empty cache and different tokens."""
    most = min(engine.limits.positions, engine.limits.logit_rows)
    counts = [n for n in rows if n <= most]
    tokens = np.linspace(0, vocabulary - 1, max(counts)).astype(np.int32).tolist()
    best = dict.fromkeys(counts, float("inf"))
    sequence = engine.add()
    began = perf_counter()
    try:
        engine.step([SequenceRows(sequence, tokens[:1], "all")])  # the first pass touches fresh memory
        while perf_counter() - began < ENOUGH or best[counts[-1]] == float("inf"):
            for count in counts:
                engine.truncate(sequence, 0)
                start = perf_counter()
                engine.step([SequenceRows(sequence, tokens[:count], "all")])
                best[count] = min(best[count], perf_counter() - start)
    finally:
        engine.release(sequence)
    return Costs(best)

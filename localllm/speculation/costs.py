"""Times passes of 1 to 16 rows on an open model: for some tens of milliseconds, or one round if that takes longer."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from localllm.speculation.policy import Costs

if TYPE_CHECKING:
    from localllm.model import Model

VERIFYING = (1, 2, 3, 4, 6, 8, 12, 16)  # row counts to time; costs in between are interpolated
DRAFTING = (1, 16)
ENOUGH = 0.04  # seconds


def measure(model: Model, rows: Sequence[int]) -> Costs:
    """The best time for each row count, at the beginning of a text of distinct tokens."""
    most = min(model.context, model.executable.limits.logit_rows)
    counts = [n for n in rows if n <= most]
    tokens = np.linspace(0, model.vocabulary - 1, max(counts)).astype(np.int32).tolist()
    best = dict.fromkeys(counts, float("inf"))
    session = model.session()
    began = perf_counter()
    try:
        session.evaluate(tokens[:1], logits=True)  # the first pass touches new memory
        while perf_counter() - began < ENOUGH or best[counts[-1]] == float("inf"):
            for count in counts:
                session.rewind(0)
                start = perf_counter()
                session.evaluate(tokens[:count], logits=True)
                best[count] = min(best[count], perf_counter() - start)
    finally:
        session.close()
    return Costs(best)

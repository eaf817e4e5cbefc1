"""Cases for the history-dependent samplers and for infill: logits computed by a rule, and the settings of each case."""

from __future__ import annotations

from typing import Any

import numpy as np

STEPS = 24
LISTED = 6  # number of largest probabilities to store
FOLLOWING: dict[str, dict[str, Any]] = {
    "mirostat": {"mirostat": 1},
    "mirostat, low": {"mirostat": 1, "mirostat_tau": 1.5, "mirostat_eta": 0.4, "temperature": 1.3},
    "mirostat, greedy": {"mirostat": 1, "temperature": 0.0},
    "mirostat 2": {"mirostat": 2},
    "mirostat 2, low": {"mirostat": 2, "mirostat_tau": 1.5, "mirostat_eta": 0.4, "temperature": 1.3},
    "mirostat 2, wild": {"mirostat": 2, "mirostat_tau": 4.0, "mirostat_eta": 1.0, "temperature": 0.6},
    "adaptive-p": {"adaptive_target": 0.4},
    "adaptive-p after min-p": {"adaptive_target": 0.65, "adaptive_decay": 0.5, "min_p": 0.05, "top_k": 20},
    "adaptive-p, no memory": {"adaptive_target": 0.0, "adaptive_decay": 0.0, "temperature": 1.2},
    "adaptive-p, off": {"adaptive_target": -1.0},
}
INFILL = 120  # number of infill cases


def logits(case: str, step: int, size: int = 160) -> np.ndarray:
    """Return float32 logits (size,) in random order, near Zipf's law. They are multiples of 1/16, so they are
    equal on all machines.
    """
    random = np.random.RandomState(sum(case.encode()) * 1000 + step)
    ranks = random.permutation(size) + 1.0
    values = -np.log(ranks) * (1.4 + 0.6 * random.rand()) + 0.3 * random.standard_normal(size)
    values[random.randint(size)] = -np.inf if step % 5 == 4 and "mirostat" not in case else values[0]
    return (np.round(values * 16) / 16).astype(np.float32)


def infill_logits(case: int, pieces: list[bytes], ends: list[int]) -> tuple[np.ndarray, int]:
    """Return logits that favor some related tokens, and a top-k."""
    random = np.random.RandomState(case)
    values = random.standard_normal(len(pieces))
    written = [token for token, piece in enumerate(pieces) if piece]
    start = pieces[written[random.randint(len(written))]][:1]
    related = [token for token in written if pieces[token][:1] == start]
    for token in random.permutation(related)[: random.randint(1, 12)]:
        values[token] += random.uniform(3, 12)
    for token in random.permutation(written)[:3]:
        values[token] += random.uniform(3, 12)
    if case % 3 == 0:
        values[ends[random.randint(len(ends))]] = values.max() - random.uniform(-1, 8)
    return (np.round(values * 16) / 16).astype(np.float32), int(random.choice([1, 5, 40, 200]))

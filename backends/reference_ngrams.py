"""The lookup of n-grams in plain NumPy: the definition of what the backends compute."""

from __future__ import annotations

import numpy as np

from localllm.backends.reference_state import State
from localllm.plan import BLOCK, EmbedNgrams


def embed_ngrams(state: State, op: EmbedNgrams) -> None:
    batch, tables, table = state.batch, state.tables(op.layer), state.weights[op.table.name]
    stored = state.stores[op.layer].reshape(-1, BLOCK)  # (blocks, BLOCK): the ids
    stored.reshape(-1)[state.slots(op.layer)] = batch.tokens
    out = np.empty((len(batch.tokens), op.out.width), np.float32)
    for row, position in enumerate(batch.positions):
        rows, mixed, over = [], 0, False
        for back, multiplier in enumerate(op.multipliers):
            at, token = position - back, op.end
            if at >= 0 and not over:
                token = int(stored[tables[batch.sequence[row], at // BLOCK], at % BLOCK])
            over = over or (back > 0 and token == op.end)
            mixed ^= token * multiplier
            if back:
                own = slice((back - 1) * op.heads, back * op.heads)
                rows += [mixed % size + first for size, first in zip(op.sizes[own], op.firsts[own], strict=True)]
        out[row] = table[rows].reshape(-1)
    state.write(op.out, out)

"""Reference implementation of n-gram lookup in plain NumPy. All backends must match it."""

from __future__ import annotations

import numpy as np

from localllm.backends.reference_state import ReferenceState
from localllm.plan import EmbedNgrams
from localllm.quant import dequantize


def embed_ngrams(state: ReferenceState, op: EmbedNgrams) -> None:
    batch, table = state.batch, op.table
    assert batch.histories is not None, "checked by the shell"
    out = np.empty((len(batch.tokens), op.out.width), np.float32)
    for row, position in enumerate(batch.positions.tolist()):
        history, parts, mixed, over = batch.histories[batch.sequence[row]], [], 0, False
        for back, multiplier in enumerate(op.multipliers):
            token = op.end if over or back > position else history[position - back]
            over = over or (back > 0 and token == op.end)
            mixed ^= token * multiplier
            if back:
                own = slice((back - 1) * op.heads, back * op.heads)
                numbers = [mixed % size + first for size, first in zip(op.sizes[own], op.firsts[own], strict=True)]
                parts += [dequantize(table.read(number, number + 1), table.format)[0] for number in numbers]
        out[row] = np.concatenate(parts)
    state.write(op.out, out)

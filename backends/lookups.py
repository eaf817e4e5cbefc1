"""Lookups: the host reads rows of the embedding tables that stay in the GGUF, for every device.

The rows that a step needs depend only on its tokens and earlier tokens, so they are read before the first kernel runs.
Each row is read once per step, in order of file offset. Only the operating system caches rows between steps. The thread
that runs the step reads the rows. Several executables of one model may read at the same time.

The embeddings of media tokens come with the batch, and reach a device in the same way.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from localllm.plan import F32, Batch, EmbedMedia, EmbedNgrams, Plan, Value
from localllm.quant import dequantize


class Lookups:
    """The lookups of a plan, with their results for the last batch."""

    def __init__(self, plan: Plan) -> None:
        self._operations = [op for op in plan.operations if isinstance(op, EmbedNgrams)]
        self._media = [op for op in plan.operations if isinstance(op, EmbedMedia)]
        self._found: dict[int, F32] = {}  # rows by value index

    def fetch(self, batch: Batch) -> None:
        """Read the rows for a batch that has passed the checks.

        Raises the operating system's error if the file cannot be read.
        """
        self._found = {op.out.index: _embedded(op, batch) for op in self._operations}
        for op in self._media:
            self._found[op.out.index] = media_rows(batch, op.out.width)

    def __getitem__(self, value: Value) -> F32:
        """Return a lookup's rows for the last batch, (T, width); (0, width) for media in a batch of text."""
        return self._found[value.index]


def media_rows(batch: Batch, width: int) -> F32:
    """Return the embeddings of a batch's media tokens at their rows (T, width), zero elsewhere; (0, width) if it has
    none.
    """
    if batch.media is None:
        return np.empty((0, width), np.float32)
    found = np.zeros((len(batch.tokens), width), np.float32)
    found[batch.tokens < 0] = batch.media
    return found


def _embedded(op: EmbedNgrams, batch: Batch) -> F32:
    wanted = _hashed(op, batch).ravel()
    ordered = np.sort(wanted)
    rows = ordered[np.append(True, ordered[1:] != ordered[:-1])]  # np.unique would import numpy.ma, which takes 30 ms
    values = dequantize(op.table.gather(rows), op.table.format)  # (rows, width of a head)
    return values[np.searchsorted(rows, wanted)].reshape(len(batch.tokens), op.out.width)


def _hashed(op: EmbedNgrams, batch: Batch) -> NDArray[np.int64]:
    """Return the table row of every head, (T, heads of all orders)."""
    tokens = _tokens(op, batch)
    mixed, over = tokens[:, 0] * op.multipliers[0], np.zeros(len(tokens), np.bool_)
    found = []
    for back, multiplier in enumerate(op.multipliers[1:], 1):
        token = np.where(over, op.end, tokens[:, back])
        over = token == op.end
        mixed = mixed ^ token * multiplier
        own = slice((back - 1) * op.heads, back * op.heads)
        found.append(mixed[:, None] % np.array(op.sizes[own]) + np.array(op.firsts[own]))
    return np.concatenate(found, axis=1)


def _tokens(op: EmbedNgrams, batch: Batch) -> NDArray[np.int64]:
    """Return the token of every row and the preceding tokens, newest first: (T, length of the longest n-gram)."""
    assert batch.histories is not None
    backs = np.arange(len(op.multipliers))
    found = np.empty((len(batch.tokens), len(backs)), np.int64)
    starts = [0, *(np.flatnonzero(np.diff(batch.sequence)) + 1).tolist()]
    for start, stop in zip(starts, [*starts[1:], len(found)], strict=True):
        positions = batch.positions[start:stop]
        first, stop_at = int(positions[0]) - len(backs) + 1, int(positions[-1]) + 1
        seen = np.full(stop_at - first, op.end, np.int64)  # positions below 0 count as token `end`
        seen[max(-first, 0) :] = batch.histories[batch.sequence[start]][max(first, 0) : stop_at]
        found[start:stop] = seen[(positions - first)[:, None] - backs]
    return found

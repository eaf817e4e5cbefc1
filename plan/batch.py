"""The batch: the input of one step of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

BLOCK = 64  # tokens per cache block


@dataclass(slots=True)  # not frozen: setting its fields would take a microsecond more
class Batch:
    """One step's input: T rows of any number of sequences, and which rows return logits.

    `slots[t]` is the cache slot that row t is written to: physical block * BLOCK + offset. `tables[s]` lists the
    physical blocks of sequence s in order of position. Row t belongs to `sequence[t]` and sees positions
    0..positions[t]. Rows of a sequence are adjacent, in order of position. If layers with a window have separate blocks
    (`Limits.window_blocks`), they use `window_slots` and `window_tables`. Table entries of blocks that have left the
    window are not read.

    `histories[s]` holds the tokens of sequence s from position 0, at least up to its last row. Only plans with lookups
    need it.
    """

    tokens: NDArray[np.int32]  # (T,)
    positions: NDArray[np.int32]  # (T,)
    slots: NDArray[np.int32]  # (T,)
    sequence: NDArray[np.int32]  # (T,)
    tables: NDArray[np.int32]  # (sequences, blocks)
    logit_rows: NDArray[np.int32]  # (L,)
    window_slots: NDArray[np.int32] | None = None  # (T,)
    window_tables: NDArray[np.int32] | None = None  # (sequences, blocks)
    borders: NDArray[np.int32] | None = None  # (sequences,): first position after the text that an encoder reads
    histories: Sequence[Sequence[int]] | None = None  # (sequences,): first position after the encoder text

    def ends(self) -> NDArray[np.int32]:
        """Return the last position that each non-causal row sees, (T,): the end of its sequence or of its text."""
        if self.borders is not None:
            return self.borders[self.sequence] - 1
        last = np.append(self.sequence[1:] != self.sequence[:-1], True)
        stops = np.flatnonzero(last)
        return np.repeat(self.positions[stops], np.diff(stops, prepend=-1))

    def turns(self) -> list[tuple[int, Batch]]:
        """Return encoder-decoder stages with their batches: stage 0 for rows of the text, stage 1 for rows after it."""
        assert self.borders is not None
        after = self.positions >= self.borders[self.sequence]
        if after.all():
            return [(1, self)]
        found = [(stage, np.flatnonzero(after == bool(stage))) for stage in (0, 1)]
        return [(stage, self._part(rows)) for stage, rows in found if len(rows)]

    def _part(self, rows: NDArray[np.intp]) -> Batch:
        place = np.full(len(self.tokens), -1, np.int32)
        place[rows] = np.arange(len(rows))
        wanted = place[self.logit_rows]
        return replace(
            self, tokens=self.tokens[rows], positions=self.positions[rows], slots=self.slots[rows],
            sequence=self.sequence[rows], logit_rows=wanted[wanted >= 0],
        )  # fmt: skip

    def wanted(self) -> Batch:
        """Return a batch of the rows whose logits are requested, in the order of `logit_rows`; rows may repeat."""
        rows = self.logit_rows
        return replace(
            self, tokens=self.tokens[rows], positions=self.positions[rows], slots=self.slots[rows],
            sequence=self.sequence[rows], logit_rows=np.arange(len(rows), dtype=np.int32),
            window_slots=None if self.window_slots is None else self.window_slots[rows],
        )  # fmt: skip

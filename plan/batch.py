"""The batch: the input of one step of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.plan.values import Rows

BLOCK = 64  # tokens per cache block


@dataclass(slots=True)  # not frozen: constructing a frozen instance takes a microsecond longer
class Batch:
    """One step's input: T tokens of any number of sequences, and the tokens whose logits are requested.

    `slots[t]` is the cache slot for token t: physical block * BLOCK + offset. `tables[s]` lists the physical blocks of
    sequence s in order of position. Token t belongs to `sequence[t]` and attends to positions 0..positions[t]. Tokens
    of a sequence are adjacent, in order of position. If sliding-window layers have separate blocks
    (`Limits.window_blocks`), they use `window_slots` and `window_tables`. Table entries of blocks outside the window
    are not read.

    `histories[s]` contains the tokens of sequence s from position 0, at least up to its last token in the batch. Only
    plans with lookups need it.

    `axes[t]` has the positions of token t for rotations with several axes (`Rope.axes`); for text models t, y, x and z.
    Without it, every axis has the token's position. `positions` alone determines slots and attention.

    Media tokens (pictures, sound) have negative ids, and in order of the batch one row of `media` each. The tokens of a
    span that see each other are in one batch; `span_ends[t]` is the last position that token t attends to in layers
    with `Attention.spans`: the last one of its span, or its own.
    """

    tokens: NDArray[np.int32]  # (T,)
    positions: NDArray[np.int32]  # (T,)
    slots: NDArray[np.int32]  # (T,)
    sequence: NDArray[np.int32]  # (T,)
    tables: NDArray[np.int32]  # (sequences, blocks)
    logit_rows: NDArray[np.int32]  # (L,)
    window_slots: NDArray[np.int32] | None = None  # (T,)
    window_tables: NDArray[np.int32] | None = None  # (sequences, blocks)
    borders: NDArray[np.int32] | None = None  # (sequences,): first position after the encoder's text
    histories: Sequence[Sequence[int]] | None = None  # (sequences,): tokens of each sequence
    axes: NDArray[np.int32] | None = None  # (T, axes)
    media: NDArray[np.float32] | None = None  # (M, width): embeddings of the media tokens
    span_ends: NDArray[np.int32] | None = None  # (T,); None: every token's own position

    def ends(self) -> NDArray[np.int32]:
        """Return the last position that each non-causal token attends to, (T,): the end of its
        sequence or of its encoder text."""
        if self.borders is not None:
            return self.borders[self.sequence] - 1
        last = np.append(self.sequence[1:] != self.sequence[:-1], True)
        stops = np.flatnonzero(last)
        return np.repeat(self.positions[stops], np.diff(stops, prepend=-1))

    def turns(self) -> list[tuple[int, Batch]]:
        """Return encoder-decoder stages with their batches: stage 0 for encoder tokens, stage 1 for decoder tokens."""
        assert self.borders is not None
        after = self.positions >= self.borders[self.sequence]
        if after.all():
            return [(1, self)]
        found = [(stage, np.flatnonzero(after == bool(stage))) for stage in (0, 1)]
        return [(stage, self.piece(rows)[0]) for stage, rows in found if len(rows)]

    def piece(self, rows: NDArray[np.intp]) -> tuple[Batch, NDArray[np.intp]]:
        """Return some rows as a separate batch, and the positions of their logits in `logit_rows`."""
        if len(rows) == len(self.tokens):
            return self, np.arange(len(self.logit_rows))
        place = np.full(len(self.tokens), -1, np.int32)
        place[rows] = np.arange(len(rows))
        at = place[self.logit_rows]
        wanted = np.flatnonzero(at >= 0)
        return replace(self.rows(rows), logit_rows=at[wanted]), wanted

    def rows(self, rows: NDArray[np.integer[Any]]) -> Batch:
        """Return some rows as a batch, in this order; they may repeat. `logit_rows` stays as it is."""
        media = self.media
        if media is not None:
            media = media[(np.cumsum(self.tokens < 0) - 1)[rows[self.tokens[rows] < 0]]]
        return replace(
            self, tokens=self.tokens[rows], positions=self.positions[rows], slots=self.slots[rows],
            sequence=self.sequence[rows], media=media,
            window_slots=None if self.window_slots is None else self.window_slots[rows],
            axes=None if self.axes is None else self.axes[rows],
            span_ends=None if self.span_ends is None else self.span_ends[rows],
        )  # fmt: skip

    def merged(
        self, kinds: Sequence[Rows], parts: Iterable[tuple[NDArray[np.intp], NDArray[np.intp], Sequence[NDArray[Any]]]]
    ) -> list[NDArray[Any]]:
        """Return arrays for the whole batch (T or L, ...), as `kinds` says, from the arrays of its pieces.

        A part has the rows of a piece, the positions of their logits (see `piece`), and the piece's arrays.
        """
        counts = {"batch": len(self.tokens), "logits": len(self.logit_rows)}
        found: list[NDArray[Any]] = []
        for rows, wanted, own in parts:
            pairs = list(zip(kinds, own, strict=True))
            found = found or [np.empty((counts[kind], *array.shape[1:]), array.dtype) for kind, array in pairs]
            for into, (kind, array) in zip(found, pairs, strict=True):
                into[rows if kind == "batch" else wanted] = array
        return found

    def wanted(self) -> Batch:
        """Return a batch of the tokens whose logits are requested, in the order of `logit_rows`; tokens may repeat."""
        return replace(self.rows(self.logit_rows), logit_rows=np.arange(len(self.logit_rows), dtype=np.int32))

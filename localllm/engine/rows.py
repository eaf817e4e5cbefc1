"""The input and the results of a step, the batch that the executable runs, and a step in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate
from sys import exc_info
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import SlicedExecutable, TopK
from localllm.engine.media import positions_on_axes, span_ends
from localllm.engine.paging import CacheSequence
from localllm.engine.top_k import top_k_indices
from localllm.plan import Batch

F32 = NDArray[np.float32]
N = TypeVar("N", np.int32, np.float32)
Int32s = NDArray[np.int32]
Wanted = Literal["none", "last", "all"] | tuple[int, ...]  # a tuple: token indices in the step, in order

NO_LOGITS = np.empty((0, 0), np.float32)
NO_TOP_K = TopK(np.empty((0, 0), np.int32), NO_LOGITS)


class SequenceRows(NamedTuple):
    """The next tokens of a sequence in a step, and the positions whose logits are requested."""

    sequence: CacheSequence
    tokens: Sequence[int]
    wanted: Wanted = "last"
    top_k: int = 0  # number of largest logits to return per requested token; 0: all logits
    normed: bool = False  # whether to also return the hidden states of the requested tokens after the output norm
    media: F32 | None = None  # embeddings of the media tokens (n, width)


class Result(NamedTuple):
    """The logits for one `SequenceRows` with n requested tokens. Arrays are views that the next step overwrites."""

    logits: F32  # (n, vocabulary); (0, 0) if only the top-k were requested
    top_k: TopK  # top-k, (n, k) each, largest first, ties by id, NaN first; (0, 0) if not requested
    hidden: F32 = NO_LOGITS  # hidden states of all tokens (tokens, width), if the plan has a head that reads them
    normed: F32 = NO_LOGITS  # hidden states after the output norm (n, width); (0, 0) if not requested


class DraftRows(NamedTuple):
    """Tokens that a multi-token-prediction head evaluates, and the hidden states of earlier tokens.

    Head number k, from 0, reads the hidden state at position t with the token at position t + k + 1.
    """

    sequence: CacheSequence
    start: int  # position of the first hidden state, and of its entry in the head's cache layer
    tokens: Sequence[int]
    hidden: F32  # (tokens, width)
    wanted: int  # number of last tokens whose logits and hidden states are requested


@dataclass(slots=True)
class Pending:
    """A step between `submit` and `collect`. Its sequences, which contain its tokens, must not be used meanwhile."""

    rows: Sequence[SequenceRows]
    starts: Sequence[int] = ()  # length of each sequence before the step
    counts: Sequence[int] = ()
    wanted: Sequence[int] = ()  # number of requested logits per sequence
    batch: Batch | None = None
    top_k: int = 0  # number of largest logits that the device selects; 0: it returns all logits
    watching: AbstractContextManager[None] | None = None
    handle: object = None  # of an executable that runs several steps at a time
    slices: SlicedExecutable | None = None  # that runs the step between other steps

    def undo(self) -> None:
        """Remove the tokens from their sequences, and leave the observer's context manager with the current error."""
        for part, start in zip(self.rows, self.starts, strict=False):  # no starts: it has not begun
            part.sequence.truncate(start)
        if self.watching is not None:
            self.watching.__exit__(*exc_info())

    def results(self, found: F32 | TopK, states: Callable[[], F32]) -> list[Result]:
        """Return the result of every sequence, from the results of the batch. `states` returns its normed states."""
        rows, wanted = self.rows, self.wanted
        if len(rows) == 1 and not rows[0].top_k and not rows[0].normed:  # fast path for decode
            assert not isinstance(found, TopK)
            return [Result(found, NO_TOP_K)]
        spans = [slice(stop - count, stop) for stop, count in zip(accumulate(wanted), wanted, strict=True)]
        if isinstance(found, TopK):
            ids, logits = found
            return [
                Result(NO_LOGITS, TopK(ids[span, : part.top_k], logits[span, : part.top_k]))
                for part, span in zip(rows, spans, strict=True)
            ]
        normed = states() if any(part.normed for part in rows) else NO_LOGITS
        return [
            Result(
                NO_LOGITS if part.top_k else found[span],
                top_k_of(found[span], part.top_k) if part.top_k else NO_TOP_K,
                normed=normed[span] if part.normed else NO_LOGITS,
            )
            for part, span in zip(rows, spans, strict=True)
        ]


def batch_of(
    rows: Sequence[SequenceRows], starts: list[int], counts: list[int], wanted: list[int], start: int | None
) -> Batch:
    """Append `rows` to their sequences, and return them as a batch. `start` is the engine's."""
    tokens, positions, slots, logit_rows, tables = [], [], [], [], []
    end = 0
    for number, part in enumerate(rows):
        first, count = starts[number], counts[number]
        end += count
        tokens.append(np.array(part.tokens, np.int32))
        positions.append(np.arange(first, first + count, dtype=np.int32))
        if isinstance(part.wanted, tuple):
            logit_rows.append(np.array(part.wanted, np.int32) + np.int32(end - count))
        else:
            logit_rows.append(np.arange(end - wanted[number], end, dtype=np.int32))
        slots.append(part.sequence.append(part.tokens))
        if start is not None and not first:
            part.sequence.border = part.tokens.index(start)
        tables.append(part.sequence.tables())
    windowed = len(tables[0]) > 1
    return Batch(
        tokens=_joined(tokens),
        positions=_joined(positions),
        slots=_joined([one[0] for one in slots]),
        sequence=np.repeat(np.arange(len(rows), dtype=np.int32), counts) if len(rows) > 1 else np.zeros(end, np.int32),
        tables=_stacked([one[0] for one in tables]),
        logit_rows=_joined(logit_rows),
        window_slots=_joined([one[1] for one in slots]) if windowed else None,
        window_tables=_stacked([one[1] for one in tables]) if windowed else None,
        borders=np.array([part.sequence.border for part in rows], np.int32) if start is not None else None,
        histories=[part.sequence.tokens for part in rows],
    )


def with_media(batch: Batch, rows: Sequence[SequenceRows], starts: Sequence[int], axes: int, spans: bool) -> Batch:
    """Add embeddings, positions and spans of media to the batch of `rows`, for a plan with `axes`, or with `spans`."""
    sequences = [part.sequence for part in rows]
    parts = list(zip(sequences, starts, strict=True))
    given = [part.media for part in rows if part.media is not None]
    if given:
        batch.media = _joined(given)
    if axes and any(not each.media.plain for sequence in sequences for each in sequence.media):
        batch.axes = np.concatenate([positions_on_axes(s.media, start, s.length, axes) for s, start in parts])
    if spans and given:
        batch.span_ends = np.concatenate([span_ends(s.media, start, s.length) for s, start in parts])
    return batch


def draft_batch(parts: Sequence[DraftRows], axes: int = 0) -> Batch:
    """Return the tokens that a head evaluates as a batch. The plan has `axes` of rotations."""
    counts = [len(part.tokens) for part in parts]
    slots = [part.sequence.slots(part.start, part.start + len(part.tokens)) for part in parts]
    tables = [part.sequence.tables() for part in parts]
    windowed = len(tables[0]) > 1
    ends = list(accumulate(counts))
    return Batch(
        tokens=_joined([np.array(part.tokens, np.int32) for part in parts]),
        positions=_joined([np.arange(each.start, each.start + len(each.tokens), dtype=np.int32) for each in parts]),
        slots=_joined([one[0] for one in slots]),
        sequence=np.repeat(np.arange(len(parts), dtype=np.int32), counts),
        tables=_stacked([one[0] for one in tables]),
        logit_rows=_joined(
            [np.arange(end - part.wanted, end, dtype=np.int32) for end, part in zip(ends, parts, strict=True)]
        ),
        window_slots=_joined([one[1] for one in slots]) if windowed else None,
        window_tables=_stacked([one[1] for one in tables]) if windowed else None,
        axes=_draft_axes(parts, axes),
    )


def _draft_axes(parts: Sequence[DraftRows], axes: int) -> Int32s | None:
    if not axes or not any(not each.media.plain for part in parts for each in part.sequence.media):
        return None
    stops = [part.start + len(part.tokens) for part in parts]
    return np.concatenate([
        positions_on_axes(part.sequence.media, part.start, stop, axes) for part, stop in zip(parts, stops, strict=True)
    ])  # fmt: skip


def top_k_of(logits: F32, count: int) -> TopK:
    """Return the top `count` logits of each row (n, vocabulary), as `TopKExecutable.step_top_k` does."""
    ids = np.empty((len(logits), min(count, logits.shape[1])), np.int32)
    for into, row in zip(ids, logits, strict=True):
        none = np.isnan(row)
        into[:] = (np.lexsort((-row, ~none)) if none.any() else top_k_indices(row, count))[:count]
    return TopK(ids, np.take_along_axis(logits, ids, axis=1) + np.float32(0))  # adding 0 converts -0 to +0


def _joined(arrays: Sequence[NDArray[N]]) -> NDArray[N]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _stacked(tables: Sequence[Int32s]) -> Int32s:
    """Stack tables of different lengths to (sequences, blocks); padding is 0, which is never read."""
    if len(tables) == 1:
        return tables[0][None]
    stacked = np.zeros((len(tables), max(map(len, tables))), np.int32)
    for row, table in zip(stacked, tables, strict=True):
        row[: len(table)] = table
    return stacked

"""Validates arguments: limits, cache types, batches, cache blocks, replacement weights.

Kernels do no bounds checks. These checks keep an invalid argument from reading or writing other memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import BackendError, CacheTypes, Limits
from localllm.plan import BLOCK, Batch, Tensor


def check_within(numbers: NDArray[Any], limit: int) -> bool:
    if numbers.size == 1:  # fast path for decode, where microseconds per token count
        return 0 <= int(numbers.item()) < limit
    return numbers.size == 0 or (int(numbers.min()) >= 0 and int(numbers.max()) < limit)


def check_blocks(what: str, numbers: NDArray[Any], blocks: int) -> None:
    """Raise BackendError unless `numbers` (n,) is an array of valid cache block numbers."""
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or not check_within(numbers, blocks):
        raise BackendError(f"{what} must list block numbers below {blocks}")


def check_copy(source: NDArray[Any], target: NDArray[Any], blocks: int) -> None:
    check_blocks("copy_blocks: source", source, blocks)
    check_blocks("copy_blocks: target", target, blocks)
    if len(source) != len(target):
        raise BackendError(f"copy_blocks: target must list {len(source)} blocks as source does, found {len(target)}")


def check_content(content: NDArray[Any], blocks: int, size: int) -> None:
    """Raise BackendError if `content` is not uint8 (blocks, size)."""
    if content.dtype != np.uint8 or content.shape != (blocks, size):
        raise BackendError(f"write_blocks: {blocks} blocks of {size} bytes are expected, found {content.shape}")


def not_finite() -> BackendError:
    return BackendError("write_blocks: the content holds numbers that are not finite; the cache was left as it was")


def check_limits(limits: Limits) -> None:
    for field in fields(limits):
        least = 0 if field.name == "window_blocks" else 1
        if getattr(limits, field.name) < least:
            raise BackendError(f"limits: {field.name} must be at least {least}, found {getattr(limits, field.name)}")


def check_cache(cache: CacheTypes, supported: Collection[str]) -> None:
    for name in (cache.keys, cache.values):
        if name not in supported:
            raise BackendError(f"cache type {name!r} is not supported; there are: {', '.join(supported)}")


def check_replacement(weight: Tensor, bound: Mapping[str, Tensor]) -> None:
    """Raise BackendError unless a matrix with the weight's name, format and shape is bound."""
    old = bound.get(weight.name)
    if old is None or (old.format, tuple(old.shape)) != (weight.format, tuple(weight.shape)):
        found = f"{old.format} {tuple(old.shape)}" if old is not None else "no such matrix"
        raise BackendError(
            f"{weight.name}: {weight.format} {tuple(weight.shape)} cannot take its place; {found} is bound"
        )


def check_batch(batch: Batch, limits: Limits, vocabulary: int, window: int = 0, media: bool = False) -> None:
    """Raise BackendError if a row would access cache rows of other sequences.

    `window` is the plan's largest sliding window. `media`: the plan takes media tokens, whose ids are negative.
    """
    rows = len(batch.tokens)
    if rows == 1 and not (window and limits.window_blocks) and _is_one_row(batch, limits, vocabulary):
        return
    for name, array, limit in (
        ("tokens", batch.tokens, vocabulary),
        ("positions", batch.positions, limits.positions),
        ("sequence", batch.sequence, len(batch.tables)),
        ("logit_rows", batch.logit_rows, rows),
    ):
        if array.ndim != 1 or (name != "logit_rows" and len(array) != rows):
            raise BackendError(f"batch: {name} must be a vector of one number per row, found shape {array.shape}")
        if name == "tokens" and media and array.ndim == 1:
            array = array[array >= 0]
        if not check_within(array, limit):
            raise BackendError(f"batch: {name} must be from 0 to {limit - 1}, found {array.min()} to {array.max()}")
    if not 1 <= rows <= limits.rows:
        raise BackendError(f"batch: {rows} rows, bound for 1 to {limits.rows}")
    if len(batch.logit_rows) > limits.logit_rows:
        raise BackendError(f"batch: {len(batch.logit_rows)} rows of logits, bound for {limits.logit_rows}")
    _check_places("", batch.slots, batch.tables, batch, limits.blocks)
    if limits.window_blocks and window:
        if batch.window_slots is None or batch.window_tables is None:
            raise BackendError("batch: window_slots and window_tables are missing; some layers have separate blocks")
        if len(batch.window_tables) != len(batch.tables):
            raise BackendError(f"batch: window_tables must have {len(batch.tables)} rows, as tables has")
        _check_places("window ", batch.window_slots, batch.window_tables, batch, limits.window_blocks, window)
    if rows == 1:
        return  # decode: the remaining checks compare rows of a longer batch
    same = batch.sequence[1:] == batch.sequence[:-1]
    runs = rows - np.count_nonzero(same)  # number of runs; np.unique would import numpy.ma, which takes 30 ms
    if 1 + np.count_nonzero(np.diff(np.sort(batch.sequence))) != runs or (np.diff(batch.positions)[same] <= 0).any():
        raise BackendError("batch: rows of one sequence must stand together, in order of position")


def _is_one_row(batch: Batch, limits: Limits, vocabulary: int) -> bool:
    """Return whether the batch is a single valid row.

    This avoids the general checks, which take five microseconds more.
    """
    tables, wanted = batch.tables, batch.logit_rows
    if (
        tables.ndim != 2
        or not batch.tokens.shape == batch.positions.shape == batch.sequence.shape == batch.slots.shape == (1,)
    ):
        return False
    position, sequence = batch.positions.item(), batch.sequence.item()
    column, offset = divmod(position, BLOCK)
    return (
        0 <= batch.tokens.item() < vocabulary
        and 0 <= position < limits.positions
        and 0 <= sequence < len(tables)
        and (wanted.shape == (0,) or (wanted.shape == (1,) and wanted.item() == 0))
        and column < tables.shape[1]
        and check_within(tables[sequence, : column + 1], limits.blocks)
        and tables.item(sequence, column) * BLOCK + offset == batch.slots.item()
    )


def check_media(batch: Batch, width: int) -> None:
    """Raise BackendError unless the batch has a row of embeddings of this width for every media token."""
    count = int(np.count_nonzero(batch.tokens < 0))
    shape = (0, width) if batch.media is None else batch.media.shape
    if shape != (count, width):
        raise BackendError(f"batch: {count} media tokens need embeddings of shape {(count, width)}, found {shape}")


def check_texts(batch: Batch) -> None:
    """Raise BackendError unless every encoder text is complete and none of its rows requests logits."""
    borders = batch.borders
    if borders is None or len(borders) != len(batch.tables):
        raise BackendError("batch: borders must hold the length of every sequence's text")
    if not check_within(batch.sequence, len(borders)):
        raise BackendError(f"batch: sequence must be from 0 to {len(borders) - 1}")
    if (borders[batch.sequence] < 1).any():
        raise BackendError("batch: borders must be at least 1, because an answer sees a text")
    of_text = batch.positions < borders[batch.sequence]
    if not of_text.any():
        return
    counts = np.bincount(batch.sequence[of_text], minlength=len(borders))
    if ((counts != 0) & (counts != borders)).any():
        raise BackendError("batch: a text comes in one batch, because its rows see later ones")
    if not check_within(batch.logit_rows, len(of_text)) or of_text[batch.logit_rows].any():
        raise BackendError("batch: logit_rows must be of rows after the text, which has no logits")


def check_spans(batch: Batch) -> None:
    """Raise BackendError unless every row's span ends in the batch, at its own position or later, and no spans overlap.

    The batch must have passed `check_batch`.
    """
    ends, positions, sequence = batch.span_ends, batch.positions, batch.sequence
    if ends is None:
        return
    if ends.shape != positions.shape:
        raise BackendError(f"batch: span_ends must be a vector of one position per row, found shape {ends.shape}")
    same = sequence[1:] == sequence[:-1]
    last = np.append(~same, True)
    runs = np.diff(np.flatnonzero(last), prepend=-1)
    if (ends < positions).any() or (ends > np.repeat(positions[last], runs)).any() or (np.diff(ends)[same] < 0).any():
        raise BackendError("batch: span_ends must be positions from the row's own to its sequence's last, in order")


def check_axes(axes: NDArray[Any], rows: int, needed: int, limits: Limits) -> None:
    """Raise BackendError unless `axes` has at least `needed` valid positions for every row."""
    if axes.ndim != 2 or axes.dtype.kind not in "iu" or len(axes) != rows or axes.shape[1] < needed:
        raise BackendError(f"batch: axes must hold {needed} positions for each of {rows} rows, found {axes.shape}")
    if not check_within(axes.reshape(-1), limits.positions):
        raise BackendError(f"batch: axes must be from 0 to {limits.positions - 1}, found {axes.min()} to {axes.max()}")


def check_histories(batch: Batch) -> None:
    """Raise BackendError unless the batch has the token history of every sequence.

    The batch must have passed `check_batch`.
    """
    histories = batch.histories
    if histories is None or len(histories) != len(batch.tables):
        raise BackendError("batch: histories must hold the tokens of every sequence, which operations read")
    last = np.append(batch.sequence[1:] != batch.sequence[:-1], True)
    for row in np.flatnonzero(last).tolist():
        position, history = int(batch.positions[row]), histories[batch.sequence[row]]
        if position >= len(history) or history[position] != batch.tokens[row]:
            raise BackendError(f"batch: histories must hold token {batch.tokens[row]} at position {position}")


def _check_places(
    which: str, slots: NDArray[Any], tables: NDArray[Any], batch: Batch, blocks: int, window: int = 0
) -> None:
    """Check slots and block tables against each other and against the number of blocks.

    `window` 0 means no sliding window.
    """
    rows = len(batch.tokens)
    if slots.shape != (rows,):
        raise BackendError(f"batch: {which}slots must be a vector of one number per row, found shape {slots.shape}")
    if not check_within(slots, blocks * BLOCK):
        raise BackendError(
            f"batch: {which}slots must be from 0 to {blocks * BLOCK - 1}, found {slots.min()} to {slots.max()}"
        )
    last = int(batch.positions.max()) if rows > 1 else int(batch.positions.item())
    if last // BLOCK >= tables.shape[1]:
        raise BackendError(f"batch: position {last} is past its {which}table of {tables.shape[1]} blocks")
    own, seen = set(), set()
    for sequence, position, slot in zip(batch.sequence.tolist(), batch.positions.tolist(), slots.tolist(), strict=True):
        column = position // BLOCK
        seen.add((sequence, max(position + 1 - window, 0) // BLOCK if window else 0, column))
        if int(tables[sequence, column]) * BLOCK + position % BLOCK == slot:
            own.add(slot)
    if not all(check_within(tables[s, a : b + 1], blocks) for s, a, b in seen):
        raise BackendError(f"batch: a {which}table names a block outside 0 to {blocks - 1}")
    if len(own) != rows:
        raise BackendError(
            f"batch: every row needs a separate {which}slot: the one that its table gives for its position"
        )

"""Attention operations of the reference backend: KV cache, indexer selection and attention."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from localllm.backends import cache
from localllm.backends.reference_state import ReferenceState
from localllm.plan import BLOCK, Append, Attention, IndexerTopK, rows_of_block

Seen = NDArray[np.intp]
Stored = NDArray[np.uint8]


def append(state: ReferenceState, op: Append) -> None:
    for caches, value, type_ in (
        (state.cache_keys, op.k, state.key_type), (state.cache_values, op.v, state.value_type),
    ):  # fmt: skip
        if value is not None:
            rows, stored, every = state.values[value.index], caches[op.layer], state.every[op.layer]
            ends = (state.batch.positions + 1) % every == 0
            slots = _slots_of(state.slots(op.layer)[ends], every)
            heads = stored.shape[1]
            if len(slots):  # a step may complete no pool
                stored[slots] = cache.store(rows[ends].reshape(len(slots), heads, rows.shape[1] // heads), type_)


def _slots_of(slots: Seen, every: int) -> Seen:
    """Return the cache rows for these slots in a layer that stores one row per `every` positions."""
    per = rows_of_block(every)
    return slots // BLOCK * per + slots % BLOCK // every % per


def indexer_top_k(state: ReferenceState, op: IndexerTopK) -> None:
    batch, head_dim, every = state.rows(op.q), op.q.width // op.heads, op.block if op.pooled else 1
    q = cache.query(state.values[op.q.index].reshape(-1, op.heads, head_dim), state.key_type)  # (T, heads, D)
    weights = None if op.weights is None else state.read(op.weights)
    out = np.zeros((len(q), op.groups, 1 + op.most))
    for row, own in enumerate(batch.positions):
        stored, _ = _rows(state, op.layer, batch.sequence[row], np.arange(every - 1, own + 1, every))
        if own < op.most:  # otherwise all visible positions are selected
            out[row, :, 0], out[row, :, 1 : 2 + own] = own + 1, np.arange(own + 1)
            continue
        keys = cache.load_rows(stored, head_dim, state.key_type)[:, 0]  # (positions or pools, D)
        scores = (q[row][:, None] * keys).sum(axis=2)  # (heads, P); unlike a BLAS product, equal keys get equal scores
        if weights is not None:
            scores = (weights[row][:, None] * np.maximum(scores, 0.0)).sum(axis=0, keepdims=True)
        for group, of_group in enumerate(scores):
            chosen = _chosen(of_group, op, own + 1)
            out[row, group, 0], out[row, group, 1 : 1 + len(chosen)] = len(chosen), chosen
    state.write(op.out, out.reshape(len(q), -1))


def _chosen(scores: NDArray[np.float64], op: IndexerTopK, seen: int) -> Seen:
    """Return the selected positions in order. `scores` covers all positions or pools that the row attends to."""
    if op.pooled:
        chosen = np.sort(np.argsort(-scores, kind="stable")[: op.count])
        positions = (chosen[:, None] * op.block + np.arange(op.block)).reshape(-1)
        return np.concatenate([positions, np.arange(len(scores) * op.block, seen)])
    blocks = -(-len(scores) // op.block)
    best = np.full(blocks * op.block, -np.inf)
    best[: len(scores)] = scores
    best = best.reshape(blocks, op.block).max(axis=1)
    best[max(0, blocks - op.local) :] = np.inf
    chosen = np.sort(np.argsort(-best, kind="stable")[: op.count])  # of equal scores, the earlier block wins
    positions = (chosen[:, None] * op.block + np.arange(op.block)).reshape(-1)
    return positions[positions < len(scores)]


def attention(state: ReferenceState, op: Attention) -> None:
    batch, head_dim, value_dim = state.rows(op.q), op.q.width // op.heads, op.out.width // op.heads
    kv_heads = state.cache_keys[op.layer].shape[1]
    heads = state.values[op.q.index].reshape(-1, kv_heads, op.heads // kv_heads, head_dim)
    q = cache.query(heads, state.key_type)  # (T, kv_heads, heads per KV head, D)
    out = np.empty((len(q), kv_heads, op.heads // kv_heads, value_dim))
    sinks = np.full((kv_heads, 1, 1), -np.inf)
    if op.sinks is not None:
        sinks = state.weight(op.sinks).reshape(kv_heads, -1, 1)
    slopes = None if op.slopes is None else state.weight(op.slopes).reshape(kv_heads, -1, 1)
    distances = None if op.distances is None else state.weight(op.distances).reshape(kv_heads, -1, 2 * op.reach + 1)
    ends = batch.positions if op.causal else batch.ends()
    if op.spans and batch.span_ends is not None:
        ends = batch.span_ends
    for row in range(len(q)):
        own = batch.positions[row]
        # a slice of KV heads, and the positions (P,) that these heads attend to
        for part, seen in _seen(state, op, row, own, ends[row], kv_heads):
            found = [_rows(state, op.layer, batch.sequence[row], seen)]
            if op.pools is not None:
                found.append(_rows(state, op.pools, batch.sequence[row], _pools(state, op, row, own)))
            keys, values = (np.concatenate(rows)[:, part] for rows in zip(*found, strict=True))
            keys = cache.load_rows(keys, head_dim, state.key_type)  # (P, heads, D)
            values = cache.load_rows(values, value_dim, state.value_type)
            scores = q[row, part] @ keys.transpose(1, 2, 0) * op.scale
            if op.softcap:
                scores = op.softcap * np.tanh(scores / op.softcap)
            if slopes is not None:
                scores = scores - slopes * abs(own - seen)
            if distances is not None:
                scores = scores + distances[:, :, np.clip(seen - own, -op.reach, op.reach) + op.reach]
            highest = np.maximum(scores.max(axis=2, keepdims=True), sinks[part])
            weights = np.exp(scores - highest)
            total = weights.sum(axis=2, keepdims=True) + np.exp(sinks[part] - highest)
            mixed = weights @ values.transpose(1, 0, 2) / total
            out[row, part] = cache.rotate_heads(mixed, value_dim) if state.value_type.rotated else mixed
    state.write(op.out, out.reshape(len(q), -1))


def _seen(
    state: ReferenceState, op: Attention, row: int, own: int, last: int, kv_heads: int
) -> Iterator[tuple[slice, Seen]]:
    """Yield slices of KV heads, each with the positions that its heads attend to."""
    if op.selection is not None and op.pools is None:
        each = kv_heads // op.slices
        for number, of_slice in enumerate(state.values[op.selection.index][row].reshape(op.slices, -1).astype(np.intp)):
            yield slice(number * each, (number + 1) * each), of_slice[1 : 1 + of_slice[0]]
        return
    first = 0
    if op.window and not op.causal:
        first, last = max(0, own - op.window // 2), min(last, own + op.window // 2)
    elif op.after:
        first = state.rows(op.q).ends()[row] + 1
    elif op.window:
        first = own // op.window * op.window if op.chunked else max(0, own + 1 - op.window)
    yield slice(None), np.arange(first, last + 1)


def _rows(state: ReferenceState, layer: int, sequence: int, positions: Seen) -> tuple[Stored, Stored]:
    """Return the stored keys and values (P, kv_heads, bytes) at the given positions."""
    slots = state.tables(layer)[sequence, positions // BLOCK] * BLOCK + positions % BLOCK
    slots = _slots_of(slots, state.every[layer])
    return state.cache_keys[layer][slots], state.cache_values[layer][slots]


def _pools(state: ReferenceState, op: Attention, row: int, own: int) -> Seen:
    """Return the last position of each pool that a row attends to."""
    assert op.pools is not None
    every = state.every[op.pools]
    if op.selection is None:
        return np.arange(every - 1, own + 1, every)
    listed: Seen = state.values[op.selection.index][row].astype(np.intp)
    listed = listed[1 : 1 + listed[0]]
    pools: Seen = listed[(listed + 1) % every == 0]
    return pools

"""Reference implementations of recurrent layers in plain NumPy. All backends must match them.

Sums run in float64 and are rounded once, as in `reference_operations`. Stores hold float32.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from localllm.backends.reference_state import ReferenceState
from localllm.plan import BLOCK, F32, Convolve, LinearAttention, Pool, SelectiveScan, StateLayer, Wkv

F64 = NDArray[np.float64]


def convolve(state: ReferenceState, op: Convolve) -> None:
    rows = state.values[op.x.index]
    stored = _rows_of(state.stores[op.layer], op.x.width)
    batch, slots, tables = state.batch, state.slots(op.layer), state.tables(op.layer)
    stored.reshape(-1, op.x.width)[slots] = rows
    weight = state.weight(op.weight)  # (width, K)
    out = np.zeros((len(rows), op.out.width)) if op.bias is None else np.tile(state.weight(op.bias), (len(rows), 1))
    for row, position in enumerate(batch.positions):
        for j in range(weight.shape[1]):
            at = position - weight.shape[1] + 1 + j
            if at >= 0:
                block = tables[batch.sequence[row], at // BLOCK]
                out[row] += weight[:, j] * stored[block, at % BLOCK].astype(np.float64)
    state.write(op.out, out)


def pool(state: ReferenceState, op: Pool) -> None:
    batch, tables, width, size = state.batch, state.tables(op.layer), op.out.width, op.size
    rows = np.concatenate([state.values[op.x.index], state.values[op.scores.index]], axis=1)
    stored, bias = _rows_of(state.stores[op.layer], 2 * op.x.width), state.weight(op.bias)
    stored.reshape(-1, 2 * op.x.width)[state.slots(op.layer)] = rows
    out = np.zeros((len(rows), width))
    for row, position in enumerate(batch.positions):
        if (position + 1) % size:
            continue
        values, scores = [], []
        for part in range(op.parts):
            at = np.arange(size) + (position + 1 - size * (op.parts - part))
            if at[0] >= 0:
                found = stored[tables[batch.sequence[row], at // BLOCK], at % BLOCK].astype(np.float64)
                own = slice(part * width, (part + 1) * width)
                values.append(found[:, : op.x.width][:, own])
                scores.append((found[:, op.x.width :] + bias)[:, own])
        weights = np.concatenate(scores)
        weights = np.exp(weights - weights.max(axis=0))
        out[row] = (weights * np.concatenate(values)).sum(axis=0) / weights.sum(axis=0)
    state.write(op.out, out)


class Block(NamedTuple):
    """Views of one block of a `StateLayer`."""

    keys: F32  # (BLOCK, key_heads, key_dim)
    updates: F32  # (BLOCK, heads, value_dim)
    decays: F32  # (BLOCK, heads, 1 or key_dim): rate times step size of every row
    state: F32  # (heads, key_dim, value_dim)


def _block(numbers: F32, of: StateLayer) -> Block:
    of_rows = (of.key_heads * of.key_dim, of.heads * of.value_dim, of.heads * (of.key_dim if of.channels else 1))
    ends = np.cumsum([*(BLOCK * width for width in of_rows), of.state])
    keys, updates, decays, state = np.split(numbers, ends[:-1])
    return Block(
        keys.reshape(BLOCK, of.key_heads, of.key_dim),
        updates.reshape(BLOCK, of.heads, of.value_dim),
        decays.reshape(BLOCK, of.heads, -1),
        state.reshape(of.heads, of.key_dim, of.value_dim),
    )


def linear_attention(state: ReferenceState, op: LinearAttention) -> None:
    of, batch, tables = op.store, state.batch, state.tables(op.layer)
    q, k = (state.read(x).reshape(-1, of.key_heads, of.key_dim) for x in (op.q, op.k))
    v, ones = state.read(op.v).reshape(-1, of.heads, of.value_dim), np.ones((len(batch.positions), of.heads))
    strength, step = (ones if x is None else state.read(x) for x in (op.strength, op.step))
    decay = step.reshape(len(ones), of.heads, -1) * state.weight(op.rate).reshape(-1, 1)  # (T, heads, 1 or key_dim)
    number = np.arange(of.heads)  # index of the key head that each head uses
    number = number % of.key_heads if op.tiled else number // (of.heads // of.key_heads)
    out = np.empty_like(v)
    for row, position in enumerate(batch.positions):
        table, at = tables[batch.sequence[row]], position % BLOCK
        block = _block(state.stores[op.layer][table[position // BLOCK]], of)
        if at == 0:
            before = _block(state.stores[op.layer][table[position // BLOCK - 1]], of) if position else None
            block.state[:] = 0.0 if before is None else _advanced(before, number)
        block.keys[at] = k[row]
        block.decays[at] = decay[row]
        grown, shrunk = _faded(block.decays[: at + 1])  # (heads, 1 or key_dim), (rows, heads, 1 or key_dim)
        start = block.state.astype(np.float64)  # (heads, key_dim, value_dim)
        keys = block.keys[: at + 1, number].astype(np.float64)  # (rows, heads, key_dim)
        own, query = keys[-1], q[row, number]
        update = v[row].copy()
        if op.delta:
            seen = (shrunk[:-1] * keys[:-1] * own).sum(axis=2)
            update -= np.einsum("hkv,hk->hv", start, grown * own)
            update -= np.einsum("th,thv->hv", seen, block.updates[:at].astype(np.float64))
        block.updates[at] = strength[row][:, None] * update
        seen = (shrunk * keys * query).sum(axis=2)
        out[row] = np.einsum("hkv,hk->hv", start, grown * query)
        out[row] += np.einsum("th,thv->hv", seen, block.updates[: at + 1].astype(np.float64))
        if op.skip is not None:
            out[row] += state.weight(op.skip).reshape(-1, 1) * v[row]
    state.write(op.out, out.reshape(len(out), -1))


def _advanced(block: Block, key_heads: NDArray[np.intp]) -> F64:
    """Return the state (heads, key_dim, value_dim) after a full block of rows."""
    grown, shrunk = _faded(block.decays)
    keys = block.keys[:, key_heads].astype(np.float64) * shrunk
    added = np.einsum("thk,thv->hkv", keys, block.updates.astype(np.float64))
    return np.asarray(grown[:, :, None] * block.state + added)


def _faded(decays: F32) -> tuple[F64, F64]:
    """Return the decay from the block's start to the last row, and from each row to the last row (rows, ...)."""
    later = np.cumsum(decays[::-1].astype(np.float64), axis=0)[::-1]  # suffix sums: each row and all later rows
    return np.exp(later[0]), np.exp(np.concatenate([later[1:], np.zeros_like(later[:1])]))


def selective_scan(state: ReferenceState, op: SelectiveScan) -> None:
    of, batch, tables = op.store, state.batch, state.tables(op.layer)
    x, dt, b, c = (state.read(value) for value in (op.x, op.dt, op.b, op.c))
    a, d = state.weight(op.a).T, state.weight(op.d)  # (state_dim, width), (width,)
    out, size = np.empty_like(x), of.state_dim * of.width
    for row, position in enumerate(batch.positions):
        table, at = tables[batch.sequence[row]], position % BLOCK
        numbers = state.stores[op.layer][table[position // BLOCK]]
        rows, (start, newest, tag) = (
            numbers[: BLOCK * of.row].reshape(BLOCK, -1),
            np.split(numbers[BLOCK * of.row :], [size, 2 * size]),
        )
        if at == 0:
            before = state.stores[op.layer][table[position // BLOCK - 1]][BLOCK * of.row :]
            start[:] = before[size : 2 * size] if position else 0.0
        rows[at] = np.concatenate([x[row], dt[row], b[row]])
        follows = at > 0 and tag[0] == at - 1
        h = (newest if follows else start).reshape(of.state_dim, of.width).astype(np.float64)
        for i in range(at if follows else 0, at + 1):
            inputs, steps, gains = np.split(rows[i].astype(np.float64), [of.width, 2 * of.width])
            h = (np.exp(steps * a) * h + (steps * inputs) * gains[:, None]).astype(np.float32).astype(np.float64)
        newest[:], tag[:] = h.reshape(-1), at
        out[row] = c[row] @ h + d * x[row]
    state.write(op.out, out)


def wkv(state: ReferenceState, op: Wkv) -> None:
    of, batch, tables = op.store, state.batch, state.tables(op.layer)
    size, shape = of.key_dim * of.value_dim, (of.heads, of.key_dim, of.value_dim)
    stored = np.concatenate([state.values[value.index] for value in op.stored], axis=1)
    q = state.read(op.q).reshape(-1, of.heads, of.key_dim)
    out, parts = np.empty((len(q), of.heads, of.value_dim)), np.cumsum([value.width for value in op.stored])[:-1]
    for row, position in enumerate(batch.positions):
        table, at = tables[batch.sequence[row]], position % BLOCK
        numbers = state.stores[op.layer][table[position // BLOCK]]
        rows, states = numbers[: BLOCK * of.row].reshape(BLOCK, -1), numbers[BLOCK * of.row :].reshape(of.heads, -1)
        start, newest, tag = np.split(states, [size, 2 * size], axis=1)
        if at == 0:
            before = state.stores[op.layer][table[position // BLOCK - 1]][BLOCK * of.row :].reshape(of.heads, -1)
            start[:] = before[:, size : 2 * size] if position else 0.0
        rows[at] = stored[row]
        follows = at > 0 and tag[0, 0] == at - 1
        s = read = (newest if follows else start).reshape(shape).astype(np.float64)
        for i in range(at if follows else 0, at + 1):
            v, *keys = (part.reshape(of.heads, -1) for part in np.split(rows[i].astype(np.float64), parts))
            read = s
            s = keys[1][:, :, None] * s + keys[0][:, :, None] * v[:, None]
            if of.erases:
                s -= keys[3][:, :, None] * np.einsum("hkv,hk->hv", read, keys[2])[:, None]
            s = s.astype(np.float32).astype(np.float64)
        newest[:], tag[:] = s.reshape(of.heads, -1), at
        out[row] = np.einsum("hkv,hk->hv", read if op.before else s, q[row])
    state.write(op.out, out.reshape(len(out), -1))


def _rows_of(store: F32, width: int) -> F32:
    """Return the rows of a store as float32 (blocks, BLOCK, width)."""
    return store.reshape(-1, BLOCK, width)

"""The WKV scan of RWKV-6 and RWKV-7, as `plan.Wkv` defines it.

A task is a head of one sequence of the batch, and processes the rows in order of position. The lanes are neighbouring
values. Every value has one chain of operations, as in `recurrence`.
"""

from __future__ import annotations

from localllm.backends.cpu.arguments import Address, Output, Rows, Struct, Target
from localllm.backends.cpu.kernels.common import PlanKernel, Step, f32x16, kernel, own_rows, tasks
from localllm.backends.cpu.simd import F32, LANES, Function, Value
from localllm.backends.cpu.stores import matrix_states, whole_strips
from localllm.plan import BLOCK, WkvLayer

TILE = 4  # vectors of a state row that are computed together


class WkvArguments(Struct):
    step: Address
    q: Rows
    k: Rows
    v: Rows
    decay: Rows
    probe: Rows  # like `erase`, not read if nothing is erased
    erase: Rows
    y: Output
    rows: Target
    states: Target  # (blocks, heads), in the layout of `matrix_states`
    counter: Address


def append_matrices(of: WkvLayer) -> PlanKernel[WkvArguments]:
    """Write a row's values to the store, from which the scan reads them, even again after a truncation."""

    def body(f: Function, a: WkvArguments, thread: Value, threads: Value) -> None:
        step, keys = Step.at(a.step), of.heads * of.key_dim
        with own_rows(f, step.rows, thread, threads) as row:
            to = a.rows + f.load_i32(step.slots, row) * matrix_states(of).row
            offset = 0
            sources = [(a.v, of.heads * of.value_dim), (a.k, keys), (a.decay, keys)]
            for rows, size in sources + ([(a.probe, keys), (a.erase, keys)] if of.erases else []):
                source = rows.row(row)
                with f.loop(0, 4 * whole_strips(size), 64) as i:
                    f.store(to + (i + offset), f.load(source + i, f32x16))
                offset += 4 * whole_strips(size)

    return kernel(f"append_matrices_{_name(of)}", WkvArguments, body)


def wkv(of: WkvLayer, before: bool) -> PlanKernel[WkvArguments]:
    """Emit `plan.Wkv`."""
    at, line = matrix_states(of), 4 * whole_strips(of.value_dim)
    vectors = whole_strips(of.value_dim) // LANES
    tiles = [range(first, min(first + TILE, vectors)) for first in range(0, vectors, TILE)]

    def body(f: Function, a: WkvArguments, thread: Value, threads: Value) -> None:
        step = Step.at(a.step)
        with tasks(f, a.counter, step.runs * of.heads, thread, threads) as task:
            head, run = task % of.heads, task // of.heads
            first, last = f.load_i32(step.run_starts, run), f.load_i32(step.run_starts, run + 1)
            table = step.tables + f.load_i32(step.sequence, first) * step.table_stride
            values_at = head * (4 * of.value_dim)
            keys_at = head * (4 * of.key_dim) + 4 * whole_strips(of.heads * of.value_dim)
            part = 4 * whole_strips(of.heads * of.key_dim)

            def follow(row: Value, state: Value, query: Value | None, y: Value | None) -> None:
                """Apply the stored row to the state. With a query, also write the output."""
                keys = row + keys_at
                for tile in tiles:
                    places = [64 * n for n in tile]
                    values = [f.load(row + (values_at + place), f32x16) for place in places]
                    known = [f.var(f.zeros(f32x16)) for _ in places]
                    if of.erases:
                        with f.loop(0, of.key_dim) as d:
                            probe = f.broadcast(keys + (d * 4 + 2 * part), F32)
                            for place, total in zip(places, known, strict=True):
                                total.set(f.fma(f.load(state + (d * line + place), f32x16), probe, total.get()))
                    seen = [f.var(f.zeros(f32x16)) for _ in places]
                    with f.loop(0, of.key_dim) as d:
                        key, decay = (f.broadcast(keys + (d * 4 + n * part), F32) for n in (0, 1))
                        erase = f.zeros(f32x16) - f.broadcast(keys + (d * 4 + 3 * part), F32) if of.erases else None
                        wanted = None if query is None else f.broadcast(query + d * 4, F32)
                        for place, value, lost, total in zip(places, values, known, seen, strict=True):
                            old = f.load(state + (d * line + place), f32x16)
                            new = old * decay
                            if erase is not None:
                                new = f.fma(lost.get(), erase, new)
                            new = f.fma(value, key, new)
                            f.store(state + (d * line + place), new)
                            if wanted is not None:
                                total.set(f.fma(old if before else new, wanted, total.get()))
                    for n, total in zip(tile, seen, strict=True):
                        if y is not None:
                            f.store_lanes(y + 64 * n, total.get(), min(LANES, of.value_dim - LANES * n))

            def copy(source: Value, target: Value) -> None:
                with f.loop(0, of.key_dim * line, 64) as i:
                    f.store(target + i, f.load(source + i, f32x16))

            with f.loop(first, last) as row:
                position = f.load_i32(step.positions, row)
                offset, column = position % BLOCK, position // BLOCK
                block = f.load_i32(table, column)
                rows, states = a.rows + block * (BLOCK * at.row), _own(of, a.states, block, head)
                start, newest, tag = states + at.before, states + at.after, states + at.newest
                with f.when(offset.equals(0)):
                    with f.when(position.equals(0)), f.loop(0, of.key_dim * line, 64) as i:
                        f.store(start + i, f.zeros(f32x16))
                    with f.when(position.differs(0)):
                        copy(_own(of, a.states, f.load_i32(table, column - 1), head) + at.after, start)
                follows = (offset > 0) & f.load(tag, F32).equals(f.to_float(offset - 1))
                with f.when(follows.equals(0)):
                    copy(start, newest)
                    with f.loop(0, offset) as i:
                        follow(rows + i * at.row, newest, None, None)
                query = a.q.row(row) + head * (4 * of.key_dim)
                follow(rows + offset * at.row, newest, query, a.y.row(row) + values_at)
                with f.loop(0, line, 64) as i:
                    f.store(tag + i, f.splat(f.to_float(offset)))

    return kernel(f"wkv_{_name(of)}{'_before' * before}", WkvArguments, body)


def _own(of: WkvLayer, states: Value, block: Value, head: Value) -> Value:
    return states + (block * of.heads + head) * matrix_states(of).size


def _name(of: WkvLayer) -> str:
    return f"{of.heads}_{of.key_dim}_{of.value_dim}{'_erases' * of.erases}"

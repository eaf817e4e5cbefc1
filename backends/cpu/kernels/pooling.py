"""Pools of neighbouring rows, as `plan.Pool` defines them. Rows are appended to the store, then read from it.

The lanes are columns. Each column processes the rows in order of position, first for the largest score, then for the
sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from localllm.backends.cpu.arguments import Address, Int64, Output, Rows, Struct, Target
from localllm.backends.cpu.kernels.common import PlanKernel, Step, exp, f32x16, kernel, own_rows
from localllm.backends.cpu.simd import LANES, Function, Value
from localllm.backends.cpu.stores import whole_strips
from localllm.plan import BLOCK

_LOWEST = -3.0e38  # initial maximum of scores


class AppendPooledArguments(Struct):
    step: Address
    x: Rows
    scores: Rows
    store: Target  # (slots, x and scores)


class PoolArguments(Struct):
    step: Address
    y: Output
    bias: Address  # float32 (size, columns of x)
    store: Address
    count: Int64  # rows per pool


def append_pooled(width: int) -> PlanKernel[AppendPooledArguments]:
    """Write x and the scores of every row, `width` columns each."""
    row_bytes = 4 * whole_strips(2 * width)

    def body(f: Function, a: AppendPooledArguments, thread: Value, threads: Value) -> None:
        step = Step.at(a.step)
        with own_rows(f, step.rows, thread, threads) as row:
            to = a.store + f.load_i32(step.slots, row) * row_bytes
            for number, source in enumerate((a.x, a.scores)):
                with f.loop(0, width // LANES * LANES, LANES) as i:
                    f.store(to + (i * 4 + 4 * width * number), f.load(source.row(row) + i * 4, f32x16))
                if width % LANES:
                    last = 4 * (width // LANES * LANES)
                    rest = f.load(source.row(row) + last, f32x16)
                    f.store_lanes(to + (last + 4 * width * number), rest, width % LANES)

    return kernel(f"append_pooled_{width}", AppendPooledArguments, body)


def pool(width: int, parts: int) -> PlanKernel[PoolArguments]:
    """Emit rows of `width` columns, each over `parts` pools."""
    stored = parts * width  # columns of x
    row_bytes = 4 * whole_strips(2 * stored)

    def body(f: Function, a: PoolArguments, thread: Value, threads: Value) -> None:
        step, size, store, bias = Step.at(a.step), a.count, a.store, a.bias
        with own_rows(f, step.rows, thread, threads) as row:
            position, y = f.load_i32(step.positions, row), a.y.row(row)
            table = step.tables + f.load_i32(step.sequence, row) * step.table_stride
            ends = ((position + 1) % size).equals(0)
            with f.when(ends.equals(0)), f.loop(0, whole_strips(width), LANES) as i:
                f.store(y + i * 4, f.zeros(f32x16))

            @contextmanager
            def rows(part: int, column: Value) -> Iterator[tuple[Value, Value]]:
                """Loop over the existing rows of a pool. Yield each row's columns of x, and its scores."""
                first = position + 1 - size * (parts - part)
                with f.when(first >= 0), f.loop(0, size) as number:
                    at = first + number
                    slot = f.load_i32(table, at // BLOCK) * BLOCK + at % BLOCK
                    x = store + slot * row_bytes + (column * 4 + 4 * width * part)
                    own = bias + number * (4 * stored) + (column * 4 + 4 * width * part)
                    yield f.load(x, f32x16), f.load(x + 4 * stored, f32x16) + f.load(own, f32x16)

            with f.when(ends), f.loop(0, whole_strips(width), LANES) as i:
                largest = f.var(f.constant(f32x16, _LOWEST))
                for part in range(parts):
                    with rows(part, i) as (_, score):
                        largest.set(f.fmax(largest.get(), score))
                total, sums = f.var(f.zeros(f32x16)), f.var(f.zeros(f32x16))
                for part in range(parts):
                    with rows(part, i) as (x, score):
                        weight = exp(f, score - largest.get())
                        total.set(total.get() + weight)
                        sums.set(f.fma(weight, x, sums.get()))
                f.store(y + i * 4, sums.get() / total.get())

    return kernel(f"pool_{width}_{parts}", PoolArguments, body)

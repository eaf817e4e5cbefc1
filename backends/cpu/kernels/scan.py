"""Selective scans, as `plan.SelectiveScan` defines them. A task is 16 channels of a sequence, in order of position."""

from __future__ import annotations

from localllm.backends.cpu.arguments import Address, Output, Rows, Struct, Target
from localllm.backends.cpu.kernels.common import PlanKernel, Step, exp, f32x16, kernel, own_rows, tasks
from localllm.backends.cpu.simd import F32, LANES, Function, Value
from localllm.backends.cpu.stores import scan_states, whole_strips
from localllm.plan import BLOCK, ScanLayer


class ScanArguments(Struct):
    step: Address
    x: Rows
    dt: Rows
    b: Rows
    c: Rows
    y: Output
    a: Address  # float32 (state_dim, width), rows padded to whole vectors
    d: Address  # float32 (width,)
    rows: Target
    states: Target
    counter: Address


def append_scanned(of: ScanLayer) -> PlanKernel[ScanArguments]:
    """Write the inputs, step sizes and B of every row. After a truncation the scan reads them again."""
    row_bytes, width = scan_states(of.width, of.state_dim).row, 4 * whole_strips(of.width)

    def body(f: Function, a: ScanArguments, thread: Value, threads: Value) -> None:
        step = Step.at(a.step)
        with own_rows(f, step.rows, thread, threads) as row:
            to = a.rows + f.load_i32(step.slots, row) * row_bytes
            for rows, offset, size in ((a.x, 0, of.width), (a.dt, width, of.width), (a.b, 2 * width, of.state_dim)):
                source = rows.row(row)
                with f.loop(0, 4 * whole_strips(size), 64) as i:
                    f.store(to + (i + offset), f.load(source + i, f32x16))

    return kernel(f"append_scanned_{of.width}_{of.state_dim}", ScanArguments, body)


def selective_scan(of: ScanLayer) -> PlanKernel[ScanArguments]:
    """Emit `plan.SelectiveScan`. A task is 16 channels of a sequence."""
    at, width = scan_states(of.width, of.state_dim), 4 * whole_strips(of.width)
    vectors = whole_strips(of.width) // LANES

    def body(f: Function, a: ScanArguments, thread: Value, threads: Value) -> None:
        step = Step.at(a.step)
        with tasks(f, a.counter, step.runs * vectors, thread, threads) as task:
            lanes, run = task % vectors * 64, task // vectors
            first, last = f.load_i32(step.run_starts, run), f.load_i32(step.run_starts, run + 1)
            table = step.tables + f.load_i32(step.sequence, first) * step.table_stride
            skip = f.load(a.d + lanes, f32x16)

            def follow(row: Value, state: Value) -> None:
                """Apply the stored row to the state."""
                x, dt = f.load(row + lanes, f32x16), f.load(row + (lanes + width), f32x16)
                gains, stepped = row + 2 * width, x * dt
                with f.loop(0, of.state_dim) as n:
                    decay = exp(f, dt * f.load(a.a + (n * width + lanes), f32x16))
                    place = state + (n * width + lanes)
                    old = f.load(place, f32x16)
                    f.store(place, f.fma(decay, old, stepped * f.broadcast(gains + n * 4, F32)))

            def copy(source: Value, target: Value) -> None:
                with f.loop(0, of.state_dim) as n:
                    f.store(target + (n * width + lanes), f.load(source + (n * width + lanes), f32x16))

            with f.loop(first, last) as row:
                position = f.load_i32(step.positions, row)
                offset, column = position % BLOCK, position // BLOCK
                block = f.load_i32(table, column)
                rows, states = a.rows + block * (BLOCK * at.row), a.states + block * at.size
                before, newest = states + at.before, states + at.after
                tag = states + (lanes + at.newest)  # the tag of the task's channels
                with f.when(offset.equals(0)):
                    with f.when(position.equals(0)), f.loop(0, of.state_dim) as n:
                        f.store(before + (n * width + lanes), f.zeros(f32x16))
                    with f.when(position.differs(0)):
                        copy(a.states + (f.load_i32(table, column - 1) * at.size + at.after), before)
                follows = (offset > 0) & f.load(tag, F32).equals(f.to_float(offset - 1))
                with f.when(follows.equals(0)):
                    copy(before, newest)
                with f.loop(f.select(follows, offset, f.i64(0)), offset + 1) as i:
                    follow(rows + i * at.row, newest)
                f.store(tag, f.splat(f.to_float(offset)))
                total, gains = f.var(f.zeros(f32x16)), a.c.row(row)
                with f.loop(0, of.state_dim) as n:
                    h = f.load(newest + (n * width + lanes), f32x16)
                    total.set(f.fma(h, f.broadcast(gains + n * 4, F32), total.get()))
                x = f.load(a.x.row(row) + lanes, f32x16)
                f.store(a.y.row(row) + lanes, f.fma(skip, x, total.get()))

    return kernel(f"selective_scan_{of.width}_{of.state_dim}", ScanArguments, body)

"""Copies a range of columns between rows, within each of several equal slices."""

from __future__ import annotations

from localllm.backends.cpu.arguments import Address, Int64, Output, Rows, Struct
from localllm.backends.cpu.kernels.common import PlanKernel, f32x16, kernel, own_rows
from localllm.backends.cpu.simd import F32, LANES, Function, Value


class ColumnsArguments(Struct):
    x: Rows
    y: Output
    rows: Address
    groups: Int64
    count: Int64  # values per group
    x_first: Int64  # bytes from the start of a row to the first group's values
    x_step: Int64  # stride between groups in bytes
    y_first: Int64
    y_step: Int64


def copy_columns() -> PlanKernel[ColumnsArguments]:
    """Emit the copy of `count` values of each group. Memory after the values is not overwritten."""

    def body(f: Function, a: ColumnsArguments, thread: Value, threads: Value) -> None:
        whole = a.count // LANES * LANES
        with own_rows(f, f.load_int(a.rows), thread, threads) as row, f.loop(0, a.groups) as group:
            x = a.x.row(row) + (a.x_first + group * a.x_step)
            y = a.y.row(row) + (a.y_first + group * a.y_step)
            with f.loop(0, whole, LANES) as i:
                f.store(y + i * 4, f.load(x + i * 4, f32x16))
            with f.loop(whole, a.count) as i:
                f.store(y + i * 4, f.load(x + i * 4, F32))

    return kernel("columns", ColumnsArguments, body)

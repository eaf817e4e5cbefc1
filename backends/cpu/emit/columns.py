"""Emitters of operations that copy columns between rows."""

from __future__ import annotations

from localllm.backends.allocation import Buffer
from localllm.backends.cpu.kernels import columns as kernels
from localllm.backends.cpu.lowering import Lowering
from localllm.backends.cpu.places import CountOf, output_to, rows_in
from localllm.plan import Concat, Rows, Slice


def slice_columns(low: Lowering, op: Slice) -> None:
    x, count = low.floats(op.x), op.stop - op.start
    copy_columns(low, op.x.rows, x, low.make(op.out), op.groups, count, (op.start, op.x.width // op.groups), (0, count))


def concat(low: Lowering, op: Concat) -> None:
    sources, y, first = [low.floats(x) for x in (op.a, op.b)], low.make(op.out), 0
    for value, x in zip((op.a, op.b), sources, strict=True):
        count = value.width // op.groups
        copy_columns(low, op.out.rows, x, y, op.groups, count, (0, count), (first, op.out.width // op.groups))
        first += count


def copy_columns(
    low: Lowering, rows: Rows, x: Buffer, y: Buffer, groups: int, count: int, source: tuple[int, int],
    target: tuple[int, int],
) -> None:  # fmt: skip
    """Copy `count` values of each group. `source` and `target` are (offset of the first group, stride of groups)."""
    arguments = kernels.ColumnsArguments(
        x=rows_in(x), y=output_to(y), rows=CountOf(rows), groups=groups, count=count, x_first=4 * source[0],
        x_step=4 * source[1], y_first=4 * target[0], y_step=4 * target[1],
    )  # fmt: skip
    low.call(kernels.copy_columns(), arguments, rows, "columns")

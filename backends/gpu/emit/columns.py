"""Emitters of operations that copy columns between rows."""

from __future__ import annotations

from localllm.backends.gpu.kernels import columns as kernels
from localllm.backends.gpu.kernels.kernel import by_value
from localllm.backends.gpu.lowering import Lowering
from localllm.plan import Concat, Slice


def slice_columns(low: Lowering, op: Slice) -> None:
    x, to, rows, width = low.floats(op.x), low.deliver(op.out), op.x.rows, op.out.width
    kernel = kernels.SliceColumns(
        WIDTH=width, X_STRIDE=x.stride, GROUP=op.x.width // op.groups, START=op.start,
        TAKEN=op.stop - op.start, delivered=to.delivered,
    )  # fmt: skip
    low.dispatch("columns", rows, [kernel.launch(by_value(width, rows), x=x, y=to.y, blocks=to.y_blocks)])


def concat(low: Lowering, op: Concat) -> None:
    a, b, to, rows, width = low.floats(op.a), low.floats(op.b), low.deliver(op.out), op.out.rows, op.out.width
    kernel = kernels.ConcatColumns(
        WIDTH=width, A_STRIDE=a.stride, B_STRIDE=b.stride, OF_A=op.a.width // op.groups,
        OF_B=op.b.width // op.groups, delivered=to.delivered,
    )  # fmt: skip
    low.dispatch("join", rows, [kernel.launch(by_value(width, rows), a=a, b=b, y=to.y, blocks=to.y_blocks)])

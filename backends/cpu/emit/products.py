"""Emitters of products with matrices, and of the embedding, which reads rows of one."""

from __future__ import annotations

from localllm.backends.allocation import Buffer
from localllm.backends.cpu.arguments import RowsOrNone
from localllm.backends.cpu.kernels import linear, matrix
from localllm.backends.cpu.lowering import Lowering
from localllm.backends.cpu.places import COUNTER, BufferOf, CountOf, PanelsOf, StepOf, VectorOf, output_to, rows_in
from localllm.backends.cpu.simd import LANES
from localllm.plan import Embed, Linear, LinearAdd, Value

NOTHING = RowsOrNone(address=0, stride=0)


def embed(low: Lowering, op: Embed) -> None:
    panels = low.panels[op.table.name]
    arguments = matrix.EmbedArguments(
        step=StepOf(), weights=PanelsOf(op.table), blocks=panels.blocks, panel_bytes=panels.panel_bytes,
        last=op.table.shape[0] - 1, y=output_to(low.make(op.out)),
    )  # fmt: skip
    low.call(matrix.embed(op.table.format, op.positions), arguments, "batch", "embed")


def linear_(low: Lowering, op: Linear) -> None:
    _linear(low, op, op.out, low.operand(op.x, op.weight), None)


def linear_add(low: Lowering, op: LinearAdd) -> None:
    x, other = low.operand(op.linear.x, op.linear.weight), low.floats(op.other)
    if op.other != op.linear.x:
        low.values.release(op.other)  # the sum may replace it: the thread that writes an element also reads it
    _linear(low, op.linear, op.add.out, x, other)


def _linear(low: Lowering, op: Linear, out: Value, x: Buffer, residual: Buffer | None) -> None:
    panels = low.panels[op.weight.name]
    added = NOTHING if residual is None else RowsOrNone(address=BufferOf(residual), stride=residual.stride)
    arguments = linear.LinearArguments(
        weights=PanelsOf(op.weight), blocks=panels.blocks, panels=panels.panels, panel_bytes=panels.panel_bytes,
        chunk=panels.chunk(low.threads), tile_chunk=panels.tile_chunk(low.threads),
        scratch=low.scratch_rows["unpacked weights"], x=rows_in(x), y=output_to(low.make(out)),
        bias=VectorOf(op.bias, 2 * LANES) if op.bias else 0, residual=added, scale=op.scale,
        rows=CountOf(op.x.rows), counter=COUNTER,
    )  # fmt: skip
    low.call(linear.linear(op.weight.format), arguments, "tasks", op.weight.name)

"""Emitters of matrix products, and of embeddings, which read matrix rows."""

from __future__ import annotations

from localllm.backends.allocation import Buffer
from localllm.backends.cpu.arguments import RowsOrNone
from localllm.backends.cpu.buffers import float_stride
from localllm.backends.cpu.emit.columns import copy_columns
from localllm.backends.cpu.kernels import heads as heads_
from localllm.backends.cpu.kernels import linear, matrix
from localllm.backends.cpu.lowering import Lowering
from localllm.backends.cpu.places import (
    COUNTER,
    BufferOf,
    CountOf,
    RepackedOf,
    StepOf,
    VectorOf,
    output_to,
    rows_in,
)
from localllm.backends.cpu.simd import LANES
from localllm.backends.cpu.unpack import INTEGER_PANELS
from localllm.plan import Embed, HeadLinear, Linear, LinearAdd, Value

NOTHING = RowsOrNone(address=0, stride=0)


def embed(low: Lowering, op: Embed) -> None:
    panels = low.panels[op.table.name]
    arguments = matrix.EmbedArguments(
        step=StepOf(), weights=RepackedOf(op.table), blocks=panels.blocks, panel_bytes=panels.panel_bytes,
        last=op.table.shape[0] - 1, y=output_to(low.make(op.out)),
    )  # fmt: skip
    low.call(matrix.embed(op.table.format, op.positions), arguments, "batch", "embed")


def linear_(low: Lowering, op: Linear) -> None:
    _linear(low, op, op.out, low.operand(op.x, op.weight), None)


def linear_add(low: Lowering, op: LinearAdd) -> None:
    x, other = low.operand(op.linear.x, op.linear.weight), low.floats(op.other)
    if op.other != op.linear.x:
        low.values.release(op.other)  # the sum may reuse this buffer: the thread that writes an element also reads it
    _linear(low, op.linear, op.add.out, x, other)


def _linear(low: Lowering, op: Linear, out: Value, x: Buffer, residual: Buffer | None) -> None:
    panels = low.panels[op.weight.name]
    added = NOTHING if residual is None else RowsOrNone(address=BufferOf(residual), stride=residual.stride)
    arguments = linear.LinearArguments(
        weights=RepackedOf(op.weight), blocks=panels.blocks, panels=panels.panels, panel_bytes=panels.panel_bytes,
        chunk=panels.chunk(low.threads), tile_chunk=panels.tile_chunk(low.threads),
        scratch=low.scratch_rows["unpacked weights"], x=rows_in(x), y=output_to(low.make(out)),
        bias=VectorOf(op.bias, 2 * LANES) if op.bias else 0, residual=added, scale=op.scale,
        rows=CountOf(op.x.rows), counter=COUNTER,
    )  # fmt: skip
    chunk = (panels.tile_chunk if op.weight.format in INTEGER_PANELS else panels.chunk)(low.threads)
    of_row = min(chunk, panels.panels) * LANES * op.x.width
    low.call(linear.linear(op.weight.format), arguments, "tasks", op.weight.name, of_row)


def head_linear(low: Lowering, op: HeadLinear) -> None:
    """Emit one product per head.

    If a head's width is not a whole number of panels, kernels write to a padded buffer first.
    """
    (heads, rows, _), panels = op.weight.shape, low.panels[op.weight.name]
    x, y, padded = low.operand(op.x, op.weight), low.make(op.out), panels.panels * LANES
    target = y if rows == padded else low.values.take(op.x.rows, float_stride(heads * padded))
    arguments = heads_.HeadLinearArguments(
        weights=RepackedOf(op.weight), blocks=panels.blocks, panels=panels.panels, panel_bytes=panels.panel_bytes,
        chunk=panels.tile_chunk(low.threads) if op.weight.format in INTEGER_PANELS else panels.chunk(low.threads),
        scratch=low.scratch_rows["unpacked weights"], x=rows_in(x), y=output_to(target), bias=0, counter=COUNTER,
        heads=heads, head_bytes=panels.expert_bytes, y_head=4 * padded, rows=CountOf(op.x.rows),
    )  # fmt: skip
    low.call(heads_.head_linear(op.weight.format), arguments, "tasks", op.weight.name)
    if target is not y:
        copy_columns(low, op.x.rows, target, y, heads, rows, (0, padded), (0, rows))
        low.values.give(target)

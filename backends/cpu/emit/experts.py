"""Emitter of a mixture of experts: route, sort by expert, gate and up, GLU, down, combine.

Between sort and combine, each row is a pair: a batch row and one of its experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from localllm.backends.allocation import Buffer
from localllm.backends.cpu.arguments import Rows, RowsOrNone
from localllm.backends.cpu.buffers import activation_stride, float_stride
from localllm.backends.cpu.emit.products import NOTHING
from localllm.backends.cpu.kernels import experts as kernels
from localllm.backends.cpu.kernels import rowwise
from localllm.backends.cpu.lowering import Lowering, copies, vector_of
from localllm.backends.cpu.panels import panel_count
from localllm.backends.cpu.places import (
    COUNTER,
    BufferOf,
    CountOf,
    ExpertVectorsOf,
    ListOf,
    RepackedOf,
    output_to,
    rows_in,
)
from localllm.backends.cpu.simd import LANES
from localllm.backends.cpu.unpack import INTEGER_PANELS, activations_of
from localllm.plan import Experts, Stack


@dataclass(frozen=True, slots=True)
class _Pairs:
    """The token-expert pairs: the experts of each row with their weights, and the pairs of each expert."""

    choices: ListOf
    weights: ListOf
    starts: ListOf
    order: ListOf


def experts(low: Lowering, op: Experts) -> None:
    rows, used, values = op.x.rows, op.used, low.values
    pairs = _route(low, op)
    ffn, width = op.gate.weight.shape[1], op.down.weight.shape[1]
    stacks = op.stacks[:-1]
    inputs = [low.operand(op.x, stack.weight) for stack in stacks]
    made = [values.take(rows, float_stride(ffn), used) for _ in stacks]
    gate, up = made[0], made[-1]
    for stack, x, y in zip(stacks, inputs, made, strict=True):
        _multiply(low, stack, x, y, used, pairs)
    values.release(op.x, op.router)
    quantized = _glu(low, op, gate, up, pairs)
    mixed = values.take(rows, float_stride(width), used)
    _multiply(low, op.down, quantized or gate, mixed, 1, pairs)
    arguments = kernels.CombineArguments(
        x=rows_in(mixed), y=output_to(low.make(op.out)), weights=pairs.weights, used=used, width=op.out.width,
        rows=CountOf(rows),
    )  # fmt: skip
    low.call(kernels.combine(not op.weighted_input), arguments, rows, "combine")
    if op.out in low.keep:
        low.routings[op.out.index] = pairs.choices, gate
    else:
        values.give(gate)
    for buffer in (*made[1:], mixed, *([quantized] if quantized else [])):
        values.give(buffer)


def _route(low: Lowering, op: Experts) -> _Pairs:
    """Select the experts of every row, and list the pairs of each expert."""
    rows, used, count = op.x.rows, op.used, op.gate.weight.shape[0]
    most = {"batch": low.limits.rows, "logits": low.limits.logit_rows}[rows] * used
    pairs = _Pairs(low.list(4 * most), low.list(4 * most), low.list(8 * (count + 1)), low.list(8 * most))
    given = NOTHING
    if op.choices is not None:
        buffer = low.floats(op.choices)
        given = RowsOrNone(address=BufferOf(buffer), stride=buffer.stride)
    stride = 3 * 4 * (-(-count // LANES) * LANES)
    routing = kernels.RouteArguments(
        logits=rows_in(low.floats(op.router)), choices=pairs.choices, weights=pairs.weights, experts=count,
        scale=op.scale, bias=vector_of(op.choice_bias), rows=CountOf(rows),
        scratch=Rows(address=low.list(stride * low.threads), stride=stride), groups=op.groups,
        groups_used=op.groups_used, given=given,
    )  # fmt: skip
    low.call(
        kernels.route(op.gating, used, op.normalize, op.groups > 1, op.choices is not None), routing, rows, "route"
    )
    grouping = kernels.GroupArguments(
        choices=pairs.choices, experts=count, used=used, rows=CountOf(rows), starts=pairs.starts, order=pairs.order
    )
    low.call(kernels.group(), grouping, "select", "group")
    return pairs


def _multiply(low: Lowering, stack: Stack, x: Buffer, y: Buffer, per_row: int, pairs: _Pairs) -> None:
    """Emit one product of all pairs with their experts' matrices."""
    weight, panels = stack.weight, low.panels[stack.weight.name]
    width = panel_count(weight.shape[1]) * LANES
    unpacks = weight.format in INTEGER_PANELS
    arguments = kernels.ExpertsArguments(
        weights=RepackedOf(weight), blocks=panels.blocks, panels=panels.panels, panel_bytes=panels.panel_bytes,
        chunk=panels.tile_chunk(low.threads) if unpacks else panels.chunk(low.threads),
        scratch=low.scratch_rows["unpacked weights"], x=rows_in(x), y=output_to(y), counter=COUNTER,
        bias=ExpertVectorsOf(stack.bias, width) if stack.bias else 0, experts=weight.shape[0],
        expert_bytes=panels.expert_bytes, starts=pairs.starts, order=pairs.order, pairs_per_row=per_row,
        scales=vector_of(stack.scale), bias_stride=4 * width,
    )  # fmt: skip
    low.call(kernels.multiply(weight.format), arguments, "tasks", weight.name)


def _glu(low: Lowering, op: Experts, gate: Buffer, up: Buffer, pairs: _Pairs) -> Buffer | None:
    """Write activation(gate) * up to `gate`.

    If the down product needs quantized activations, also write and return a quantized buffer.
    """
    ffn, kind = op.gate.weight.shape[1], activations_of(op.down.weight.format)
    quantized = None if kind is None else low.values.take(op.x.rows, activation_stride(kind, ffn), op.used)
    count = replace(pairs.starts, offset=8 * op.gate.weight.shape[0])  # the number of pairs follows the starts
    assert op.gated or not op.weighted_input, "a single product would be weighted twice"
    for buffer in (gate, up) if op.weighted_input else ():
        arguments = rowwise.GluArguments(
            gate=Rows(address=pairs.weights, stride=4), up=rows_in(buffer), y=output_to(buffer), width=ffn, slices=1,
            limit=0.0, rows=count, copies=copies({}, ffn),
        )  # fmt: skip
        low.call(rowwise.glu("identity", sliced=True), arguments, "select", "weigh")
    arguments = rowwise.GluArguments(
        gate=rows_in(gate), up=rows_in(up), y=output_to(gate), width=ffn, slices=1, limit=op.limit, rows=count,
        copies=copies({kind: quantized} if kind and quantized else {}, ffn),
    )  # fmt: skip
    low.call(rowwise.glu(op.activation), arguments, "select", "glu")
    return quantized

"""Emitters of row-wise operations."""

from __future__ import annotations

from localllm.backends.cpu.cache_layout import layout_of
from localllm.backends.cpu.kernels import append, rowwise
from localllm.backends.cpu.kernels import rotate as rotate_
from localllm.backends.cpu.kernels.common import PlanKernel
from localllm.backends.cpu.lowering import Lowering, vector_of
from localllm.backends.cpu.places import AxesOf, CacheOf, CountOf, RopeOf, StepOf, VectorOf, output_to, rows_in
from localllm.backends.cpu.simd import LANES
from localllm.plan import (
    Activate,
    Add,
    Append,
    Clamp,
    Glu,
    Norm,
    Rotate,
    RotateEnds,
    Scale,
    SelectRows,
    Softcap,
    Value,
    Xielu,
)


def norm(low: Lowering, op: Norm) -> None:
    x, y = low.floats(op.x), low.make(op.out)
    arguments = rowwise.NormArguments(
        x=rows_in(x), y=output_to(y), weight=VectorOf(op.weight, LANES), bias=vector_of(op.bias),
        width=op.x.width // op.groups, groups=op.groups, eps=op.eps, rows=CountOf(op.x.rows),
        group_stride=4 * op.weight.shape[-1] if len(op.weight.shape) > 1 else 0, copies=low.copies(op.out),
    )  # fmt: skip
    low.call(rowwise.norm(op.kind), arguments, op.x.rows, "norm")


def rotate(low: Lowering, op: Rotate) -> None:
    _rotate(low, op.x, op.out, op, 0)


def rotate_ends(low: Lowering, op: RotateEnds) -> None:
    _rotate(low, op.ends.x, op.join.out, op.rotation, op.ends.start)


def _rotate(low: Lowering, x: Value, out: Value, op: Rotate, first: int) -> None:
    """Apply RoPE to the dimensions from `first` on of every head."""
    source, head_dim = low.floats(x), first + op.head_dim
    low.values.release(x)  # each pair is read before it is overwritten
    target = low.make(out)
    arguments = rotate_.RotateArguments(
        step=StepOf(rows=x.rows), x=rows_in(source), y=output_to(target), heads=x.width // head_dim,
        table=RopeOf(op.rope), axes=AxesOf(op.rope) if op.rope.axes else 0,
    )  # fmt: skip
    shape = op.rope.style, head_dim, op.rope.n_rot, first
    kernel = rotate_.rotate(*shape, copied=source is not target, axes=bool(op.rope.axes))
    low.call(kernel, arguments, x.rows, "rotate")


def append_(low: Lowering, op: Append) -> None:
    k, layer = low.floats(op.k), low.plan.attention_layer(op.layer)
    v = k if op.v is None else low.floats(op.v)  # values of width 0 are not read
    arguments = append.AppendArguments(
        step=StepOf(low.limits.own_blocks(layer)), k=rows_in(k), v=rows_in(v), k_cache=CacheOf(op.layer, "keys"),
        v_cache=CacheOf(op.layer, "values"), heads=layer.kv_heads,
    )  # fmt: skip
    types, layout = (low.cache.keys, low.cache.values), layout_of(layer, low.cache)
    value_dim = 0 if layout.once else layer.value_dim
    kernel = append.append(layer.head_dim, value_dim, *types, rows=layout.rows, every=layer.every)
    low.call(kernel, arguments, "batch", "append")


def glu(low: Lowering, op: Glu) -> None:
    gate, up = low.floats(op.gate), low.floats(op.up)
    sliced = op.gate.width < op.up.width
    if not sliced:
        low.values.release(op.gate, op.up)
    slices = op.gate.width if sliced else 1
    y = low.make(op.out)
    arguments = rowwise.GluArguments(
        gate=rows_in(gate), up=rows_in(up), y=output_to(y), width=op.out.width // slices, slices=slices,
        limit=op.limit, rows=CountOf(op.out.rows), copies=low.copies(op.out),
    )  # fmt: skip
    low.call(rowwise.glu(op.activation, sliced), arguments, op.out.rows, "glu")


def add(low: Lowering, op: Add) -> None:
    a, b = low.floats(op.a), low.floats(op.b)
    low.values.release(op.a, op.b)
    arguments = rowwise.AddArguments(
        a=rows_in(a), b=rows_in(b), y=output_to(low.make(op.out)), width=op.out.width, rows=CountOf(op.out.rows)
    )
    low.call(rowwise.add(), arguments, op.out.rows, "add")


def scale(low: Lowering, op: Scale) -> None:
    _factor(low, rowwise.scale(), op, op.factor, "scale")


def clamp(low: Lowering, op: Clamp) -> None:
    _factor(low, rowwise.clamp(), op, op.bound, "clamp")


def softcap(low: Lowering, op: Softcap) -> None:
    _factor(low, rowwise.softcap(), op, op.cap, "softcap")


def _factor(
    low: Lowering, kernel: PlanKernel[rowwise.FactorArguments], op: Clamp | Scale | Softcap, factor: float, label: str
) -> None:
    x = low.floats(op.x)
    low.values.release(op.x)
    arguments = rowwise.FactorArguments(
        x=rows_in(x), y=output_to(low.make(op.out)), width=op.out.width, rows=CountOf(op.out.rows), factor=factor
    )
    low.call(kernel, arguments, op.out.rows, label)


def xielu(low: Lowering, op: Xielu) -> None:
    x = low.floats(op.x)
    low.values.release(op.x)
    arguments = rowwise.XieluArguments(
        x=rows_in(x), y=output_to(low.make(op.out)), width=op.out.width, rows=CountOf(op.out.rows),
        positive=op.positive, negative=op.negative, beta=op.beta, eps=op.eps,
    )  # fmt: skip
    low.call(rowwise.xielu(), arguments, op.out.rows, "xielu")


def activate(low: Lowering, op: Activate) -> None:
    x = low.floats(op.x)
    low.values.release(op.x)
    arguments = rowwise.MapArguments(
        x=rows_in(x), y=output_to(low.make(op.out)), width=op.out.width, rows=CountOf(op.out.rows)
    )
    low.call(rowwise.apply(op.activation), arguments, op.out.rows, op.activation)


def select(low: Lowering, op: SelectRows) -> None:
    arguments = rowwise.SelectArguments(
        step=StepOf(), x=rows_in(low.floats(op.x)), y=output_to(low.make(op.out)), width=op.out.width
    )
    low.call(rowwise.select(), arguments, "select", "select")

"""Row-wise operations: norm, GLU, add, scale, activations, soft caps, selected rows, quantization.

A thread handles the same share of the rows in every kernel, so consecutive kernels need no barrier between them. Rows
are padded to whole vectors; nothing reads the padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from localllm.backends.cpu.arguments import (
    Address,
    AddressOrZero,
    Float32,
    Int64,
    Output,
    Rows,
    Struct,
    TargetOrZero,
)  # fmt: skip
from localllm.backends.cpu.kernels.common import (
    S_VALUES,
    X_VALUES,
    PlanKernel,
    Step,
    activate,
    expm1,
    f32x16,
    kernel,
    own_rows,
    quantize_row,
    quantize_super_row,
    round_row,
    sigmoid,
    tanh,
)  # fmt: skip
from localllm.backends.cpu.simd import F32, I32, LANES, Function, Value
from localllm.plan import Activation, GluActivation, NormKind


def _add(a: Value, b: Value) -> Value:
    return a + b


class Quantized(Struct):
    """Destination of a quantized copy of a kernel's output; address 0 means no copy."""

    address: TargetOrZero
    stride: Int64
    values: Int64  # values per row


class Copies(Struct):
    """The quantized copies, one field per kind of `panels.Activations`."""

    blocks: Quantized
    super_blocks: Quantized
    bfloats: Quantized


class NormArguments(Struct):
    x: Rows
    y: Output
    weight: Address
    bias: AddressOrZero
    width: Int64  # width of a group
    groups: Int64
    eps: Float32
    rows: Address  # address of the number of rows, as in all structs below
    group_stride: Int64  # stride between the weights of groups in bytes; 0 if all groups share them
    copies: Copies  # quantized copies of y


def norm(kind: NormKind) -> PlanKernel[NormArguments]:
    """Emit y = (x - mean) / sqrt(variance + eps) * weight + bias over each group.

    "rms" sets the mean to 0. "none" sets the mean to 0 and the root to 1.
    """

    def body(f: Function, a: NormArguments, thread: Value, threads: Value) -> None:
        width = a.width
        zero = f.zeros(f32x16)
        count = f.to_float(width)

        def load(x: Value, i: Value) -> Value:
            """Load 16 floats from index i on; lanes beyond the group are zero."""
            left = f.splat(Value(f, f.builder.trunc((width - i).ir, I32)))
            return f.select(f.lane_numbers() < left, f.load(x + i * 4, f32x16), zero)

        def inside(i: Value, value: Value) -> Value:
            left = f.splat(Value(f, f.builder.trunc((width - i).ir, I32)))
            return f.select(f.lane_numbers() < left, value, zero)

        with own_rows(f, f.load_int(a.rows), thread, threads) as row:
            y_row = a.y.row(row)
            with f.loop(0, a.groups) as group:
                x = a.x.address + (row * a.x.stride + group * width * 4)
                y = y_row + group * width * 4
                own = group * a.group_stride
                weight = a.weight + own
                mean = f.var(f.zeros(F32))
                if kind == "layer":
                    total = f.var(zero)
                    with f.loop(0, width, LANES) as i:
                        total.set(total.get() + load(x, i))
                    mean.set(f.reduce(total.get(), _add) / count)
                center = f.splat(mean.get())
                scale = f.constant(f32x16, 1.0)
                if kind != "none":
                    squares = f.var(zero)
                    with f.loop(0, width, LANES) as i:
                        v = inside(i, load(x, i) - center)
                        squares.set(f.fma(v, v, squares.get()))
                    variance = f.reduce(squares.get(), _add) / count
                    scale = f.splat(f.constant(F32, 1.0) / f.sqrt(variance + a.eps))
                with f.loop(0, width, LANES) as i:
                    out = f.var(inside(i, (load(x, i) - center) * scale * f.load(weight + i * 4, f32x16)))
                    bias = a.bias
                    with f.when(bias.differs(0)):
                        out.set(inside(i, out.get() + f.load(f.pointer(bias) + (own + i * 4), f32x16)))
                    f.store(y + i * 4, out.get())
            _write_copies(f, a.copies, y_row, row)

    return kernel(f"norm_{kind}", NormArguments, body)


def _write_copies(f: Function, to: Copies, y: Value, row: Value) -> None:
    """Write a row in all required activation formats while it is in L1."""
    ways = (
        (to.blocks, quantize_row, X_VALUES),
        (to.super_blocks, quantize_super_row, S_VALUES),
        (to.bfloats, round_row, 1),
    )
    for copy, write, values in ways:
        with f.when(copy.address.differs(0)):
            write(f, y, f.pointer(copy.address) + row * copy.stride, copy.values // values)


class QuantizeArguments(Struct):
    x: Rows
    rows: Address
    copies: Copies  # quantized copies of x


def quantize_rows() -> PlanKernel[QuantizeArguments]:
    """Convert float32 rows to quantized activations."""

    def body(f: Function, a: QuantizeArguments, thread: Value, threads: Value) -> None:
        with own_rows(f, f.load_int(a.rows), thread, threads) as row:
            _write_copies(f, a.copies, a.x.row(row), row)

    return kernel("quantize", QuantizeArguments, body)


class GluArguments(Struct):
    gate: Rows
    up: Rows
    y: Output
    width: Int64  # width of a slice
    slices: Int64  # slices per row; 1 if the gate is as wide as the row
    limit: Float32
    rows: Address
    copies: Copies  # quantized copies of y


def glu(activation: GluActivation, sliced: bool = False) -> PlanKernel[GluArguments]:
    """Emit y = activation(gate) * up.

    If `sliced`, the gate has one value per slice, and y does not share memory with `up`.
    """

    def unit(f: Function, gate: Value, up: Value, limit: Value) -> Value:
        if activation == "swiglu_oai":
            limit = f.constant(f32x16, 7.0)
        if activation in ("swiglu_oai", "swiglu_clamp", "silu_clamp"):  # this operand order propagates NaN
            up = f.fmin(limit, f.fmax(f.zeros(f32x16) - limit, up))
        match activation:
            case "swiglu_oai":
                gate = f.fmin(limit, gate)
                return gate * sigmoid(f, gate * 1.702) * (up + 1.0)
            case "swiglu_clamp":
                return activate(f, "silu", f.fmin(limit, gate)) * up
            case "silu_clamp":
                return f.fmin(limit, activate(f, "silu", gate)) * up
            case "situ":
                return limit * tanh(f, gate / limit) * sigmoid(f, gate) * (limit * tanh(f, up / limit))
            case "gelu_alone":
                return activate(f, "gelu", gate)
        return activate(f, activation, gate) * up

    def body(f: Function, a: GluArguments, thread: Value, threads: Value) -> None:
        width, limit = a.width, f.splat(a.limit)
        with own_rows(f, f.load_int(a.rows), thread, threads) as row:
            gate = a.gate.row(row)
            y_row = a.y.row(row)
            with f.loop(0, a.slices) as number:
                up, y = (x + number * width * 4 for x in (a.up.row(row), y_row))
                one = f.broadcast(gate + number * 4, F32) if sliced else None
                with f.loop(0, width, LANES) as i:  # values written beyond a slice are overwritten by the next slice
                    g = one if one is not None else f.load(gate + i * 4, f32x16)
                    f.store(y + i * 4, unit(f, g, f.load(up + i * 4, f32x16), limit))
            _write_copies(f, a.copies, y_row, row)

    return kernel(f"glu_{activation}{'_sliced' * sliced}", GluArguments, body)


class AddArguments(Struct):
    a: Rows
    b: Rows
    y: Output
    width: Int64
    rows: Address


def add() -> PlanKernel[AddArguments]:
    """Emit y = a + b."""

    def body(f: Function, a: AddArguments, thread: Value, threads: Value) -> None:
        with own_rows(f, f.load_int(a.rows), thread, threads) as row:
            p, q, y = (x.row(row) for x in (a.a, a.b, a.y))
            with f.loop(0, a.width, LANES) as i:
                f.store(y + i * 4, f.load(p + i * 4, f32x16) + f.load(q + i * 4, f32x16))

    return kernel("add", AddArguments, body)


class MapArguments(Struct):
    x: Rows
    y: Output
    width: Int64
    rows: Address


class FactorArguments(MapArguments):
    factor: Float32


def _map(f: Function, a: MapArguments, thread: Value, threads: Value, function: Callable[[Value], Value]) -> None:
    """Emit y = function(x), 16 values at a time."""
    with own_rows(f, f.load_int(a.rows), thread, threads) as row:
        x, y = a.x.row(row), a.y.row(row)
        with f.loop(0, a.width, LANES) as i:
            f.store(y + i * 4, function(f.load(x + i * 4, f32x16)))


def scale() -> PlanKernel[FactorArguments]:
    """Emit y = x * factor."""

    def body(f: Function, a: FactorArguments, thread: Value, threads: Value) -> None:
        factor = f.splat(a.factor)
        _map(f, a, thread, threads, lambda x: x * factor)

    return kernel("scale", FactorArguments, body)


def apply(name: Activation | Literal["exp", "signed_root"]) -> PlanKernel[MapArguments]:
    """Emit y = activation(x)."""

    def body(f: Function, a: MapArguments, thread: Value, threads: Value) -> None:
        _map(f, a, thread, threads, lambda x: activate(f, name, x))

    return kernel(f"apply_{name}", MapArguments, body)


class XieluArguments(MapArguments):
    positive: Float32
    negative: Float32
    beta: Float32
    eps: Float32


def xielu() -> PlanKernel[XieluArguments]:
    """Emit y = xIELU(x), as `plan.Xielu` defines it."""

    def body(f: Function, a: XieluArguments, thread: Value, threads: Value) -> None:
        positive, negative, beta, eps = (f.splat(value) for value in (a.positive, a.negative, a.beta, a.eps))

        def unit(x: Value) -> Value:
            below = negative * (expm1(f, f.fmin(eps, x)) - x)
            return f.fma(beta, x, f.select(x > 0.0, positive * x * x, below))

        _map(f, a, thread, threads, unit)

    return kernel("xielu", XieluArguments, body)


class ClampArguments(MapArguments):
    low: Float32
    high: Float32


def clamp() -> PlanKernel[ClampArguments]:
    """Emit y = x limited to low..high."""

    def body(f: Function, a: ClampArguments, thread: Value, threads: Value) -> None:
        low, high = f.splat(a.low), f.splat(a.high)
        _map(f, a, thread, threads, lambda x: f.fmin(high, f.fmax(low, x)))  # this operand order propagates NaN

    return kernel("clamp", ClampArguments, body)


def softcap() -> PlanKernel[FactorArguments]:
    """Emit y = factor * tanh(x / factor)."""

    def body(f: Function, a: FactorArguments, thread: Value, threads: Value) -> None:
        cap = f.splat(a.factor)
        _map(f, a, thread, threads, lambda x: cap * tanh(f, x / cap))

    return kernel("softcap", FactorArguments, body)


class SelectArguments(Struct):
    step: Address
    x: Rows
    y: Output
    width: Int64


def select() -> PlanKernel[SelectArguments]:
    """Emit y[l] = x[logit_rows[l]]."""

    def body(f: Function, a: SelectArguments, thread: Value, threads: Value) -> None:
        step = Step.at(a.step)
        with own_rows(f, step.logit_rows, thread, threads) as row:
            source = f.load_i32(step.logit_index, row)
            x = a.x.row(source)
            y = a.y.row(row)
            with f.loop(0, a.width, LANES) as i:
                f.store(y + i * 4, f.load(x + i * 4, f32x16))

    return kernel("select", SelectArguments, body)

"""Operations that work row by row: norm, rotate, append to the cache, glu, add, scale, select, quantize.

Each thread takes its share of the rows, the same share in every kernel, so a run of these needs no barrier inside. Rows
are padded to whole vectors; the padding holds numbers that nothing reads.
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
    f32x16,
    kernel,
    own_rows,
    quantize_row,
    quantize_super_row,
    round_row,
    sigmoid,
    tanh,
)  # fmt: skip
from localllm.backends.cpu.simd import F32, I32, LANES, Function, Value, vector
from localllm.plan import Activation, GluActivation


def _add(a: Value, b: Value) -> Value:
    return a + b


class Quantized(Struct):
    """Where a kernel puts a copy of its rows as activations; nowhere if the address is 0."""

    address: TargetOrZero
    stride: Int64
    values: Int64  # of a row


class Copies(Struct):
    """Copies as every kind of `panels.Activations`."""

    blocks: Quantized
    super_blocks: Quantized
    bfloats: Quantized


class NormArguments(Struct):
    x: Rows
    y: Output
    weight: Address
    bias: AddressOrZero
    width: Int64  # of one group
    groups: Int64
    eps: Float32
    rows: Address  # of their number, as in all structs here
    group_stride: Int64  # bytes between the weights of groups; 0 if all groups share them
    copies: Copies  # of y


def norm(kind: Literal["rms", "layer"]) -> PlanKernel[NormArguments]:
    """y = (x - mean) / sqrt(variance + eps) * weight + bias over each group; "rms" leaves the mean out."""

    def body(f: Function, a: NormArguments, thread: Value, threads: Value) -> None:
        width = a.width
        zero = f.zeros(f32x16)
        count = f.to_float(width)

        def load(x: Value, i: Value) -> Value:
            """16 floats from i, zero beyond the group."""
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
    """Write a row as activations of every required kind, while it is in L1."""
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
    copies: Copies  # of x


def quantize() -> PlanKernel[QuantizeArguments]:
    """Activations of other kinds from float32 rows."""

    def body(f: Function, a: QuantizeArguments, thread: Value, threads: Value) -> None:
        with own_rows(f, f.load_int(a.rows), thread, threads) as row:
            _write_copies(f, a.copies, a.x.row(row), row)

    return kernel("quantize", QuantizeArguments, body)


class GluArguments(Struct):
    gate: Rows
    up: Rows
    y: Output
    width: Int64
    rows: Address
    copies: Copies  # of y


def glu(activation: GluActivation, row_gate: bool = False) -> PlanKernel[GluArguments]:
    """y = activation(gate) * up; with `row_gate` one gate for the whole row."""

    def unit(f: Function, gate: Value, up: Value) -> Value:
        if activation == "swiglu_oai":
            seven = f.constant(f32x16, 7.0)  # as the left operand, so that a NaN stays one
            gate = f.fmin(seven, gate)
            up = f.fmin(seven, f.fmax(f.constant(f32x16, -7.0), up))
            return gate * sigmoid(f, gate * 1.702) * (up + 1.0)
        return activate(f, activation, gate) * up

    def body(f: Function, a: GluArguments, thread: Value, threads: Value) -> None:
        with own_rows(f, f.load_int(a.rows), thread, threads) as row:
            gate = a.gate.row(row)
            up = a.up.row(row)
            y = a.y.row(row)
            one = f.broadcast(gate, F32) if row_gate else None
            with f.loop(0, a.width, LANES) as i:
                g = one if one is not None else f.load(gate + i * 4, f32x16)
                f.store(y + i * 4, unit(f, g, f.load(up + i * 4, f32x16)))
            _write_copies(f, a.copies, y, row)

    return kernel(f"glu_{activation}{'_row' * row_gate}", GluArguments, body)


class AddArguments(Struct):
    a: Rows
    b: Rows
    y: Output
    width: Int64
    rows: Address


def add() -> PlanKernel[AddArguments]:
    """y = a + b."""

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
    """y = function(x), 16 values at a time."""
    with own_rows(f, f.load_int(a.rows), thread, threads) as row:
        x, y = a.x.row(row), a.y.row(row)
        with f.loop(0, a.width, LANES) as i:
            f.store(y + i * 4, function(f.load(x + i * 4, f32x16)))


def scale() -> PlanKernel[FactorArguments]:
    """y = x * factor."""

    def body(f: Function, a: FactorArguments, thread: Value, threads: Value) -> None:
        factor = f.splat(a.factor)
        _map(f, a, thread, threads, lambda x: x * factor)

    return kernel("scale", FactorArguments, body)


def apply(name: Activation) -> PlanKernel[MapArguments]:
    """y = activation(x)."""

    def body(f: Function, a: MapArguments, thread: Value, threads: Value) -> None:
        _map(f, a, thread, threads, lambda x: activate(f, name, x))

    return kernel(f"apply_{name}", MapArguments, body)


def softcap() -> PlanKernel[FactorArguments]:
    """y = factor * tanh(x / factor)."""

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
    """y[l] = x[logit_rows[l]]."""

    def body(f: Function, a: SelectArguments, thread: Value, threads: Value) -> None:
        step = Step.at(a.step)
        with own_rows(f, step.logit_rows, thread, threads) as row:
            source = f.load_i32(step.logit_index, row)
            x = a.x.row(source)
            y = a.y.row(row)
            with f.loop(0, a.width, LANES) as i:
                f.store(y + i * 4, f.load(x + i * 4, f32x16))

    return kernel("select", SelectArguments, body)


class RotateArguments(Struct):
    step: Address
    x: Rows
    y: Output  # may be x
    heads: Int64
    table: Address  # float32 (positions, 2, n_rot / 2): cosines, sines


def rotate(style: Literal["norm", "neox"], head_dim: int, n_rot: int) -> PlanKernel[RotateArguments]:
    """Rotary embedding of every head: (a, b) -> (a cos - b sin, a sin + b cos)."""
    half = n_rot // 2
    lanes = next(n for n in (16, 8, 4, 2, 1) if half % n == 0)

    def body(f: Function, a: RotateArguments, thread: Value, threads: Value) -> None:
        step = Step.at(a.step)
        row_type = vector(F32, lanes)
        with own_rows(f, step.rows, thread, threads) as row:
            position = f.load_i32(step.positions, row)
            table = a.table + position * (8 * half)
            with f.loop(0, a.heads) as head:
                x = a.x.address + (row * a.x.stride + head * (4 * head_dim))
                y = a.y.address + (row * a.y.stride + head * (4 * head_dim))
                with f.loop(0, half, lanes) as i:
                    cosine = f.load(table + i * 4, row_type)
                    sine = f.load(table + (i + half) * 4, row_type)
                    if style == "neox":
                        p, q = f.load(x + i * 4, row_type), f.load(x + (i + half) * 4, row_type)
                    else:
                        pairs = f.load(x + i * 8, vector(F32, 2 * lanes))
                        p, q = (f.shuffle(pairs, pairs, range(odd, 2 * lanes, 2)) for odd in (0, 1))
                    minus = f.constant(row_type, 0.0) - q
                    first = f.fma(p, cosine, minus * sine)
                    second = f.fma(p, sine, q * cosine)
                    if style == "neox":
                        f.store(y + i * 4, first)
                        f.store(y + (i + half) * 4, second)
                    else:
                        order = [lane // 2 + (lane % 2) * lanes for lane in range(2 * lanes)]
                        f.store(y + i * 8, f.shuffle(first, second, order))
                if n_rot < head_dim:
                    with f.loop(n_rot, head_dim) as i:
                        f.store(y + i * 4, f.load(x + i * 4, F32))

    return kernel(f"rotate_{style}_{head_dim}_{n_rot}", RotateArguments, body)

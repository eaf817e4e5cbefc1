"""Operations that work row by row: norm, rotate, append to the cache, glu, add, scale, select, quantize.

Each thread takes its share of the rows, the same share in every kernel, so a run of these needs no barrier inside. Rows
are padded to whole vectors; the padding holds numbers that nothing reads.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Literal

from localllm.backends.cpu.jit import Kernel
from localllm.backends.cpu.kernels.common import (
    S_VALUES,
    X_VALUES,
    Arguments,
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
from localllm.backends.cpu.panels import Activations
from localllm.backends.cpu.simd import F32, I32, LANES, Function, Value, vector
from localllm.plan import Activation, GluActivation


def _add(a: Value, b: Value) -> Value:
    return a + b


class NormArg(IntEnum):
    X = 0
    X_STRIDE = 1
    Y = 2
    Y_STRIDE = 3
    WEIGHT = 4
    BIAS = 5  # 0 for none
    WIDTH = 6  # of one group
    GROUPS = 7
    EPS = 8
    ROWS = 9
    GROUP_STRIDE = 10  # stride in bytes between the weights of groups; 0 if all groups share them
    Q = 11  # y as other kinds of activations: three slots each, as `_quantize_if_wanted` says
    SIZE = 24


def norm(kind: Literal["rms", "layer"]) -> Kernel:
    """y = (x - mean) / sqrt(variance + eps) * weight + bias over each group; "rms" leaves the mean out."""

    def body(f: Function, a: Arguments, thread: Value, threads: Value) -> None:
        width = a.i64(NormArg.WIDTH)
        zero = f.zeros(f32x16)
        count = f.to_float(width)

        def load(x: Value, i: Value) -> Value:
            """16 floats from i, zero beyond the group."""
            left = f.splat(Value(f, f.builder.trunc((width - i).ir, I32)))
            return f.select(f.lane_numbers() < left, f.load(x + i * 4, f32x16), zero)

        def inside(i: Value, value: Value) -> Value:
            left = f.splat(Value(f, f.builder.trunc((width - i).ir, I32)))
            return f.select(f.lane_numbers() < left, value, zero)

        with own_rows(f, f.load_int(a.pointer(NormArg.ROWS)), thread, threads) as row:
            y_row = a.pointer(NormArg.Y) + row * a.i64(NormArg.Y_STRIDE)
            with f.loop(0, a.i64(NormArg.GROUPS)) as group:
                x = a.pointer(NormArg.X) + (row * a.i64(NormArg.X_STRIDE) + group * width * 4)
                y = y_row + group * width * 4
                own = group * a.i64(NormArg.GROUP_STRIDE)
                weight = a.pointer(NormArg.WEIGHT) + own
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
                scale = f.splat(f.constant(F32, 1.0) / f.sqrt(variance + a.f32(NormArg.EPS)))
                with f.loop(0, width, LANES) as i:
                    out = f.var(inside(i, (load(x, i) - center) * scale * f.load(weight + i * 4, f32x16)))
                    bias = a.i64(NormArg.BIAS)
                    with f.when(bias.differs(0)):
                        out.set(inside(i, out.get() + f.load(f.pointer(bias) + (own + i * 4), f32x16)))
                    f.store(y + i * 4, out.get())
            _quantize_if_wanted(f, a, y_row, row, NormArg.Q)

    return kernel(f"norm_{kind}", body)


_WRITE = {  # a row of float32 to a row of activations, and how many values one of them has
    Activations.BLOCKS: (quantize_row, X_VALUES),
    Activations.SUPER_BLOCKS: (quantize_super_row, S_VALUES),
    Activations.BFLOATS: (round_row, 1),
}


def _quantize_if_wanted(f: Function, a: Arguments, y: Value, row: Value, q_slot: int) -> None:
    """Write the new row as activations of every required kind, while it is in L1. Slots per kind, from q_slot on:
    address (0 for none), stride, values."""
    for kind, (write, values) in _WRITE.items():
        at = q_slot + 3 * kind
        with f.when(a.i64(at).differs(0)):
            write(f, y, a.pointer(at) + row * a.i64(at + 1), a.i64(at + 2) // values)


class QuantizeArg(IntEnum):
    X = 0
    X_STRIDE = 1
    ROWS = 2
    Q = 3
    SIZE = 16


def quantize() -> Kernel:
    """Activations of other kinds from float32 rows."""

    def body(f: Function, a: Arguments, thread: Value, threads: Value) -> None:
        with own_rows(f, f.load_int(a.pointer(QuantizeArg.ROWS)), thread, threads) as row:
            _quantize_if_wanted(f, a, a.pointer(QuantizeArg.X) + row * a.i64(QuantizeArg.X_STRIDE), row, QuantizeArg.Q)

    return kernel("quantize", body)


class GluArg(IntEnum):
    GATE = 0
    GATE_STRIDE = 1
    UP = 2
    UP_STRIDE = 3
    Y = 4
    Y_STRIDE = 5
    WIDTH = 6
    ROWS = 7
    Q = 8
    SIZE = 24


def glu(activation: GluActivation, row_gate: bool = False) -> Kernel:
    """y = activation(gate) * up; with `row_gate` one gate for the whole row."""

    def unit(f: Function, gate: Value, up: Value) -> Value:
        if activation == "swiglu_oai":
            seven = f.constant(f32x16, 7.0)  # as the left operand, so that a NaN stays one
            gate = f.fmin(seven, gate)
            up = f.fmin(seven, f.fmax(f.constant(f32x16, -7.0), up))
            return gate * sigmoid(f, gate * 1.702) * (up + 1.0)
        return activate(f, activation, gate) * up

    def body(f: Function, a: Arguments, thread: Value, threads: Value) -> None:
        with own_rows(f, f.load_int(a.pointer(GluArg.ROWS)), thread, threads) as row:
            gate = a.pointer(GluArg.GATE) + row * a.i64(GluArg.GATE_STRIDE)
            up = a.pointer(GluArg.UP) + row * a.i64(GluArg.UP_STRIDE)
            y = a.pointer(GluArg.Y) + row * a.i64(GluArg.Y_STRIDE)
            one = f.broadcast(gate, F32) if row_gate else None
            with f.loop(0, a.i64(GluArg.WIDTH), LANES) as i:
                g = one if one is not None else f.load(gate + i * 4, f32x16)
                f.store(y + i * 4, unit(f, g, f.load(up + i * 4, f32x16)))
            _quantize_if_wanted(f, a, y, row, GluArg.Q)

    return kernel(f"glu_{activation}{'_row' * row_gate}", body)


class PairArg(IntEnum):
    A = 0
    A_STRIDE = 1
    B = 2
    B_STRIDE = 3
    Y = 4
    Y_STRIDE = 5
    WIDTH = 6
    ROWS = 7
    FACTOR = 8
    SIZE = 16


def add() -> Kernel:
    """y = a + b."""

    def body(f: Function, a: Arguments, thread: Value, threads: Value) -> None:
        with own_rows(f, f.load_int(a.pointer(PairArg.ROWS)), thread, threads) as row:
            p, q, y = (a.pointer(base) + row * a.i64(base + 1) for base in (PairArg.A, PairArg.B, PairArg.Y))
            with f.loop(0, a.i64(PairArg.WIDTH), LANES) as i:
                f.store(y + i * 4, f.load(p + i * 4, f32x16) + f.load(q + i * 4, f32x16))

    return kernel("add", body)


def _map(f: Function, a: Arguments, thread: Value, threads: Value, function: Callable[[Value], Value]) -> None:
    """y = function(a), 16 values at a time."""
    with own_rows(f, f.load_int(a.pointer(PairArg.ROWS)), thread, threads) as row:
        p, y = (a.pointer(base) + row * a.i64(base + 1) for base in (PairArg.A, PairArg.Y))
        with f.loop(0, a.i64(PairArg.WIDTH), LANES) as i:
            f.store(y + i * 4, function(f.load(p + i * 4, f32x16)))


def scale() -> Kernel:
    """y = a * factor."""

    def body(f: Function, a: Arguments, thread: Value, threads: Value) -> None:
        factor = f.splat(a.f32(PairArg.FACTOR))
        _map(f, a, thread, threads, lambda x: x * factor)

    return kernel("scale", body)


def apply(name: Activation) -> Kernel:
    """y = activation(a)."""

    def body(f: Function, a: Arguments, thread: Value, threads: Value) -> None:
        _map(f, a, thread, threads, lambda x: activate(f, name, x))

    return kernel(f"apply_{name}", body)


def softcap() -> Kernel:
    """y = factor * tanh(a / factor)."""

    def body(f: Function, a: Arguments, thread: Value, threads: Value) -> None:
        cap = f.splat(a.f32(PairArg.FACTOR))
        _map(f, a, thread, threads, lambda x: cap * tanh(f, x / cap))

    return kernel("softcap", body)


class SelectArg(IntEnum):
    STEP = 0
    X = 1
    X_STRIDE = 2
    Y = 3
    Y_STRIDE = 4
    WIDTH = 5
    SIZE = 8


def select() -> Kernel:
    """y[l] = x[logit_rows[l]]."""

    def body(f: Function, a: Arguments, thread: Value, threads: Value) -> None:
        step = a.pointer(SelectArg.STEP)
        with own_rows(f, f.load_int(step, Step.LOGIT_ROWS), thread, threads) as row:
            source = f.load_i32(f.pointer(f.load_int(step, Step.LOGIT_INDEX)), row)
            x = a.pointer(SelectArg.X) + source * a.i64(SelectArg.X_STRIDE)
            y = a.pointer(SelectArg.Y) + row * a.i64(SelectArg.Y_STRIDE)
            with f.loop(0, a.i64(SelectArg.WIDTH), LANES) as i:
                f.store(y + i * 4, f.load(x + i * 4, f32x16))

    return kernel("select", body)


class RotateArg(IntEnum):
    STEP = 0
    X = 1
    X_STRIDE = 2
    Y = 3  # may be x
    Y_STRIDE = 4
    HEADS = 5
    TABLE = 6  # float32 (positions, 2, n_rot / 2): cosines, sines
    SIZE = 8


def rotate(style: Literal["norm", "neox"], head_dim: int, n_rot: int) -> Kernel:
    """Rotary embedding of every head: (a, b) -> (a cos - b sin, a sin + b cos)."""
    half = n_rot // 2
    lanes = next(n for n in (16, 8, 4, 2, 1) if half % n == 0)

    def body(f: Function, a: Arguments, thread: Value, threads: Value) -> None:
        step = a.pointer(RotateArg.STEP)
        row_type = vector(F32, lanes)
        with own_rows(f, f.load_int(step, Step.ROWS), thread, threads) as row:
            position = f.load_i32(f.pointer(f.load_int(step, Step.POSITIONS)), row)
            table = a.pointer(RotateArg.TABLE) + position * (8 * half)
            with f.loop(0, a.i64(RotateArg.HEADS)) as head:
                x = a.pointer(RotateArg.X) + (row * a.i64(RotateArg.X_STRIDE) + head * (4 * head_dim))
                y = a.pointer(RotateArg.Y) + (row * a.i64(RotateArg.Y_STRIDE) + head * (4 * head_dim))
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

    return kernel(f"rotate_{style}_{head_dim}_{n_rot}", body)

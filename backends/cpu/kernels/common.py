"""Code that kernels share: the step struct, division of rows and tasks, quantized activations, exp."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from llvmlite import ir

from localllm.backends.cpu.arguments import Address, Int64, Struct
from localllm.backends.cpu.isa import Isa
from localllm.backends.cpu.jit import Kernel
from localllm.backends.cpu.memory import LINE
from localllm.backends.cpu.simd import F32, I8, I16, I32, Function, Value, vector

f32x16 = vector(F32)
i32x16 = vector(I32)

# Activations are quantized in blocks of 32 values, value = scale * int8, or in super-blocks of 256. A block also holds
# the sums that formats need. `offset` is -128 * the sum of its integers: the initial value of a dot product with bytes
# q + 128. `sum` is scale * the sum of the integers: formats with minimums subtract minimum * sum.
ACTIVATION_BLOCK = np.dtype(
    [("values", "i1", 32), ("scale", "f4"), ("offset", "i4"), ("offset_half", "i4", 2), ("sum", "f4")]
)
# A super-block is summed in integers, so it holds integer sums: of every 16 and every 32 values, and the same sums
# times -32 and -128. A super-block is as long as eight blocks.
ACTIVATION_SUPER_BLOCK = np.dtype(
    [
        ("values", "i1", 256), ("scale", "f4"), ("offset", "i4"), ("sums_16", "i2", 16), ("sums_32", "i2", 8),
        ("offsets_16", "i4", 16), ("offsets_32", "i4", 8), ("unused", "i4", 2),
    ]
)  # fmt: skip


def _offsets(layout: np.dtype[np.void], *names: str) -> tuple[int, ...]:
    assert layout.fields is not None
    return tuple([layout.fields[name][1] for name in names])


X_BLOCK, X_VALUES = ACTIVATION_BLOCK.itemsize, 32
X_SCALE, X_OFFSET, X_OFFSET_HALF, X_SUM = _offsets(ACTIVATION_BLOCK, "scale", "offset", "offset_half", "sum")
S_BLOCK, S_VALUES = ACTIVATION_SUPER_BLOCK.itemsize, 256
S_SCALE, S_OFFSET, S_SUMS_16, S_SUMS_32, S_OFFSETS_16, S_OFFSETS_32 = _offsets(
    ACTIVATION_SUPER_BLOCK, "scale", "offset", "sums_16", "sums_32", "offsets_16", "offsets_32"
)
assert S_BLOCK * X_VALUES == X_BLOCK * S_VALUES


class Step(Struct):
    """The batch of a step."""

    rows: Int64
    logit_rows: Int64
    tokens: Address  # int32 (rows,), like the next three fields
    positions: Address
    slots: Address
    sequence: Address
    tables: Address  # int32 (sequences, table_stride / 4)
    table_stride: Int64  # stride of a block table in bytes
    logit_index: Address  # int32 (logit_rows,)
    runs: Int64  # number of sequences in the batch
    run_starts: Address  # int32 (runs + 1,): the first row of each sequence, then the number of rows
    # int32 (rows,): for non-causal attention, the last position of the row's sequence in the batch; for spans, the last
    # position of the row's span
    ends: Address
    axes: Address  # int32: the positions of rows on the axes of rotations
    axes_row: Int64  # stride between rows of `axes` in bytes
    axes_stride: Int64  # stride between the axes of a row in bytes; 0: all axes have the row's position


class TaskLine(Struct):
    """A thread's line of the counters of a kernel that is divided into tasks."""

    taken: Int64  # tasks taken from the front of the thread's run, and in the upper 32 bits from its back
    cycles: Int64  # time-stamp cycles after which the thread pauses; 0: it never does
    paused: Int64  # 1: the thread has paused, and there may be tasks left


Arguments = TypeVar("Arguments", bound=Struct)
Body = Callable[[Function, Arguments, Value, Value], None]  # arguments: function, kernel arguments, thread, threads


@dataclass(frozen=True, slots=True)
class PlanKernel(Kernel, Generic[Arguments]):
    """A kernel `int64 name(arguments, thread, threads)`, which the entries of a plan call."""

    arguments: type[Arguments]


def kernel(name: str, arguments: type[Arguments], body: Body[Arguments]) -> PlanKernel[Arguments]:
    """Return the kernel whose code `body` emits."""

    def emit(isa: Isa) -> ir.Module:
        f = Function(name, 3, isa)
        block, thread, threads = f.arguments
        body(f, arguments.at(f.pointer(block)), thread, threads)
        return f.finish()

    return PlanKernel(name, emit, arguments)


@contextmanager
def own_rows(f: Function, rows: Value, thread: Value, threads: Value) -> Iterator[Value]:
    """Loop over this thread's share of the rows.

    The share depends only on the number of rows, so consecutive row-wise kernels need no barrier between them.
    """
    with f.loop(thread * rows // threads, (thread + 1) * rows // threads) as row:
        yield row


@contextmanager
def tasks(f: Function, counters: Value, count: Value, thread: Value, threads: Value) -> Iterator[Value]:
    """Loop over task numbers.

    Each thread takes tasks from the front of its run, then from the back of other threads' runs. A thread thus reads
    memory in order as long as possible, and waits for at most one task. With a single shared counter each thread would
    jump in memory, which costs 4 to 9 % of a decode step on Zen 4. `counters` holds a zeroed cache line per thread,
    `TaskLine`. If the line has a number of cycles, the thread takes no further task after that time: the next run of
    the kernel with the same number of threads continues.
    """
    own_line = TaskLine.at(counters + thread * LINE)
    victim, cycles = f.var(f.i64(0)), own_line.cycles
    began = f.var(f.i64(0))
    with f.when(cycles.differs(0)):
        began.set(f.clock())
    with f.while_(lambda: victim.get() < threads):
        own = victim.get().equals(0)
        who = (thread + victim.get()) % threads
        first = who * count // threads
        size = (who + 1) * count // threads - first
        taken = f.atomic_add(counters + who * LINE, f.select(own, f.i64(1), f.i64(1 << 32)))
        front, back = taken & 0xFFFFFFFF, taken >> 32
        left = (front + back) < size
        with f.when(left):
            yield first + f.select(own, front, size - 1 - back)
        victim.set(f.select(left, victim.get(), victim.get() + 1))
        # A thread that found no task does not pause: then none is left.
        with f.when(left & cycles.differs(0)), f.when((f.clock() - began.get()) >= cycles):
            f.store(own_line.where(TaskLine.paused), f.i64(1), 8)
            victim.set(threads)


def lines_ahead(
    f: Function, lines: Sequence[Value], value_bytes: float = math.inf, rows: int = 1, name: str = ""
) -> Sequence[Value]:
    """Return the lines of weights of format `name` for which `isa.read_ahead` wants a prefetch."""
    every = f.isa.read_ahead.every(value_bytes, rows, name)
    return lines[::every] if every else ()


def read_ahead(f: Function, lines: Sequence[Value]) -> None:
    """Prefetch the memory after these lines of weights, as far ahead as `isa.read_ahead` says."""
    for line in lines:
        f.prefetch(line + f.isa.read_ahead.distance, locality=4 - f.isa.read_ahead.level)


def spread(items: Sequence[Value], step: int, steps: int) -> Sequence[Value]:
    """Return the part of `items` that belongs to `step`, if all steps take equal parts."""
    return items[step * len(items) // steps : (step + 1) * len(items) // steps]


def _scale_of(f: Function, sizes: Value) -> tuple[Value, Value]:
    """Return (127 / maximum, maximum / 127) from the bits of magnitudes.

    Compared as integers, the bits order like the floats, and NaN is above all floats, so it makes the scale NaN.
    """
    largest = f.bits(f.reduce(sizes, f.fmax), F32)
    inverse = f.select(largest > 0.0, f.constant(F32, 127.0) / largest, f.constant(F32, 0.0))
    # A subnormal maximum would have an infinite inverse, so its block becomes zero.
    inverse = f.select(inverse < 3.0e38, inverse, f.constant(F32, 0.0))
    return inverse, largest / f.constant(F32, 127.0)


def _size(f: Function, x: Value) -> Value:
    return f.bits(x, i32x16) & 0x7FFFFFFF


def _quantized_16(f: Function, x: Value, inverse: Value, out: Value) -> Value:
    """Quantize 16 floats and store the integers. Return the sum of the integers."""
    integers = f.to_int32(f.round_even(x * inverse))
    f.store(out, f.truncate(integers, I8))
    return f.reduce(integers, lambda p, q: p + q)


def quantize_block(f: Function, x: Value, out: Value) -> None:
    """Quantize 32 floats to an activation block: scale = max|x| / 127, int8 = round half even(x * 127 / max|x|)."""
    halves = f.load(x, f32x16), f.load(x + 64, f32x16)
    inverse, scale = _scale_of(f, f.fmax(_size(f, halves[0]), _size(f, halves[1])))
    wide = f.splat(inverse)
    total = f.constant(I32, 0)
    for half, values in enumerate(halves):
        part = _quantized_16(f, values, wide, out + 16 * half)
        f.store(out + X_OFFSET_HALF + 4 * half, part * -128)
        total = total + part
    f.store(out + X_SCALE, scale)
    f.store(out + X_OFFSET, total * -128)
    f.store(out + X_SUM, f.to_float(total) * scale)


def quantize_row(f: Function, x: Value, out: Value, blocks: Value) -> None:
    with f.loop(0, blocks) as block:
        quantize_block(f, x + block * (4 * X_VALUES), out + block * X_BLOCK)


def quantize_super_row(f: Function, x: Value, out: Value, blocks: Value) -> None:
    with f.loop(0, blocks) as block:
        _quantize_super_block(f, x + block * (4 * S_VALUES), out + block * S_BLOCK)


def _quantize_super_block(f: Function, x: Value, out: Value) -> None:
    """Quantize the 256 floats at x to an activation super-block, by the rule of `quantize_block`."""
    sizes = f.var(f.zeros(i32x16))
    with f.loop(0, 4 * S_VALUES, 64) as at:
        sizes.set(f.fmax(_size(f, f.load(x + at, f32x16)), sizes.get()))
    inverse, scale = _scale_of(f, sizes.get())
    wide = f.splat(inverse)
    total = f.var(f.constant(I32, 0))
    with f.loop(0, S_VALUES // 32) as group:
        both = f.constant(I32, 0)
        for half in range(2):
            number = group * 2 + half
            part = _quantized_16(f, f.load(x + number * 64, f32x16), wide, out + number * 16)
            f.store(out + (number * 2 + S_SUMS_16), f.truncate(part, I16))
            f.store(out + (number * 4 + S_OFFSETS_16), part * -32)
            both = both + part
        f.store(out + (group * 2 + S_SUMS_32), f.truncate(both, I16))
        f.store(out + (group * 4 + S_OFFSETS_32), both * -128)
        total.set(total.get() + both)
    f.store(out + S_SCALE, scale)
    f.store(out + S_OFFSET, total.get() * -128)


def round_row(f: Function, x: Value, out: Value, width: Value) -> None:
    """Round a float32 row to BF16.

    With `isa.bfloat_dot` the results are stored in pairs, like weights; otherwise they are stored as float32. A zero
    follows the last value, to complete a pair.
    """
    with f.loop(0, width, 32) as i:
        both = [f.to_bfloat(f.load(x + (i * 4 + at), f32x16)) for at in (0, 64)]
        if f.isa.bfloat_dot:
            first, second = (f.shuffle(both[0], both[1], range(odd, 32, 2)) for odd in range(2))
            f.store(out + i * 2, first | (second >> 16))
        else:
            for at, bits in zip((0, 64), both, strict=True):
                f.store(out + (i * 4 + at), bits)
    if f.isa.bfloat_dot:
        f.store(out + width // 2 * 4, f.constant(I16, 0))
    else:
        f.store(out + width * 4, f.constant(I32, 0))


# exp by range reduction to [-ln 2 / 2, ln 2 / 2] and the polynomial of Cephes' expf (relative error < 2e-7).
_LOG2E, _LN2_HIGH, _LN2_LOW = 1.44269504088896341, 0.693359375, -2.12194440e-4
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def exp(f: Function, x: Value) -> Value:
    """Return e^x of a float32 vector: 0 below -87, capped at the largest finite scale above 88; exp(0) is exactly 1."""
    y, power = _exp_parts(f, x)
    return f.select(x < -87.0, f.zeros(x.type), (y + 1.0) * power)


def expm1(f: Function, x: Value) -> Value:
    """Return e^x - 1 of a float32 vector, accurate near 0; -1 below -87."""
    y, power = _exp_parts(f, x)
    return f.fma(y, power, power - 1.0)


def _exp_parts(f: Function, x: Value) -> tuple[Value, Value]:
    """Return y and a power of two p with e^x = (1 + y) p, for x from -87 to 88."""
    type_ = x.type

    def c(number: float) -> Value:
        return f.constant(type_, number)

    clamped = f.fmin(c(88.0), f.fmax(c(-87.0), x))  # this operand order propagates NaN
    n = f.round_even(clamped * _LOG2E)
    r = f.fma(n, c(-_LN2_LOW), f.fma(n, c(-_LN2_HIGH), clamped))
    p = c(_EXP[0])
    for coefficient in _EXP[1:]:
        p = f.fma(p, r, c(coefficient))
    return f.fma(p, r * r, r), f.bits((f.to_int32(n) + 127) << 23, type_)


# log(1 + z) by the polynomial of Cephes' logf for z from sqrt(1/2) - 1 to sqrt(2) - 1.
_LOG = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
    2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip


def softplus(f: Function, x: Value) -> Value:
    """Return log(1 + e^x) as max(x, 0) + log(1 + t) with t = e^-|x|; 1 + t is halved first for large t."""

    def c(number: float) -> Value:
        return f.constant(x.type, number)

    t = exp(f, c(0.0) - f.abs(x))
    large = t > 0.4142135
    z = f.select(large, (t - 1.0) * 0.5, t)
    p = c(_LOG[0])
    for coefficient in _LOG[1:]:
        p = f.fma(p, z, c(coefficient))
    log = f.fma(z * z, f.fma(p, z, c(-0.5)), z) + f.select(large, c(0.6931471805599453), c(0.0))
    return f.fmax(c(0.0), x) + log


def sigmoid(f: Function, x: Value) -> Value:
    one = f.constant(x.type, 1.0)
    return one / (one + exp(f, f.zeros(x.type) - x))


def tanh(f: Function, x: Value) -> Value:
    """Return 1 - 2 / (e^2x + 1): absolute error below 2e-7, enough for soft caps."""
    one = f.constant(x.type, 1.0)
    return one - f.constant(x.type, 2.0) / (exp(f, x * 2.0) + one)


def _gelu(f: Function, x: Value) -> Value:
    """Return GELU in its tanh form, as x * sigmoid(1.5957691 (x + 0.044715 x^3))."""
    return x * sigmoid(f, f.fma(x * x * x, f.constant(x.type, 0.044715), x) * 1.5957691216057308)


# The complementary error function as a polynomial in t = 1 / (1 + _ERFC_T z), times e^-z^2 (Abramowitz and Stegun
# 7.1.26). Its absolute error is below 1.5e-7.
_ERFC_T = 0.3275911
_ERFC = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def _gelu_erf(f: Function, x: Value) -> Value:
    """Return GELU in its exact form: x - x h above 0, else x h, where h is half of erfc(|x| / sqrt(2))."""

    def c(number: float) -> Value:
        return f.constant(x.type, number)

    z = f.abs(x) * math.sqrt(0.5)
    t = c(1.0) / f.fma(z, c(_ERFC_T), c(1.0))
    p = c(_ERFC[0])
    for coefficient in _ERFC[1:]:
        p = f.fma(p, t, c(coefficient))
    y = x * (p * t * exp(f, c(0.0) - z * z) * 0.5)
    return f.select(x > 0.0, x - y, y)


def _relu(f: Function, x: Value) -> Value:
    return f.fmax(f.zeros(x.type), x)  # this operand order propagates NaN


def _relu2(f: Function, x: Value) -> Value:
    y = _relu(f, x)
    return y * y


def _signed_root(f: Function, x: Value) -> Value:
    zero = f.zeros(x.type)
    root = f.sqrt(f.fmax(f.constant(x.type, 1e-6), f.abs(x)))  # this operand order propagates NaN
    return f.select(x < 0.0, zero - root, f.select(x.equals(0.0), zero, root))


_ACTIVATIONS: dict[str, Callable[[Function, Value], Value]] = {
    "silu": lambda f, x: x * sigmoid(f, x),
    "gelu": _gelu,
    "gelu_erf": _gelu_erf,
    "gelu_quick": lambda f, x: x * sigmoid(f, x * 1.702),
    "sigmoid": sigmoid,
    "relu": _relu,
    "relu2": _relu2,
    "softplus": softplus,
    "exp": exp,
    "identity": lambda f, x: x,
    "signed_root": _signed_root,
}


def activate(f: Function, name: str, x: Value) -> Value:
    """Return an activation of x, by its name in a plan."""
    return _ACTIVATIONS[name](f, x)

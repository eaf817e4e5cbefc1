"""Operations on streams of hidden states: mix slices, match magnitudes, multiply by weights, subtract a threshold.

Rows are padded as in `rowwise`. The last vector of a slice extends into the next slice, which is written after it.
"""

from __future__ import annotations

from localllm.backends.cpu.arguments import Address, Float32, Int64, Output, Rows, RowsOrNone, Struct
from localllm.backends.cpu.kernels.common import PlanKernel, exp, f32x16, kernel, own_rows
from localllm.backends.cpu.simd import F32, I32, LANES, Function, Value


class MulArguments(Struct):
    x: Rows
    y: Output
    weight: Address
    width: Int64
    rows: Address


def mul() -> PlanKernel[MulArguments]:
    """Emit y = x * weight."""

    def body(f: Function, a: MulArguments, thread: Value, threads: Value) -> None:
        with own_rows(f, f.load_int(a.rows), thread, threads) as row:
            x, y = a.x.row(row), a.y.row(row)
            with f.loop(0, a.width, LANES) as i:
                f.store(y + i * 4, f.load(x + i * 4, f32x16) * f.load(a.weight + i * 4, f32x16))

    return kernel("weigh", MulArguments, body)


class MixArguments(Struct):
    x: Rows
    y: Output
    coefficients: Rows  # stride 0 if all rows share them
    base: RowsOrNone
    slices: Int64  # slices per row of x
    made: Int64  # slices per row of y
    width: Int64  # width of a slice
    rows: Address


def mix() -> PlanKernel[MixArguments]:
    """Emit slice i of y = slice i of base + the sum over j of coefficients[i * slices + j] * slice j of x."""

    def body(f: Function, a: MixArguments, thread: Value, threads: Value) -> None:
        slices, size = a.slices, a.width * 4
        with own_rows(f, f.load_int(a.rows), thread, threads) as row, f.loop(0, a.made) as made:
            x, y = a.x.row(row), a.y.row(row) + made * size
            coefficients = a.coefficients.row(row) + made * slices * 4
            with f.loop(0, a.width, LANES) as i:
                total = f.var(f.zeros(f32x16))
                with f.when(a.base.given):
                    total.set(f.load(a.base.row(row) + (made * size + i * 4), f32x16))
                with f.loop(0, slices) as j:
                    coefficient = f.broadcast(coefficients + j * 4, F32)
                    total.set(f.fma(f.load(x + (j * size + i * 4), f32x16), coefficient, total.get()))
                f.store(y + i * 4, total.get())

    return kernel("mix", MixArguments, body)


class BlendArguments(Struct):
    x: Rows
    last: Rows
    y: Output
    weight: Address
    slices: Int64  # slices per row of x
    width: Int64  # width of a slice
    eps: Float32
    rows: Address
    scratch: Rows  # the weights of the slices, per thread


def blend() -> PlanKernel[BlendArguments]:
    """Emit y = the mean of the slices of x and of `last`, weighted by the softmax of their scores."""

    def score(f: Function, a: BlendArguments, x: Value) -> Value:
        squares, total = f.var(f.zeros(f32x16)), f.var(f.zeros(f32x16))
        with f.loop(0, a.width, LANES) as i:
            value = _inside(f, a.width, i, f.load(x + i * 4, f32x16))
            squares.set(f.fma(value, value, squares.get()))
            weight = _inside(f, a.width, i, f.load(a.weight + i * 4, f32x16))
            total.set(f.fma(value, weight, total.get()))
        both = [f.reduce(each.get(), lambda p, q: p + q) for each in (squares, total)]
        return both[1] / f.sqrt(both[0] / f.to_float(a.width) + a.eps)

    def body(f: Function, a: BlendArguments, thread: Value, threads: Value) -> None:
        size, weights, slices = a.width * 4, a.scratch.row(thread), a.slices
        with own_rows(f, f.load_int(a.rows), thread, threads) as row:
            x, last, y = a.x.row(row), a.last.row(row), a.y.row(row)
            own = score(f, a, last)
            largest = f.var(own)
            with f.loop(0, slices) as j:
                found = score(f, a, x + j * size)
                f.store(weights + j * 4, found)
                largest.set(f.fmax(found, largest.get()))
            of_last = exp(f, f.splat(own - largest.get()))
            total = f.var(of_last)
            with f.loop(0, slices) as j:
                weight = exp(f, f.broadcast(weights + j * 4, F32) - f.splat(largest.get()))
                f.store(weights + j * 4, f.lane(weight, 0))
                total.set(total.get() + weight)
            with f.loop(0, a.width, LANES) as i:
                sums = f.var(f.load(last + i * 4, f32x16) * of_last)
                with f.loop(0, slices) as j:
                    weight = f.broadcast(weights + j * 4, F32)
                    sums.set(f.fma(f.load(x + (j * size + i * 4), f32x16), weight, sums.get()))
                f.store(y + i * 4, sums.get() / total.get())

    return kernel("blend", BlendArguments, body)


class MatchArguments(Struct):
    x: Rows
    y: Output
    like: Rows
    like_width: Int64
    width: Int64  # width of a slice
    groups: Int64
    eps: Float32
    rows: Address


def match() -> PlanKernel[MatchArguments]:
    """Emit y = each slice of x, scaled by the root of: mean square of `like` / (mean square of the slice, or eps)."""

    def body(f: Function, a: MatchArguments, thread: Value, threads: Value) -> None:
        size = a.width * 4
        with own_rows(f, f.load_int(a.rows), thread, threads) as row:
            zero = f.constant(F32, 0.0)
            wanted = _squares(f, a.like.row(row), a.like_width, zero) / f.to_float(a.like_width)
            with f.loop(0, a.groups) as group:
                x, y = a.x.row(row) + group * size, a.y.row(row) + group * size
                own = _squares(f, x, a.width, zero) / f.to_float(a.width)
                factor = f.splat(f.sqrt(wanted / f.fmax(a.eps, own)))
                with f.loop(0, a.width, LANES) as i:
                    f.store(y + i * 4, f.load(x + i * 4, f32x16) * factor)

    return kernel("match", MatchArguments, body)


class GaussianTopKArguments(Struct):
    x: Rows
    y: Output
    width: Int64
    deviations: Float32
    rows: Address


def gaussian_top_k() -> PlanKernel[GaussianTopKArguments]:
    """Emit y = max(x - (mean + deviations * standard deviation), 0)."""

    def body(f: Function, a: GaussianTopKArguments, thread: Value, threads: Value) -> None:
        zero = f.zeros(f32x16)
        with own_rows(f, f.load_int(a.rows), thread, threads) as row:
            x, y = a.x.row(row), a.y.row(row)
            total = f.var(zero)
            with f.loop(0, a.width, LANES) as i:
                total.set(total.get() + _inside(f, a.width, i, f.load(x + i * 4, f32x16)))
            mean = f.reduce(total.get(), lambda p, q: p + q) / f.to_float(a.width)
            deviation = f.sqrt(_squares(f, x, a.width, mean) / f.to_float(a.width - 1))
            cutoff = f.splat(f.fma(a.deviations, deviation, mean))
            with f.loop(0, a.width, LANES) as i:
                f.store(y + i * 4, f.fmax(zero, f.load(x + i * 4, f32x16) - cutoff))  # this order propagates NaN

    return kernel("excess", GaussianTopKArguments, body)


def _squares(f: Function, x: Value, width: Value, mean: Value) -> Value:
    """Return the sum of (x - mean)^2 over a row."""
    center, squares = f.splat(mean), f.var(f.zeros(f32x16))
    with f.loop(0, width, LANES) as i:
        value = _inside(f, width, i, f.load(x + i * 4, f32x16) - center)
        squares.set(f.fma(value, value, squares.get()))
    return f.reduce(squares.get(), lambda p, q: p + q)


def _inside(f: Function, width: Value, i: Value, value: Value) -> Value:
    """Return 16 values from index i on; lanes beyond the width are zero."""
    left = f.splat(Value(f, f.builder.trunc((width - i).ir, I32)))
    return f.select(f.lane_numbers() < left, value, f.zeros(f32x16))

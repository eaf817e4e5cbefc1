"""Coefficients of hyper-connections, as `plan.HyperConnection` defines them: a few per row.

A vector holds the coefficients of one part, or of one row of the mixing matrix. Sums run over the streams in order.
"""

from __future__ import annotations

from functools import reduce
from operator import add

from localllm.backends.cpu.arguments import Address, Float32, Int64, Output, Rows, Struct
from localllm.backends.cpu.kernels.common import PlanKernel, exp, f32x16, kernel, own_rows, sigmoid
from localllm.backends.cpu.simd import F32, LANES, Function, Value


class HyperConnectionArguments(Struct):
    x: Rows
    y: Output
    scale: Address
    bias: Address
    eps: Float32
    magnitude: Float32
    written_eps: Float32
    iterations: Int64
    rows: Address


def hyper_connection(streams: int, parts: int) -> PlanKernel[HyperConnectionArguments]:
    """Emit the coefficients of `streams` streams, at most 16."""
    assert streams <= LANES, f"{streams} streams"

    def body(f: Function, a: HyperConnectionArguments, thread: Value, threads: Value) -> None:
        eps = f.splat(a.eps)
        scales = [f.broadcast(a.scale + 4 * part, F32) for part in range(parts)]
        with own_rows(f, f.load_int(a.rows), thread, threads) as row:
            x, y = a.x.row(row), a.y.row(row)

            def numbers(first: int, part: int) -> Value:
                at = 4 * first
                given, bias = (_few(f, place + at, streams) for place in (x, a.bias))
                return f.fma(given, scales[part], bias)

            f.store_lanes(y, sigmoid(f, numbers(0, 0)) + eps, streams)
            if parts > 1:
                written = f.fma(f.splat(a.magnitude), sigmoid(f, numbers(streams, 1)), f.splat(a.written_eps))
                f.store_lanes(y + 4 * streams, written, streams)
            if parts > 2:
                mixing = [_softmax(f, numbers((2 + j) * streams, 2), streams) + eps for j in range(streams)]
                for j, weights in enumerate(_balanced(f, a, mixing, streams, eps)):
                    for i in range(streams):
                        f.store(y + 4 * (2 * streams + i * streams + j), f.lane(weights, i))

    return kernel(f"connect_{streams}_{parts}", HyperConnectionArguments, body)


def _few(f: Function, place: Value, count: int) -> Value:
    """Load `count` floats from any address into a vector, padded with zeros. Memory after the floats is not read."""
    found = f.zeros(f32x16)
    for lane in range(count):
        found = f.select(f.lane_numbers().equals(lane), f.broadcast(place + 4 * lane, F32), found)
    return found


def _sum(f: Function, x: Value, count: int) -> Value:
    """Return the sum of the first `count` lanes, in every lane."""
    return f.splat(reduce(add, [f.lane(x, lane) for lane in range(count)]))


def _softmax(f: Function, z: Value, count: int) -> Value:
    largest = reduce(f.fmax, [f.lane(z, lane) for lane in range(count)])
    e = exp(f, z - f.splat(largest))
    return e / _sum(f, e, count)


def _balanced(f: Function, a: HyperConnectionArguments, mixing: list[Value], streams: int, eps: Value) -> list[Value]:
    """Divide the columns by their sums, then rows and columns in alternation. Each vector is a row."""
    held = [f.var(weights) for weights in mixing]
    with f.loop(0, a.iterations) as number:
        with f.when(number > 0):
            for each in held:
                each.set(each.get() / (_sum(f, each.get(), streams) + eps))
        total = reduce(add, [each.get() for each in held]) + eps
        for each in held:
            each.set(each.get() / total)
    return [each.get() for each in held]

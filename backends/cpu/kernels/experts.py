"""Mixture of experts: choose, sort rows by expert, multiply, and add up.

A pair is a row and one of its chosen experts, number row * used + choice. `route` chooses; `group` lists the pairs of
each expert; `multiply` runs the kernels of linear.py over the rows of each expert that has any, so only active experts
are read; `combine` adds a row's pairs in order of choice, so the sum does not depend on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from operator import add

from localllm.backends.cpu.jit import Kernel
from localllm.backends.cpu.kernels.common import Arguments, exp, f32x16, kernel, own_rows, sigmoid, tasks
from localllm.backends.cpu.kernels.linear import LinearArg, Place, ways
from localllm.backends.cpu.simd import F32, I32, LANES, Function, Value
from localllm.backends.cpu.unpack import panel_of
from localllm.plan import Gating

LOWEST = -3.0e38
UNROLLED = 32  # chosen experts per row; no known model uses more
SMALLEST_SUM = 2.0**-14  # minimum divisor of normalized weights


class RouteArg(IntEnum):
    LOGITS = 0
    LOGITS_STRIDE = 1
    CHOICES = 2  # int32 (rows, used) experts
    WEIGHTS = 3  # float32 (rows, used)
    EXPERTS = 4
    SCALE = 5
    BIAS = 6  # float32 (experts,), 0 for none
    ROWS = 7
    SCRATCH = 8  # float32: for each thread, twice the padded number of experts
    SCRATCH_STRIDE = 9
    SIZE = 16


def route(gating: Gating, used: int, normalize: bool) -> Kernel:
    """Choose `used` experts per row and weigh them, as `plan.Experts` says."""

    def body(f: Function, a: Arguments, thread: Value, threads: Value) -> None:
        experts = a.i64(RouteArg.EXPERTS)
        weights = a.pointer(RouteArg.SCRATCH) + thread * a.i64(RouteArg.SCRATCH_STRIDE)
        ranks = weights + a.i64(RouteArg.SCRATCH_STRIDE) // 2
        bias = a.i64(RouteArg.BIAS)
        with own_rows(f, f.load_int(a.pointer(RouteArg.ROWS)), thread, threads) as row:
            logits = a.pointer(RouteArg.LOGITS) + row * a.i64(RouteArg.LOGITS_STRIDE)
            _weigh_all(f, gating, logits, weights, experts)
            with f.loop(0, experts, LANES) as i:
                rank = f.var(f.load(weights + i * 4, f32x16))
                with f.when(bias.differs(0)):
                    rank.set(rank.get() + f.load(f.pointer(bias) + i * 4, f32x16))
                f.store(ranks + i * 4, f.select(_inside(f, experts, i), rank.get(), f.constant(f32x16, LOWEST)))
            choices = a.pointer(RouteArg.CHOICES) + row * (4 * used)
            chosen_weights = a.pointer(RouteArg.WEIGHTS) + row * (4 * used)
            with f.loop(0, used) as n:
                best, at = f.var(f.constant(F32, LOWEST)), f.var(f.i64(0))
                with f.loop(0, experts) as e:
                    rank_e = f.load(ranks + e * 4, F32)
                    with f.when(rank_e > best.get()):
                        best.set(rank_e)
                        at.set(e)
                f.store(choices + n * 4, Value(f, f.builder.trunc(at.get().ir, I32)))
                f.store(chosen_weights + n * 4, f.load(weights + at.get() * 4, F32))
                f.store(ranks + at.get() * 4, f.constant(F32, LOWEST))
            _finish_weights(f, gating, chosen_weights, used, normalize, a.f32(RouteArg.SCALE))

    return kernel(f"route_{gating}_{used}{'_normalized' * normalize}", body)


def _inside(f: Function, count: Value, i: Value) -> Value:
    left = f.splat(Value(f, f.builder.trunc((count - i).ir, I32)))
    return f.lane_numbers() < left


def _weigh_all(f: Function, gating: Gating, logits: Value, weights: Value, experts: Value) -> None:
    """Every expert's weight: its probability, its sigmoid, or the logit itself."""
    if gating == "softmax":
        largest = f.var(f.constant(f32x16, LOWEST))
        with f.loop(0, experts, LANES) as i:
            value = f.select(_inside(f, experts, i), f.load(logits + i * 4, f32x16), f.constant(f32x16, LOWEST))
            largest.set(f.fmax(value, largest.get()))
        top = f.splat(f.reduce(largest.get(), f.fmax))
        total = f.var(f.zeros(f32x16))
        with f.loop(0, experts, LANES) as i:
            value = exp(f, f.load(logits + i * 4, f32x16) - top)
            value = f.select(_inside(f, experts, i), value, f.zeros(f32x16))
            f.store(weights + i * 4, value)
            total.set(total.get() + value)
        inverse = f.splat(f.constant(F32, 1.0) / f.reduce(total.get(), lambda p, q: p + q))
        with f.loop(0, experts, LANES) as i:
            f.store(weights + i * 4, f.load(weights + i * 4, f32x16) * inverse)
        return
    with f.loop(0, experts, LANES) as i:
        value = f.load(logits + i * 4, f32x16)
        f.store(weights + i * 4, sigmoid(f, value) if gating == "sigmoid" else value)


def _finish_weights(f: Function, gating: Gating, chosen: Value, used: int, normalize: bool, scale: Value) -> None:
    """Normalize the chosen weights in place. Few are unrolled; many use a loop, whatever a file asks for."""
    if used > UNROLLED:
        _finish_many(f, gating, chosen, used, normalize, scale)
        return
    values = [f.load(chosen + 4 * n, F32) for n in range(used)]
    if gating == "softmax_of_chosen":
        top = values[0]
        for value in values[1:]:
            top = f.fmax(top, value)
        values = [f.lane(exp(f, f.splat(value - top, 4)), 0) for value in values]
        total = values[0]
        for value in values[1:]:
            total = total + value
        values = [value / total for value in values]
    if normalize:
        total = values[0]
        for value in values[1:]:
            total = total + value
        total = f.fmax(total, f.constant(F32, SMALLEST_SUM))
        values = [value / total for value in values]
    for n, value in enumerate(values):
        f.store(chosen + 4 * n, value * scale)


def _finish_many(f: Function, gating: Gating, chosen: Value, used: int, normalize: bool, scale: Value) -> None:
    """The same numbers, bit for bit, one after the other in memory."""

    def weight(n: int | Value) -> Value:
        return f.load(chosen + n * 4, F32)

    def change(make: Callable[[Value], Value]) -> None:
        with f.loop(0, used) as n:
            f.store(chosen + n * 4, make(weight(n)))

    def fold(pick: Callable[[Value, Value], Value]) -> Value:
        found = f.var(weight(0))
        with f.loop(1, used) as n:
            found.set(pick(found.get(), weight(n)))
        return found.get()

    if gating == "softmax_of_chosen":
        top = fold(f.fmax)
        change(lambda value: f.lane(exp(f, f.splat(value - top, 4)), 0))
        total = fold(add)
        change(lambda value: value / total)
    if normalize:
        least = f.fmax(fold(add), f.constant(F32, SMALLEST_SUM))
        change(lambda value: value / least)
    change(lambda value: value * scale)


class GroupArg(IntEnum):
    CHOICES = 0
    EXPERTS = 1
    USED = 2
    ROWS = 3
    STARTS = 4  # int64 (experts + 1): where an expert's pairs begin in ORDER; the last is their number
    ORDER = 5  # int64 (pairs,)
    SIZE = 8


def group() -> Kernel:
    """List the pairs of each expert in order of row: a counting sort, by thread 0."""

    def body(f: Function, a: Arguments, thread: Value, threads: Value) -> None:
        with f.when(thread.equals(0)):
            experts = a.i64(GroupArg.EXPERTS)
            pairs = f.load_int(a.pointer(GroupArg.ROWS)) * a.i64(GroupArg.USED)
            starts, order, choices = (a.pointer(n) for n in (GroupArg.STARTS, GroupArg.ORDER, GroupArg.CHOICES))
            with f.loop(0, experts + 1) as e:
                f.store(starts + e * 8, f.i64(0), 8)
            with f.loop(0, pairs) as pair:
                slot = starts + (f.load_i32(choices, pair) + 1) * 8
                f.store(slot, f.load_int(slot) + 1, 8)
            with f.loop(0, experts) as e:
                f.store(starts + (e + 1) * 8, f.load_int(starts, e) + f.load_int(starts, e + 1), 8)
            with f.loop(0, pairs) as pair:  # starts[e] advances to the end of e, which is the start of e + 1
                slot = starts + f.load_i32(choices, pair) * 8
                at = f.load_int(slot)
                f.store(order + at * 8, pair, 8)
                f.store(slot, at + 1, 8)
            last = f.var(f.i64(0))
            with f.loop(0, experts) as e:  # and back
                end = f.load_int(starts, e)
                f.store(starts + e * 8, last.get(), 8)
                last.set(end)

    return kernel("group", body)


class ExpertArg(IntEnum):
    """Slots after those of LinearArg."""

    EXPERTS = LinearArg.SIZE
    EXPERT_BYTES = LinearArg.SIZE + 1  # stride from one expert's panels to the next's
    STARTS = LinearArg.SIZE + 2
    ORDER = LinearArg.SIZE + 3
    PAIRS_PER_ROW = LinearArg.SIZE + 4  # of x: `used` where pairs read their row, 1 where they read their own
    SCALES = LinearArg.SIZE + 5  # float32 (experts,), 0 for none
    BIAS_STRIDE = LinearArg.SIZE + 6
    SIZE = LinearArg.SIZE + 8


def multiply(format_name: str) -> Kernel:
    """y[pair] = scale[e] * (W[e] x) + bias[e] for every pair, e its expert."""
    panel = panel_of(format_name)

    def body(f: Function, a: Arguments, thread: Value, threads: Value) -> None:
        starts, order = a.pointer(ExpertArg.STARTS), a.pointer(ExpertArg.ORDER)
        panels, chunk = a.i64(LinearArg.PANELS), a.i64(LinearArg.CHUNK)
        per_expert = (panels + chunk - 1) // chunk
        with tasks(f, a.pointer(LinearArg.COUNTER), per_expert * a.i64(ExpertArg.EXPERTS), thread, threads) as task:
            expert = task // per_expert
            begin = f.load_int(starts, expert)
            rows = f.load_int(starts, expert + 1) - begin
            scales, bias = a.i64(ExpertArg.SCALES), a.i64(LinearArg.BIAS)
            scale = f.var(f.constant(F32, 1.0))
            with f.when(scales.differs(0)):
                scale.set(f.load(f.pointer(scales) + expert * 4, F32))
            place = Place(
                a.pointer(LinearArg.WEIGHTS) + expert * a.i64(ExpertArg.EXPERT_BYTES),
                lambda row: (
                    a.pointer(LinearArg.X)
                    + f.load_int(order, begin + row) // a.i64(ExpertArg.PAIRS_PER_ROW) * a.i64(LinearArg.X_STRIDE)
                ),
                lambda row: a.pointer(LinearArg.Y) + f.load_int(order, begin + row) * a.i64(LinearArg.Y_STRIDE),
                scale.get(),
                f.select(bias.differs(0), bias + expert * a.i64(ExpertArg.BIAS_STRIDE), f.i64(0)),
            )
            first = task % per_expert * chunk
            with f.when(rows > 0):
                for wanted, _, part in ways(f, a, panel, thread, rows):
                    with f.when(wanted):
                        part(place, rows, first, f.minimum(first + chunk, panels))

    return kernel(f"experts_{format_name}", body)


class CombineArg(IntEnum):
    X = 0  # (pairs, width)
    X_STRIDE = 1
    Y = 2
    Y_STRIDE = 3
    WEIGHTS = 4
    USED = 5
    WIDTH = 6
    ROWS = 7
    SIZE = 8


def combine() -> Kernel:
    """y[row] = sum over its pairs, in order of choice, of weight * x[pair]."""

    def body(f: Function, a: Arguments, thread: Value, threads: Value) -> None:
        used = a.i64(CombineArg.USED)
        with own_rows(f, f.load_int(a.pointer(CombineArg.ROWS)), thread, threads) as row:
            y = a.pointer(CombineArg.Y) + row * a.i64(CombineArg.Y_STRIDE)
            with f.loop(0, a.i64(CombineArg.WIDTH), LANES) as i:
                total = f.var(f.zeros(f32x16))
                with f.loop(row * used, (row + 1) * used) as pair:
                    weight = f.broadcast(a.pointer(CombineArg.WEIGHTS) + pair * 4, F32)
                    x = f.load(a.pointer(CombineArg.X) + (pair * a.i64(CombineArg.X_STRIDE) + i * 4), f32x16)
                    total.set(f.fma(x, weight, total.get()))
                f.store(y + i * 4, total.get())

    return kernel("combine", body)

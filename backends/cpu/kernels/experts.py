"""Mixture of experts: route, sort rows by expert, multiply, add.

A pair is a row and one of its selected experts, with number row * used + choice. `route` selects experts; `group` lists
the pairs of each expert; `multiply` runs the kernels of linear.py on the rows of each expert and skips experts without
rows; `combine` adds a row's pairs in order of selection, so its sum does not depend on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import add

from localllm.backends.cpu.arguments import (
    Address,
    AddressOrZero,
    Float32,
    Int64,
    Output,
    Rows,
    RowsOrNone,
    Struct,
    Target,
)  # fmt: skip
from localllm.backends.cpu.kernels.common import PlanKernel, exp, f32x16, kernel, own_rows, sigmoid, softplus, tasks
from localllm.backends.cpu.kernels.linear import Operands, Product, ways
from localllm.backends.cpu.simd import F32, I32, I64, LANES, Function, Value
from localllm.backends.cpu.unpack import panel_of
from localllm.plan import Gating

LOWEST = -3.0e38
UNROLLED = 32  # maximum number of selected experts per row in unrolled code; no known model uses more
SMALLEST_SUM = 2.0**-14  # minimum divisor of normalized weights
CLOSE = 0.02  # threshold of the sparse mixer, as `plan.Experts` defines it


class RouteArguments(Struct):
    logits: Rows
    choices: Target  # int32 (rows, used): experts
    weights: Target  # float32 (rows, used)
    experts: Int64
    scale: Float32
    bias: AddressOrZero  # float32 (experts,)
    rows: Address  # address of the number of rows
    scratch: Rows  # one row per thread: three times the padded number of experts, float32
    groups: Int64
    groups_used: Int64
    given: RowsOrNone  # float32 (rows, used): experts selected by the plan instead of the router


def route(gating: Gating, used: int, normalize: bool, grouped: bool, given: bool = False) -> PlanKernel[RouteArguments]:
    """Select `used` experts per row and compute their weights, as `plan.Experts` defines them."""

    def body(f: Function, a: RouteArguments, thread: Value, threads: Value) -> None:
        experts = a.experts
        weights = a.scratch.row(thread)
        ranks = weights + a.scratch.stride // 3
        bias = a.bias
        with own_rows(f, f.load_int(a.rows), thread, threads) as row:
            logits = a.logits.row(row)
            _weigh_all(f, gating, logits, weights, experts)
            with f.loop(0, experts, LANES) as i:
                rank = f.var(f.load(weights + i * 4, f32x16))
                with f.when(bias.differs(0)):
                    rank.set(rank.get() + f.load(f.pointer(bias) + i * 4, f32x16))
                f.store(ranks + i * 4, f.select(_inside(f, experts, i), rank.get(), f.constant(f32x16, LOWEST)))
            if grouped:
                _keep_best_groups(f, gating, a, ranks, ranks + a.scratch.stride // 3)
            choices = a.choices + row * (4 * used)
            chosen_weights = a.weights + row * (4 * used)
            with f.loop(0, used) as n:
                best, at = f.var(f.constant(F32, LOWEST)), f.var(f.i64(0))
                if given:
                    at.set(f.widen(f.to_int32(f.load(a.given.row(row) + n * 4, F32)), I64))
                else:
                    with f.loop(0, experts) as e:
                        rank_e = f.load(ranks + e * 4, F32)
                        with f.when(rank_e > best.get()):
                            best.set(rank_e)
                            at.set(e)
                f.store(choices + n * 4, Value(f, f.builder.trunc(at.get().ir, I32)))
                f.store(ranks + at.get() * 4, f.constant(F32, LOWEST))
                weight = f.load(weights + at.get() * 4, F32)
                if gating == "sparse_mixer":
                    weight = _share_of_close(f, weight, weights, ranks, experts)
                f.store(chosen_weights + n * 4, weight)
            _finish_weights(f, gating, chosen_weights, used, normalize, a.scale)

    options = "_normalized" * normalize + "_grouped" * grouped + "_given" * given
    return kernel(f"route_{gating}_{used}{options}", RouteArguments, body)


def _share_of_close(f: Function, own: Value, logits: Value, ranks: Value, experts: Value) -> Value:
    """Return the softmax of a selected logit over itself and the close logits of experts not yet selected."""
    total = f.var(own - own + 1.0)
    with f.loop(0, experts) as e:
        logit = f.load(logits + e * 4, F32)
        close = own - logit <= f.fmax(f.abs(logit), own) * CLOSE
        with f.when((f.load(ranks + e * 4, F32) > LOWEST) & close):
            total.set(total.get() + f.lane(exp(f, f.splat(logit - own, 4)), 0))
    return f.constant(F32, 1.0) / total.get()


def _keep_best_groups(f: Function, gating: Gating, a: RouteArguments, ranks: Value, scores: Value) -> None:
    """Set the ranks of experts outside the best groups to LOWEST. `scores` is scratch for one float per group."""
    size, lowest = a.experts // a.groups, f.constant(F32, LOWEST)
    with f.loop(0, a.groups) as group:
        best, second = f.var(lowest), f.var(lowest)
        with f.loop(group * size, (group + 1) * size) as e:
            rank = f.load(ranks + e * 4, F32)
            higher = rank > best.get()
            next_ = f.select(rank > second.get(), rank, second.get())
            second.set(f.select(higher, best.get(), next_))
            best.set(f.select(higher, rank, best.get()))
        both = f.select(second.get() > LOWEST, best.get() + second.get(), best.get())
        f.store(scores + group * 4, best.get() if gating == "softmax" else both)
    with f.loop(0, a.groups) as group:
        own, better = f.load(scores + group * 4, F32), f.var(f.i64(0))
        with f.loop(0, a.groups) as other:
            score = f.load(scores + other * 4, F32)
            ahead = (score > own) | (score.equals(own) & (other < group))
            better.set(better.get() + f.select(ahead, f.i64(1), f.i64(0)))
        with f.when(better.get() >= a.groups_used), f.loop(group * size, (group + 1) * size) as e:
            f.store(ranks + e * 4, lowest)


def _inside(f: Function, count: Value, i: Value) -> Value:
    left = f.splat(Value(f, f.builder.trunc((count - i).ir, I32)))
    return f.lane_numbers() < left


def _weigh_all(f: Function, gating: Gating, logits: Value, weights: Value, experts: Value) -> None:
    """Compute the weight of every expert: its probability, its sigmoid, or the logit itself."""
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
        if gating == "sigmoid":
            value = sigmoid(f, value)
        elif gating == "sqrt_softplus":
            value = f.sqrt(softplus(f, value))
        f.store(weights + i * 4, value)


def _finish_weights(f: Function, gating: Gating, chosen: Value, used: int, normalize: bool, scale: Value) -> None:
    """Normalize the selected weights in place. A short list is unrolled, a long list is a loop."""
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
    elif gating == "sigmoid_of_chosen":
        values = [_sigmoid(f, value) for value in values]
    if normalize:
        total = values[0]
        for value in values[1:]:
            total = total + value
        total = f.fmax(total, f.constant(F32, SMALLEST_SUM))
        values = [value / total for value in values]
    for n, value in enumerate(values):
        f.store(chosen + 4 * n, value * scale)


def _finish_many(f: Function, gating: Gating, chosen: Value, used: int, normalize: bool, scale: Value) -> None:
    """Compute the same weights, bit for bit, in a loop over memory."""

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
    elif gating == "sigmoid_of_chosen":
        change(lambda value: _sigmoid(f, value))
    if normalize:
        least = f.fmax(fold(add), f.constant(F32, SMALLEST_SUM))
        change(lambda value: value / least)
    change(lambda value: value * scale)


def _sigmoid(f: Function, value: Value) -> Value:
    return f.lane(sigmoid(f, f.splat(value, 4)), 0)


class GroupArguments(Struct):
    choices: Address
    experts: Int64
    used: Int64
    rows: Address  # address of the number of rows
    starts: Target  # int64 (experts + 1): start of each expert's pairs in `order`, then the number of pairs
    order: Target  # int64 (pairs,)


def group() -> PlanKernel[GroupArguments]:
    """List the pairs of each expert in order of row. Thread 0 does a counting sort."""

    def body(f: Function, a: GroupArguments, thread: Value, threads: Value) -> None:
        with f.when(thread.equals(0)):
            experts = a.experts
            pairs = f.load_int(a.rows) * a.used
            starts, order, choices = a.starts, a.order, a.choices
            with f.loop(0, experts + 1) as e:
                f.store(starts + e * 8, f.i64(0), 8)
            with f.loop(0, pairs) as pair:
                slot = starts + (f.load_i32(choices, pair) + 1) * 8
                f.store(slot, f.load_int(slot) + 1, 8)
            with f.loop(0, experts) as e:
                f.store(starts + (e + 1) * 8, f.load_int(starts, e) + f.load_int(starts, e + 1), 8)
            with f.loop(0, pairs) as pair:  # starts[e] advances to the end of e's pairs, the start of the next expert's
                slot = starts + f.load_i32(choices, pair) * 8
                at = f.load_int(slot)
                f.store(order + at * 8, pair, 8)
                f.store(slot, at + 1, 8)
            last = f.var(f.i64(0))
            with f.loop(0, experts) as e:  # shift the starts back by one expert
                end = f.load_int(starts, e)
                f.store(starts + e * 8, last.get(), 8)
                last.set(end)

    return kernel("group", GroupArguments, body)


class ExpertsArguments(Product):
    experts: Int64
    expert_bytes: Int64  # stride between the panels of neighbouring experts
    starts: Address
    order: Address
    pairs_per_row: Int64  # pairs that read the same row of x: `used` or 1
    scales: AddressOrZero  # float32 (experts,)
    bias_stride: Int64


def multiply(format_name: str) -> PlanKernel[ExpertsArguments]:
    """Emit y[pair] = scale[e] * (W[e] x) + bias[e] for every pair; e is the pair's expert."""
    panel = panel_of(format_name)

    def body(f: Function, a: ExpertsArguments, thread: Value, threads: Value) -> None:
        starts, order = a.starts, a.order
        panels, chunk = a.panels, a.chunk
        per_expert = (panels + chunk - 1) // chunk
        with tasks(f, a.counter, per_expert * a.experts, thread, threads) as task:
            expert = task // per_expert
            begin = f.load_int(starts, expert)
            rows = f.load_int(starts, expert + 1) - begin
            scales, bias = a.scales, a.bias
            scale = f.var(f.constant(F32, 1.0))
            with f.when(scales.differs(0)):
                scale.set(f.load(f.pointer(scales) + expert * 4, F32))
            place = Operands(
                a.weights + expert * a.expert_bytes,
                lambda row: a.x.address + f.load_int(order, begin + row) // a.pairs_per_row * a.x.stride,
                lambda row: a.y.address + f.load_int(order, begin + row) * a.y.stride,
                scale.get(),
                f.select(bias.differs(0), bias + expert * a.bias_stride, f.i64(0)),
            )
            first = task % per_expert * chunk
            with f.when(rows > 0):
                for wanted, _, part in ways(f, a, panel, thread, rows):
                    with f.when(wanted):
                        part(place, rows, first, f.minimum(first + chunk, panels))

    return kernel(f"experts_{format_name}", ExpertsArguments, body)


class CombineArguments(Struct):
    x: Rows  # (pairs, width)
    y: Output
    weights: Address
    used: Int64
    width: Int64
    rows: Address  # address of the number of rows


def combine(weighted: bool = True) -> PlanKernel[CombineArguments]:
    """Emit y[row] = sum of weight * x[pair] over the row's pairs in order; without weights if not `weighted`."""

    def body(f: Function, a: CombineArguments, thread: Value, threads: Value) -> None:
        used = a.used
        with own_rows(f, f.load_int(a.rows), thread, threads) as row:
            y = a.y.row(row)
            with f.loop(0, a.width, LANES) as i:
                total = f.var(f.zeros(f32x16))
                with f.loop(row * used, (row + 1) * used) as pair:
                    x = f.load(a.x.address + (pair * a.x.stride + i * 4), f32x16)
                    weight = f.broadcast(a.weights + pair * 4, F32) if weighted else f.constant(f32x16, 1.0)
                    total.set(f.fma(x, weight, total.get()))
                f.store(y + i * 4, total.get())

    return kernel(f"combine{'' if weighted else '_unweighted'}", CombineArguments, body)

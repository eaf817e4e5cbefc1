"""Searches for the scale of a group of values with the least weighted squared error; one group per lane.

The searches follow ggml (ggml-quants.c: make_qx_quants, make_qkx2_quants, make_qkx3_quants, make_qp_quants,
make_q3_quants) operation by operation in float32, so that the same input gives the same bytes. Groups are in rows at
... at + size of xt and wt (k, 16). The returned values determine the integers: clamp(rint(inverse * (x - offset))). An
inverse of NaN means that all values of the group are equal; its integers are the lowest.
"""

from __future__ import annotations

import numpy as np

from localllm.quant.compiled.blocks import larger
from localllm.quant.compiled.jit import compiled
from localllm.quant.compiled.simd import (
    Lanes,
    absolute,
    any_lane,
    least,
    load_lanes,
    most,
    nearest,
    pick,
    rint,
    splat,
    store,
)
from localllm.quant.format import F32

TINY = np.float32(1e-15)  # a group with a smaller maximum magnitude is stored as zeros
NAN = np.float32(np.nan)


@compiled
def peak(xt: F32, at: int, size: int) -> Lanes:
    """Return the value of largest magnitude, with sign, the first on ties; 0 if all are 0, NaN if any is NaN."""
    top = splat(np.float32(0))
    for i in range(at, at + size):
        top = larger(load_lanes(xt, i), top)
    return top


@compiled
def clamp_level(q: Lanes, low: Lanes, high: Lanes) -> Lanes:
    """Clamp q to low ... high; NaN becomes low."""
    return least(most(q, low), high)


@compiled
def ratio(a: Lanes, b: Lanes) -> Lanes:
    """Return a / b, or 0 if b is 0."""
    zero = splat(np.float32(0))
    return pick(b == zero, zero, a / b)


@compiled
def symmetric(xt: F32, wt: F32, at: int, size: int, zero: int) -> tuple[Lanes, Lanes]:
    """Return scale and inverse for integers -zero ... zero - 1.

    Try 19 scales around top / -zero, where top is the value of largest magnitude. The scale for each set of integers is
    then its weighted least-squares fit.
    """
    top = peak(xt, at, size)
    low, high = splat(np.float32(-zero)), splat(np.float32(zero - 1))
    nothing = splat(np.float32(0))
    scale, best, kept = nothing, nothing, nothing
    for attempt in range(19):
        step = 0 if attempt == 0 else attempt - 10 if attempt < 10 else attempt - 9  # 0, -9 ... -1, 1 ... 9
        inverse = splat(-(np.float32(zero) + np.float32(0.1) * np.float32(step))) / top
        sum_xq = sum_qq = nothing
        for i in range(at, at + size):
            value, weight = load_lanes(xt, i), load_lanes(wt, i)
            q = clamp_level(rint(inverse * value), low, high)
            sum_xq = sum_xq + weight * value * q
            sum_qq = sum_qq + weight * q * q
        if attempt == 0:
            scale, kept = ratio(sum_xq, sum_qq), inverse
            best = scale * sum_xq
        else:
            better = (sum_qq > nothing) & (sum_xq * sum_xq > best * sum_qq)
            new = ratio(sum_xq, sum_qq)
            scale, kept = pick(better, new, scale), pick(better, inverse, kept)
            best = pick(better, new * sum_xq, best)
    empty = absolute(top) < splat(TINY)
    return pick(empty, nothing, scale), pick(empty, splat(NAN), kept)


@compiled
def affine(
    xt: F32,
    wt: F32,
    at: int,
    size: int,
    top: int,
    start: np.float32,
    step: np.float32,
    steps: int,
    squared: bool,
    qt: F32,
) -> tuple[Lanes, Lanes, Lanes, Lanes]:
    """Return scale and offset <= 0 for integers 0 ... top, and the inverse and offset that gave the integers.

    Try scales from slightly coarser to slightly finer than (largest value - best offset so far) / top. For each set of
    integers, scale and offset are the weighted least-squares fit. The error is squared or absolute. qt (size, 16) is
    scratch.
    """
    nothing, limit = splat(np.float32(0)), splat(np.float32(top))
    low = high = load_lanes(xt, at)
    sum_w = sum_x = nothing
    for i in range(at, at + size):
        value, weight = load_lanes(xt, i), load_lanes(wt, i)
        low, high = pick(value < low, value, low), pick(value > high, value, high)
        sum_w = sum_w + weight
        sum_x = sum_x + weight * value
    offset = pick(low > nothing, nothing, low)
    flat = high == offset
    kept, base = limit / (high - offset), offset
    scale = splat(np.float32(1)) / kept
    best = nothing
    for i in range(at, at + size):
        value = load_lanes(xt, i)
        q = clamp_level(rint(kept * (value - offset)), nothing, limit)
        miss = scale * q + offset - value
        best = best + load_lanes(wt, i) * (miss * miss if squared else absolute(miss))
    for attempt in range(steps):
        inverse = splat(start + step * np.float32(attempt) + np.float32(top)) / (high - offset)
        sum_q = sum_qq = sum_xq = nothing
        for i in range(size):
            value, weight = load_lanes(xt, at + i), load_lanes(wt, at + i)
            q = clamp_level(rint(inverse * (value - offset)), nothing, limit)
            store(qt, i, q)
            wq = weight * q
            sum_q, sum_qq, sum_xq = sum_q + wq, sum_qq + wq * q, sum_xq + wq * value
        det = sum_w * sum_qq - sum_q * sum_q
        new = (sum_w * sum_xq - sum_x * sum_q) / det
        new_offset = (sum_qq * sum_x - sum_q * sum_xq) / det
        above = new_offset > nothing
        new, new_offset = pick(above, sum_xq / sum_qq, new), pick(above, nothing, new_offset)
        error = nothing
        for i in range(size):
            miss = new * load_lanes(qt, i) + new_offset - load_lanes(xt, at + i)
            error = error + load_lanes(wt, at + i) * (miss * miss if squared else absolute(miss))
        better = (det > nothing) & (error < best)
        kept, base = pick(better, inverse, kept), pick(better, offset, base)
        scale, offset = pick(better, new, scale), pick(better, new_offset, offset)
        best = pick(better, error, best)
    return pick(flat, nothing, scale), offset, pick(flat, splat(NAN), kept), base


@compiled
def positive(xt: F32, wt: F32, size: int, top: int, qt: F32) -> Lanes:
    """Quantize values >= 0, such as group scales: return the scale, and write integers up to top to qt (size, 16).

    Try nine scales, then change single integers while the error decreases. If a value is negative nevertheless, its
    integer is stored modulo 256, as in ggml, which affects the rest of the search.
    """
    nothing, one, limit = splat(np.float32(0)), splat(np.float32(1)), splat(np.float32(top))
    high = nothing
    for i in range(size):
        value = load_lanes(xt, i)
        high = pick(high > value, high, value)
    kept, best = nothing, nothing
    byte = splat(np.float32(256))
    for attempt in range(9):
        step = 0 if attempt == 0 else attempt - 5 if attempt < 5 else attempt - 4  # 0, -4 ... -1, 1 ... 4
        inverse = splat(np.float32(0.1) * np.float32(step) + np.float32(top)) / high
        scale, error = one / inverse, nothing
        for i in range(size):
            value = load_lanes(xt, i)
            q = least(nearest(inverse * value), limit)
            if attempt == 0:
                q = pick(q < nothing, q + byte, q)
            miss = value - scale * q
            error = error + load_lanes(wt, i) * miss * miss
        better = error < best
        if attempt == 0:
            kept, best = inverse, error
        else:
            kept, best = pick(better, inverse, kept), pick(better, error, best)
    sum_xq = sum_qq = nothing
    for i in range(size):
        value, weight = load_lanes(xt, i), load_lanes(wt, i)
        q = least(nearest(kept * value), limit)
        store(qt, i, pick(q < nothing, q + byte, q))
        sum_xq = sum_xq + weight * value * q
        sum_qq = sum_qq + weight * q * q
    for _ in range(5):
        moved = nothing > nothing
        for i in range(size):
            value, weight, q = load_lanes(xt, i), load_lanes(wt, i), load_lanes(qt, i)
            rest_xq, rest_qq = sum_xq - weight * value * q, sum_qq - weight * q * q
            new = least(nearest(value * rest_qq / rest_xq), limit)
            new_xq, new_qq = rest_xq + weight * value * new, rest_qq + weight * new * new
            better = (rest_xq > nothing) & (rest_qq > nothing) & ~(new == q)
            better = better & (new_xq * new_xq * sum_qq > sum_xq * sum_xq * new_qq)
            store(qt, i, pick(better, pick(new < nothing, new + byte, new), q))
            sum_xq, sum_qq = pick(better, new_xq, sum_xq), pick(better, new_qq, sum_qq)
            moved = moved | better
        if not any_lane(moved):
            break
    empty = high < splat(TINY)
    for i in range(size):
        store(qt, i, pick(empty, nothing, load_lanes(qt, i)))
    return pick(empty, nothing, pick(sum_qq <= nothing, nothing, sum_xq / sum_qq))


@compiled
def descent(xt: F32, at: int, size: int, zero: int, qt: F32) -> Lanes:
    """Return the scale, and write integers -zero ... zero - 1 to rows at ... of qt.

    Start with plain rounding and change integers one by one. The weight of a value is its square.
    """
    top = peak(xt, at, size)
    low, high, nothing = splat(np.float32(-zero)), splat(np.float32(zero - 1)), splat(np.float32(0))
    inverse = splat(np.float32(-zero)) / top
    sum_xq = sum_qq = nothing
    for i in range(at, at + size):
        value = load_lanes(xt, i)
        q = clamp_level(rint(inverse * value), low, high)
        store(qt, i, q)
        weight = value * value
        sum_xq, sum_qq = sum_xq + weight * value * q, sum_qq + weight * q * q
    for _ in range(5):
        moved = nothing > nothing
        for i in range(at, at + size):
            value, q = load_lanes(xt, i), load_lanes(qt, i)
            weight = value * value
            rest_xq, rest_qq = sum_xq - weight * value * q, sum_qq - weight * q * q
            new = clamp_level(nearest(value * rest_qq / rest_xq), low, high)
            new_xq, new_qq = rest_xq + weight * value * new, rest_qq + weight * new * new
            better = (rest_xq > nothing) & ~(new == q) & (new_qq > nothing)
            better = better & (new_xq * new_xq * sum_qq > sum_xq * sum_xq * new_qq)
            store(qt, i, pick(better, new, q))
            sum_xq, sum_qq = pick(better, new_xq, sum_xq), pick(better, new_qq, sum_qq)
            moved = moved | better
        if not any_lane(moved):
            break
    empty = absolute(top) < splat(TINY)
    for i in range(at, at + size):
        store(qt, i, pick(empty, nothing, load_lanes(qt, i) + splat(np.float32(zero))))
    return pick(empty, nothing, pick(sum_qq <= nothing, nothing, sum_xq / sum_qq))

"""Searches for the block scale with the least squared error, weighted by importance.

The searches follow llama.cpp (ggml-quants.c: make_qx_quants, make_qkx3_quants) operation by operation in float32, so
that the same weights and importance give the same bytes. Sums run over the values of a block in order, for all blocks
at once: arrays are transposed to (block_values, n).
"""

from __future__ import annotations

import numpy as np

from localllm.quant.format import F32, U8
from localllm.quant.pack import lowest, peak, sequential_sum

_TINY = np.float32(1e-15)  # a block with a smaller maximum magnitude is stored as zeros


def row_weights(x: F32, importance: F32) -> F32:
    """Return weights (rows, values): importance * sqrt(mean square of the row + square of the value)."""
    square = x * x
    mean = sequential_sum(square) / np.float32(x.shape[1])
    return importance * np.sqrt(mean + square)


def _dot(*factors: F32) -> F32:
    """Sum the product of the factors (multiplied left to right) over the first axis, in order: (k, n) -> (n,)."""
    total = np.zeros(factors[0].shape[1], np.float32)
    for parts in zip(*factors, strict=True):
        product = parts[0]
        for part in parts[1:]:
            product = product * part
        total += product
    return total


def _divide(a: F32, b: F32) -> F32:
    return np.divide(a, b, out=np.zeros_like(a), where=b != 0)


def _at_most_zero(m: F32) -> F32:
    """Return min(m, 0); -0 stays -0, as in ggml."""
    return np.where(m > 0, np.float32(0), m)


def search_symmetric(x: F32, weight: F32, zero: int) -> tuple[F32, U8]:
    """Return scales d (n, 1) and integers q (n, k) in 0 .. 2 * zero - 1 with d * (q - zero) close to x (n, k).

    Try 19 scales around top / -zero, where top is the value of largest magnitude. The scale for each set of integers is
    then its weighted least-squares fit.
    """
    top = peak(x)[:, 0]
    xt, wt = np.ascontiguousarray(x.T), np.ascontiguousarray(weight.T)
    wx: F32 = wt * xt

    def fit(step: int) -> tuple[F32, F32, F32]:
        inverse = -(np.float32(zero) + np.float32(0.1) * np.float32(step)) / top
        q: F32 = np.rint(inverse * xt)
        np.clip(q, np.float32(-zero), np.float32(zero - 1), out=q)
        return q, _dot(wx, q), _dot(wt, q, q)

    best_q, sum_xq, sum_qq = fit(0)
    scale = _divide(sum_xq, sum_qq)
    best = scale * sum_xq
    for step in (*range(-9, 0), *range(1, 10)):
        q, sum_xq, sum_qq = fit(step)
        better = (sum_qq > 0) & (sum_xq * sum_xq > best * sum_qq)
        np.copyto(best_q, q, where=better)
        new = _divide(sum_xq, sum_qq)
        np.copyto(scale, new, where=better)
        np.copyto(best, new * sum_xq, where=better)
    best_q += np.float32(zero)
    empty = np.abs(top) < _TINY
    best_q[:, empty] = 0
    scale[empty] = 0
    return scale[:, None], np.ascontiguousarray(best_q.T).astype(np.uint8)


def search_affine(x: F32, weight: F32, top: int) -> tuple[F32, F32, U8]:
    """Return scales d, offsets m <= 0 (both (n, 1)) and integers q (n, k) in 0 .. top with d * q + m close to x (n, k).

    Try 37 scales from slightly coarser to slightly finer than (largest value - best offset so far) / top. For each set
    of integers, scale and offset are the weighted least-squares fit.
    """
    xt, wt = np.ascontiguousarray(x.T), np.ascontiguousarray(weight.T)
    high, offset = xt.max(axis=0), _at_most_zero(lowest(x)[:, 0])
    flat = high <= offset
    sum_w, sum_x = _dot(wt), _dot(wt, xt)

    def integers(inverse: F32) -> F32:
        q: F32 = np.rint(inverse * (xt - offset))
        return np.clip(q, np.float32(0), np.float32(top), out=q)

    def error(q: F32, d: F32, m: F32) -> F32:
        miss = d * q + m - xt
        return _dot(wt, miss * miss)

    inverse = np.float32(top) / (high - offset)
    scale = np.float32(1) / inverse
    best_q = integers(inverse)
    best = error(best_q, scale, offset)
    for step in range(37):
        inverse = (np.float32(-0.9) + np.float32(0.05) * np.float32(step) + np.float32(top)) / (high - offset)
        q = integers(inverse)
        wq = wt * q
        sum_q, sum_qq, sum_xq = _dot(wq), _dot(wq, q), _dot(wq, xt)
        det = sum_w * sum_qq - sum_q * sum_q
        d = _divide(sum_w * sum_xq - sum_x * sum_q, det)
        m = _divide(sum_qq * sum_x - sum_q * sum_xq, det)
        np.divide(sum_xq, sum_qq, out=d, where=m > 0)
        m = _at_most_zero(m)
        miss = error(q, d, m)
        better = (det > 0) & (miss < best)
        np.copyto(best_q, q, where=better)
        for kept, new in ((scale, d), (offset, m), (best, miss)):
            np.copyto(kept, new, where=better)
    best_q[:, flat] = 0
    scale[flat] = 0
    return scale[:, None], offset[:, None], np.ascontiguousarray(best_q.T).astype(np.uint8)

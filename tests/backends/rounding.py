"""Bounds on the difference of two rounding orders, derived from u = 2^-24, one rounding of a float32.

A chain of n additions errs by at most n u of the sum of magnitudes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.backends.support import UNIT
from tests.models.support import MemoryWeight

Slack = Callable[[np.ndarray, np.ndarray], Any]  # (x (T, width), truth) -> maximum difference allowed, float64


def exact(x: np.ndarray, truth: np.ndarray) -> float:
    """Bound the error of one operation, rounded once on both sides."""
    return 0.0


def few(x: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Bound the error of two or three roundings of results without cancellation."""
    return 4 * UNIT * np.abs(truth)


def soft(x: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Bound the error of exp, which errs by 2e-7 of itself and is 0 below e^-87, and the logarithm, which errs by 1e-7
    of itself.
    """
    return (5e-7 + 8 * UNIT) * np.abs(truth) + np.abs(x).max(axis=1, keepdims=True) * np.exp(-87.0)


def exponential(x: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Bound the error of exp, which errs by 2e-7 of itself."""
    return (2e-7 + 2 * UNIT) * np.abs(truth)


def xielu(x: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Bound the error of exp and a difference, which round as their terms do: near 0 by the rounding of x."""
    return (4e-7 + 8 * UNIT) * (np.abs(truth) + np.abs(x) + x * x * (x > 0))


def rms(width: int) -> Slack:
    """Bound the error of 16 lanes of summed squares, then 4 additions, division, root, reciprocal and two products."""
    return lambda x, truth: (width / 16 + 10) * UNIT * np.abs(truth)


def layer(groups: int, weight: MemoryWeight, bias: MemoryWeight | None) -> Slack:
    """Bound the error of `rms` for x minus its mean: the rounding is relative to the largest x, not to the
    difference.
    """

    def slack(x: np.ndarray, truth: np.ndarray) -> np.ndarray:
        x = x.reshape(len(x), groups, -1)
        ratio = np.abs(x).max(axis=2, keepdims=True) / x.std(axis=2, keepdims=True)
        size = ratio * np.abs(weight.values()) + (0.0 if bias is None else np.abs(bias.values()))
        return 4 * (x.shape[2] / 16 + 10) * UNIT * size.reshape(len(x), -1)

    return slack


def rotated(x: np.ndarray, truth: np.ndarray) -> Any:
    """Bound the error of a rotation (cosine and sine rounded, two products, one sum): 4 u of |a| + |b|.

    The table's magnitude is below 2.
    """
    return 2 * 8 * UNIT * np.abs(x).max(axis=1, keepdims=True)


def sigmoid(x: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Bound the error of exp(-x), which errs by 2e-7 of itself (Cephes) and saturates at e^88; the other factor is at
    most x.
    """
    return (2e-7 + 8 * UNIT) * np.abs(truth) + (x * x).max(axis=1, keepdims=True) * np.exp(-88.0)


def situated(x: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Bound the error of `sigmoid` and two tanh, each times 1.5, which err by 2e-7 and the rounding of a quotient below
    87.
    """
    return sigmoid(x, truth) + 3 * (2e-7 + 8 * UNIT) * 1.5**2 * np.ones_like(truth)


def mixed(x: np.ndarray, truth: np.ndarray) -> Any:
    """Bound the error of up to four products and a base, each rounded once; coefficients are numbers of the row, or
    below 4.
    """
    most = np.abs(x).max(axis=1, keepdims=True)
    return 6 * UNIT * 4 * most * np.maximum(most, 4.0)


def sized(width: int) -> Slack:
    """Bound the error of `rms` for two rows plus a root of the quotient."""
    return lambda x, truth: 2 * (width / 16 + 14) * UNIT * np.abs(truth)


def blended(width: int) -> Slack:
    """Scores round like sums of 16 lanes and are at most 4 root(width); their exponents change weights by as much."""
    return lambda x, truth: 8 * (width / 16 + 14) * UNIT * width**0.5 * np.abs(x).max(axis=1, keepdims=True)


def connected(x: np.ndarray, truth: np.ndarray) -> Any:
    """Numbers up to 3 whose logits, below 4 |x| + 4, round; exp errs by 2e-7, and each of 4 turns divides by a sum."""
    return 3 * (2e-7 + 40 * UNIT + 4 * UNIT * (np.abs(x).max(axis=1, keepdims=True) + 1))


def exceeding(x: np.ndarray, truth: np.ndarray) -> Any:
    """Bound the error of the cutoff: sums of 16 lanes, as in `layer`, relative to the largest x."""
    return 4 * (x.shape[1] / 16 + 10) * UNIT * np.abs(x).max(axis=1, keepdims=True)


def tanh_form(x: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Bound the error of the tanh form: exp's argument errs by 4 u of itself; the true value is 1 + tanh, which near -1
    is rounded at 1e-16.
    """
    argument = 1.6 * (np.abs(x) + 0.045 * np.abs(x) ** 3)
    return (2e-7 + (8 + 4 * argument) * UNIT) * np.abs(truth) + 1e-15 * np.abs(x)


def oai(x: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Bound the error of a sigmoid of 1.702 x, and u + 1, which is rounded relative to 1."""
    return (2e-7 + 16 * UNIT) * np.abs(truth) + 4 * UNIT * np.abs(x)


def capped(x: np.ndarray, truth: np.ndarray) -> float:
    """5 * tanh is 5 * (1 - 2 / (e^2x + 1)): accurate to the rounding of 1, not of small results."""
    return 5 * (4e-7 + 4 * UNIT)


def product(*weights: MemoryWeight) -> Slack:
    """Bound the error of chains of fused multiply-adds, one per input; a scale, a bias and a residual add one rounding
    each.

    For BF16 weights each activation is first rounded to 8 bits.
    """

    def slack(x: np.ndarray, truth: np.ndarray) -> np.ndarray:
        each = [np.abs(x) @ np.abs(w.values().astype(np.float64)).T for w in weights]
        rounded = sum(terms for terms, w in zip(each, weights, strict=True) if w.format == "BF16")
        return (x.shape[1] + 4) * UNIT * (sum(each) + np.abs(truth) + 4.0) + 2.0**-8 * rounded

    return slack


def of_heads(weight: MemoryWeight) -> Slack:
    """Apply `product` to each head's slice of x and the head's matrix."""
    matrices = [MemoryWeight.of(weight.name, matrix, weight.format) for matrix in weight.values()]

    def slack(x: np.ndarray, truth: np.ndarray) -> np.ndarray:
        slices = [np.split(rows, len(matrices), axis=1) for rows in (x, truth)]
        return np.concatenate([product(w)(*own) for w, *own in zip(matrices, *slices, strict=True)], axis=1)

    return slack

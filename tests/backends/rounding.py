"""Bounds on the difference between two orders of rounding, in units of u = 2^-24, the rounding error of one float32.

A chain of n additions errs by at most n u times the sum of the terms' magnitudes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.backends.support import UNIT
from tests.models.support import MemoryWeight

Slack = Callable[[np.ndarray, np.ndarray], Any]  # (x (T, width), truth) -> allowed error, float64


def exact(x: np.ndarray, truth: np.ndarray) -> float:
    """Bound the error of one operation that both sides round once."""
    return 0.0


def few(x: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Bound the error of two or three roundings without cancellation."""
    return 4 * UNIT * np.abs(truth)


def soft(x: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Bound the error of exp (2e-7 relative, and 0 below e^-87) followed by a logarithm (1e-7 relative)."""
    return (5e-7 + 8 * UNIT) * np.abs(truth) + np.abs(x).max(axis=1, keepdims=True) * np.exp(-87.0)


def exponential(x: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Bound the error of exp, 2e-7 relative."""
    return (2e-7 + 2 * UNIT) * np.abs(truth)


def erf_form(x: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Bound the error of exact GELU of x / 4: half an error of erfc (1.5e-7 absolute), and the roundings of exp."""
    return np.abs(x) / 4 * 1e-7 + (6e-7 + 16 * UNIT) * np.abs(truth)


def quick(x: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Bound the error of x * sigmoid(1.702 x): the product in the exponent is rounded, too."""
    return sigmoid(x, truth) + 4 * UNIT * np.abs(x) * np.abs(truth)


def xielu(x: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Bound the error of exp and a difference. Both are rounded relative to their terms, near 0 relative to x."""
    return (4e-7 + 8 * UNIT) * (np.abs(truth) + np.abs(x) + x * x * (x > 0))


def rms(width: int) -> Slack:
    """Bound the error of 16 partial sums of squares, 4 additions, division, square root, reciprocal and two
    products.
    """
    return lambda x, truth: (width / 16 + 10) * UNIT * np.abs(truth)


def layer(groups: int, weight: MemoryWeight, bias: MemoryWeight | None) -> Slack:
    """Bound the error of `rms` for x minus its mean. The rounding is relative to the largest x, not to the
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
    """Bound the error of exp(-x), which is 2e-7 relative (Cephes) and saturates at e^88. The other factor is at
    most x.
    """
    return (2e-7 + 8 * UNIT) * np.abs(truth) + (x * x).max(axis=1, keepdims=True) * np.exp(-88.0)


def situated(x: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Bound the error of `sigmoid` and two tanh, each times 1.5. A tanh errs by 2e-7, and by the rounding of a quotient
    below 87.
    """
    return sigmoid(x, truth) + 3 * (2e-7 + 8 * UNIT) * 1.5**2 * np.ones_like(truth)


def mixed(x: np.ndarray, truth: np.ndarray) -> Any:
    """Bound the error of up to four products and a base, each rounded once. Coefficients are elements of the row, or
    below 4.
    """
    most = np.abs(x).max(axis=1, keepdims=True)
    return 6 * UNIT * 4 * most * np.maximum(most, 4.0)


def sized(width: int) -> Slack:
    """Bound the error of `rms` for two rows, plus the square root of the quotient."""
    return lambda x, truth: 2 * (width / 16 + 14) * UNIT * np.abs(truth)


def blended(width: int) -> Slack:
    """Bound the error of softmax weights. Scores are sums in 16 lanes and at most 4 sqrt(width). The weights err by the
    same amount relatively.
    """
    return lambda x, truth: 8 * (width / 16 + 14) * UNIT * width**0.5 * np.abs(x).max(axis=1, keepdims=True)


def connected(x: np.ndarray, truth: np.ndarray) -> Any:
    """Bound the error of hyper-connections, whose coefficients are up to 3, from logits below 4 |x| + 4. The
    error of exp is 2e-7, and each of 4 iterations divides by a sum.
    """
    return 3 * (2e-7 + 40 * UNIT + 4 * UNIT * (np.abs(x).max(axis=1, keepdims=True) + 1))


def exceeding(x: np.ndarray, truth: np.ndarray) -> Any:
    """Bound the error of the cutoff: sums in 16 lanes, as in `layer`, relative to the largest x."""
    return 4 * (x.shape[1] / 16 + 10) * UNIT * np.abs(x).max(axis=1, keepdims=True)


def tanh_form(x: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Bound the error of GELU's tanh form. The argument of exp errs by 4 u relatively. The reference computes 1 + tanh,
    which is rounded at 1e-16 near -1.
    """
    argument = 1.6 * (np.abs(x) + 0.045 * np.abs(x) ** 3)
    return (2e-7 + (8 + 4 * argument) * UNIT) * np.abs(truth) + 1e-15 * np.abs(x)


def oai(x: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Bound the error of a sigmoid of 1.702 x, and of u + 1, which is rounded relative to 1."""
    return (2e-7 + 16 * UNIT) * np.abs(truth) + 4 * UNIT * np.abs(x)


def capped(x: np.ndarray, truth: np.ndarray) -> float:
    """Bound the error of 5 * tanh = 5 * (1 - 2 / (e^2x + 1)). The bound is relative to 1, because results may
    be small.
    """
    return 5 * (4e-7 + 4 * UNIT)


def product(*weights: MemoryWeight) -> Slack:
    """Bound the error of chains of fused multiply-adds, one per input. A scale, a bias and a residual add one rounding
    each.

    With BF16 weights, each activation is first rounded to 8 bits.
    """

    def slack(x: np.ndarray, truth: np.ndarray) -> np.ndarray:
        each = [np.abs(x) @ np.abs(w.values().astype(np.float64)).T for w in weights]
        rounded = sum(terms for terms, w in zip(each, weights, strict=True) if w.format == "BF16")
        return (x.shape[1] + 4) * UNIT * (sum(each) + np.abs(truth) + 4.0) + 2.0**-8 * rounded

    return slack


def of_heads(weight: MemoryWeight) -> Slack:
    """Apply `product` to each head's slice of x and each head's matrix."""
    matrices = [MemoryWeight.of(weight.name, matrix, weight.format) for matrix in weight.values()]

    def slack(x: np.ndarray, truth: np.ndarray) -> np.ndarray:
        slices = [np.split(rows, len(matrices), axis=1) for rows in (x, truth)]
        return np.concatenate([product(w)(*own) for w, *own in zip(matrices, *slices, strict=True)], axis=1)

    return slack

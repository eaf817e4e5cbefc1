"""Attention with terms that depend on the query and on the distance of two positions, as part of the ordinary product.

As a function of the distance, a term is a sum of waves. Turned by the query's position, their coefficients become more
values of the query, and the waves at the key's position more values of the key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localllm.models import derived
from localllm.plan import F32, Rope, Weight

Numbers = NDArray[np.float64]


def rates_of_span(span: int) -> Numbers:
    """Return the rates (span,) of the waves that sum up to any function of the distances within a span."""
    return np.arange(span, dtype=np.float64) * (2 * math.pi / (2 * span - 1))


def rates_of_width(width: int) -> Numbers:
    """Return the rates (width / 2,) of sinusoidal position embeddings."""
    return np.array([10000.0 ** (-2 * n / width) for n in range(width // 2)])


def turn(rates: Numbers, axes: int = 1) -> Rope:
    """Return the rotation of a query's coefficients, which are side by side for several axes."""
    own = tuple(rates.tolist())
    if axes == 1:
        return Rope("interleaved", 2 * len(own), own)
    return Rope(
        "interleaved", 2 * axes * len(own), own * axes, axes=tuple(np.repeat(np.arange(axes), len(own)).tolist())
    )


def waves(positions: NDArray[np.integer], rates: Numbers) -> F32:
    """Return the waves at the keys' positions (rows,) or (rows, axes): (rows, axes * 2 * rates)."""
    angle = positions.reshape(len(positions), -1, 1) * rates
    return np.stack([np.cos(angle), np.sin(angle)], axis=3).reshape(len(positions), -1).astype(np.float32)


def coefficients_of_table(listed: Numbers) -> Numbers:
    """Return the matrix (2 * span, width) that gives a query's coefficients.

    Row r of the table (2 * span - 1, width) is multiplied with the query at distance r - (span - 1). A distance is the
    query's position minus the key's.
    """
    span = len(listed) // 2 + 1
    angle = rates_of_span(span)[:, None] * (np.arange(len(listed)) - (span - 1))
    share = np.where(np.arange(span)[:, None] == 0, 1.0, 2.0) / len(listed)
    return np.stack([share * np.cos(angle) @ listed, -(share * np.sin(angle)) @ listed], axis=1).reshape(2 * span, -1)


def stack_of(name: str, matrices: Sequence[Numbers]) -> Weight:
    """Return a constant stack of matrices (heads, rows, columns)."""
    stack = np.stack(matrices).astype(np.float32)
    made = derived.table(name, stack.reshape(-1, stack.shape[2]))
    return Weight.of(derived.Derived(made.name, stack.shape, made.rows))


def coefficients_of_waves(weight: Weight, heads: int) -> Weight:
    """Return the stack (heads, width, head width) of coefficients for distances that are sinusoidal embeddings.

    The embedding of a distance, (sine, cosine) for each rate, is multiplied with the weight (width, width).
    """
    rows, width = weight.shape
    head_dim = rows // heads

    def read(start: int, stop: int) -> F32:
        of_head = derived.values(weight).reshape(heads, head_dim, width // 2, 2)
        turned = np.stack([of_head[..., 1], -of_head[..., 0]], axis=3).reshape(heads, head_dim, width)
        return np.ascontiguousarray(turned.transpose(0, 2, 1)).reshape(-1, head_dim)[start:stop]

    return Weight.of(derived.Derived(f"{weight.name} as waves", (heads, width, head_dim), read))

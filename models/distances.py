"""Attention of T5 (arXiv:1910.10683): what a score gains by the distance of two positions, and names of its layers.

A file holds a number for each bucket of distances and each head. Near distances have a bucket of their own, farther
ones share theirs, and all from FARTHEST on share the last.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm import quant
from localllm.plan import Weight

FARTHEST = 128


def name_in_stack(stack: str, name: str) -> str:
    """The file's name of a tensor of a layer in the encoder ("enc") or in the decoder ("dec")."""
    return f"{stack}.{name.replace('attn_output.', 'attn_o.')}" if name.startswith("blk.") else name


def by_distance(numbers: Weight, causal: bool) -> Weight:
    """Numbers of buckets (buckets, heads) as those of distances -FARTHEST to FARTHEST, (heads, 2 FARTHEST + 1).

    A distance is that of the key ahead of the query. If `causal`, keys ahead are never seen and all buckets are of keys
    behind; else half of the buckets are.
    """
    return Weight.of(_ByDistance(numbers, causal))


def bucket(distance: int, buckets: int, causal: bool) -> int:
    """The bucket of a distance."""
    behind = max(-distance, 0) if causal else abs(distance)
    if not causal:
        buckets //= 2
    exact = buckets // 2  # each smaller distance has a bucket of its own
    first = buckets if distance > 0 and not causal else 0
    if behind < exact:
        return first + behind
    # The others are even steps of the logarithm: compare powers, which are exact.
    shared, step = buckets - exact, 0
    while step < shared - 1 and behind**shared * exact ** (step + 1) >= FARTHEST ** (step + 1) * exact**shared:
        step += 1
    return first + exact + step


@dataclass(frozen=True, slots=True)
class _ByDistance:
    """The numbers of all distances as a tensor."""

    numbers: Weight  # (buckets, heads)
    causal: bool
    format: str = "F32"

    @property
    def name(self) -> str:
        return f"{self.numbers.name} by distance"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape[1], 2 * FARTHEST + 1

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        count, heads = self.numbers.shape
        table = quant.dequantize(self.numbers.read(0, count), self.numbers.format)[:, :heads].astype(np.float32)
        order = [bucket(distance, count, self.causal) for distance in range(-FARTHEST, FARTHEST + 1)]
        return np.ascontiguousarray(table[order].T[start:stop]).view(np.uint8)

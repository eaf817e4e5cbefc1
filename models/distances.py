"""T5's relative position bias (arXiv:1910.10683) and tensor names.

The GGUF contains a score bias for each bucket of distances and each head. Each short distance has its own bucket,
longer distances share buckets, and all distances from FARTHEST on share the last.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm import quant
from localllm.plan import Weight

FARTHEST = 128


def name_in_stack(stack: str, name: str) -> str:
    """Return the GGUF's name of a layer tensor in the encoder ("enc") or in the decoder ("dec")."""
    return f"{stack}.{name.replace('attn_output.', 'attn_o.')}" if name.startswith("blk.") else name


def by_distance(numbers: Weight, causal: bool) -> Weight:
    """Expand biases per bucket (buckets, heads) to biases per distance -FARTHEST..FARTHEST, (heads, 2 FARTHEST + 1).

    A distance is key position minus query position. If `causal`, all buckets are for earlier keys; otherwise half of
    the buckets are.
    """
    return Weight.of(_ByDistance(numbers, causal))


def bucket(distance: int, buckets: int, causal: bool) -> int:
    """Return the bucket of a distance."""
    behind = max(-distance, 0) if causal else abs(distance)
    if not causal:
        buckets //= 2
    exact = buckets // 2  # smaller distances each have their own bucket
    first = buckets if distance > 0 and not causal else 0
    if behind < exact:
        return first + behind
    # The other buckets are equal steps of the distance's logarithm. Integer powers are compared, as they are exact.
    shared, step = buckets - exact, 0
    while step < shared - 1 and behind**shared * exact ** (step + 1) >= FARTHEST ** (step + 1) * exact**shared:
        step += 1
    return first + exact + step


@dataclass(frozen=True, slots=True)
class _ByDistance:
    """The biases of all distances as a tensor."""

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

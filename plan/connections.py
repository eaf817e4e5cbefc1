"""The operation of hyper-connections: computes the coefficients to read, write and mix residual streams."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.plan.operation import Unary
from localllm.plan.weights import Weight


@dataclass(frozen=True, slots=True)
class HyperConnection(Unary):
    """Coefficients of hyper-connections of n streams (arXiv:2409.19606), for `Mix`, from z = scale x + bias.

    x has one to three parts, each with its own value in `scale`:

    - read (n): the weight of each stream in the layer's input, sigmoid(z) + eps.
    - written (n): the weight of the layer's output in each stream, magnitude sigmoid(z) + written_eps.
    - mixed (n, n): z[j, i] leads from stream j to stream i. Each row becomes its softmax plus eps. Then columns and
      rows are alternately divided by their sum plus eps (Sinkhorn, arXiv:2512.24880): columns `iterations` times, and
      rows between them. The result is transposed: coefficient i * n + j is the weight of stream j in the new stream i.
    """

    streams: int
    scale: Weight  # (parts,)
    bias: Weight  # (width,)
    eps: float
    magnitude: float = 1.0
    written_eps: float = 0.0
    iterations: int = 0

    @property
    def vectors(self) -> tuple[Weight, ...]:
        return self.scale, self.bias

    @property
    def parts(self) -> int:
        return self.scale.shape[0]


def hyper_connection_width(streams: int, parts: int) -> int:
    """Return the total width of the first `parts` parts of `HyperConnection`."""
    return (streams, 2 * streams, (2 + streams) * streams)[parts - 1]

"""The operation that pools consecutive tokens: compressed keys and values, and indexer keys of pools."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.plan.operation import Producer
from localllm.plan.recurrence import RowLayer
from localllm.plan.values import Value
from localllm.plan.weights import Weight


@dataclass(frozen=True, slots=True)
class Pool(Producer):
    """The output at positions size - 1, 2 size - 1, ... is a weighted mean over the last `size` tokens; it is zero
    elsewhere.

    Every column has separate weights: the softmax, over the tokens, of scores + bias[position % size].

    If x is twice as wide as `out`, pools overlap: a mean covers 2 size tokens. The older half of the tokens contributes
    the first half of the columns, the newer half contributes the second half. Positions below 0 are excluded.

    Tokens of earlier steps are read from the cache layer `layer`, which stores x and the scores of every token.
    """

    x: Value  # (T, width) or (T, 2 width)
    scores: Value  # same shape as x
    layer: int
    bias: Weight  # (size, columns of x)

    @property
    def inputs(self) -> tuple[Value, ...]:
        return self.x, self.scores

    @property
    def vectors(self) -> tuple[Weight, ...]:
        return (self.bias,)

    @property
    def state(self) -> tuple[int, ...]:
        return (self.layer,)

    @property
    def size(self) -> int:
        return self.bias.shape[0]

    @property
    def parts(self) -> int:
        """Number of pools that a mean covers: 2 if they overlap, otherwise 1."""
        return self.x.width // self.out.width

    @property
    def store(self) -> RowLayer:
        return RowLayer(2 * self.x.width, self.parts * self.size, self.size)

"""The operation that pools neighbouring rows into one: compressed keys and values, and keys of pools of positions."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.plan.operation import Producer
from localllm.plan.recurrence import RowLayer
from localllm.plan.values import Value
from localllm.plan.weights import Weight


@dataclass(frozen=True, slots=True)
class Pool(Producer):
    """Rows at positions size - 1, 2 size - 1, ... hold a weighted mean over the last `size` rows; other rows are zero.

    Every column has separate weights: the softmax, over the rows, of scores + bias[position % size].

    If x is twice as wide as `out`, pools overlap: a mean is over 2 size rows. It takes the first half of the columns
    from the older half of the rows, and the second half of the columns from the newer ones. Rows before position 0 do
    not count.

    Rows of earlier steps come from the store of `layer`, which holds x and the scores of every row.
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
        """Pools that a mean covers: 2 if they overlap, otherwise 1."""
        return self.x.width // self.out.width

    @property
    def store(self) -> RowLayer:
        return RowLayer(2 * self.x.width, self.parts * self.size, self.size)

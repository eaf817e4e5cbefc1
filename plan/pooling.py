"""The operation that pools neighbouring rows to one: compressed keys and values, and keys of pools of positions."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.plan.operation import Producer
from localllm.plan.recurrence import RowLayer
from localllm.plan.values import Value
from localllm.plan.weights import Weight


@dataclass(frozen=True, slots=True)
class Pool(Producer):
    """Rows at positions size - 1, 2 size - 1, ... hold a mean over the `size` rows up to them; other rows are zero.

    Every column has weights of its own: the softmax, over the rows, of scores + bias[position % size].

    If x is twice as wide as `out`, pools overlap: a mean is over 2 size rows. Of the older half it takes the first half
    of the columns, of the newer half the second. Rows before position 0 do not count.

    Rows of earlier steps come from the store of `layer`, where x and the scores of every row go.
    """

    x: Value  # (T, width, or twice that)
    scores: Value  # as x
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
        """Pools that a mean is over: 2 if they overlap."""
        return self.x.width // self.out.width

    @property
    def store(self) -> RowLayer:
        return RowLayer(2 * self.x.width, self.parts * self.size, self.size)

"""Operations of attention: rotated heads, the cache of keys and values, the scores over it."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.plan.operation import Operation, Producer, Unary
from localllm.plan.values import Rope, Value
from localllm.plan.weights import Weight, given


@dataclass(frozen=True, slots=True)
class Rotate(Unary):
    """out = x with every head of `head_dim` rotated to its row's position; rows whose logits are wanted keep theirs."""

    head_dim: int
    rope: Rope


@dataclass(frozen=True, slots=True)
class Append(Operation):
    """Write k and v of every row to the cache of `layer`, at the row's slot."""

    layer: int
    k: Value
    v: Value

    @property
    def inputs(self) -> tuple[Value, ...]:
        return self.k, self.v

    @property
    def state(self) -> tuple[int, ...]:
        return (self.layer,)


@dataclass(frozen=True, slots=True)
class Attention(Producer):
    """out = softmax(scale * q k^T over the row's sequence, positions 0..its own) v; grouped heads share k and v.

    If not `causal`, a row also sees the later positions of its sequence that are in the batch. Where an encoder reads
    the text of a sequence (`Batch.borders`), a row that is not `causal` sees all of the text and nothing else, and one
    that sees `after` it nothing of the text.

    Head h of q reads key-value head h // (heads / kv_heads); values may have another width than keys. With a `window`,
    a row at position p sees only positions above p - window, itself included; if `chunked`, from the last multiple of
    the window on; if not `causal`, those at most window // 2 away on either side. With a `softcap`, a score s becomes
    softcap * tanh(s / softcap) after scaling.
    `sinks` (heads,) are the logits of an extra position per head whose value is zero: they only add to the softmax's
    sum. With `slopes` (heads,), a score loses its head's slope times the distance of the two positions, last of all
    (ALiBi, arXiv:2108.12409). With `distances` (heads, 2 reach + 1), a score gains the number of its head for how far
    the key is ahead of the query, from -reach to reach; farther keys count as that far (T5, arXiv:1910.10683).
    """

    q: Value
    layer: int
    heads: int
    scale: float
    window: int = 0  # 0: all positions
    softcap: float = 0.0  # 0: none
    sinks: Weight | None = None  # (heads,)
    slopes: Weight | None = None  # (heads,)
    chunked: bool = False
    causal: bool = True
    distances: Weight | None = None  # (heads, 2 reach + 1), without slopes
    after: bool = False  # only positions after the text that an encoder has read

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.q,)

    @property
    def vectors(self) -> tuple[Weight, ...]:
        return given(self.sinks, self.slopes, self.distances)

    @property
    def reach(self) -> int:
        """The farthest distance that has a number of its own in `distances`; 0 without them."""
        return self.distances.shape[1] // 2 if self.distances is not None else 0

    @property
    def state(self) -> tuple[int, ...]:
        return (self.layer,)

    @property
    def flops_per_position(self) -> int:
        """A multiplication and an addition for score and weighted sum each; with a window the count stops growing."""
        return 0 if self.window else 2 * (self.q.width + self.out.width)

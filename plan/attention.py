"""Operations of attention: rotated heads, the cache of keys and values, an indexer's choice of it, the scores."""

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
    """Write k and v of every row to the cache of `layer`, at the row's slot; an indexer stores keys alone."""

    layer: int
    k: Value
    v: Value | None

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.k,) if self.v is None else (self.k, self.v)

    @property
    def state(self) -> tuple[int, ...]:
        return (self.layer,)


@dataclass(frozen=True, slots=True)
class SelectPositions(Producer):
    """out = the positions that each row's attention reads: those an indexer scores highest (arXiv:2512.02556).

    The indexer's keys k are in the cache of `layer`, one per position. With `weights` (heads,) per row, the score of
    position p is the sum over heads h, in order, of weights[h] * max(0, q[h] . k[p]), and there is one selection
    (`groups` is 1). Without weights each head is a group with a selection of its own, by the score q[h] . k[p].

    Blocks of `block` positions are chosen together, by the highest score of a position that the row sees. A row chooses
    the `count` best blocks; the block of its own position and the `local` - 1 before it come first; of equal ones the
    earlier comes first. A row with at most `count` blocks chooses all, without scores.

    If `pooled`, a block has one key, at its last position: it alone is scored, and a block counts once the row sees all
    of it. The cache may hold these keys alone (`CacheLayer.every`). The positions behind the last whole block are
    selected besides; `local` is 0.

    A row of `out` holds one slice per group: how many positions there are, then the positions in order, then zeros.
    """

    q: Value  # (T, heads * head_dim)
    weights: Value | None  # (T, heads)
    layer: int
    heads: int
    count: int
    block: int = 1
    local: int = 0
    pooled: bool = False

    @property
    def groups(self) -> int:
        return self.heads if self.weights is None else 1

    @property
    def most(self) -> int:
        """Maximum number of positions that a row selects."""
        return self.count * self.block + (self.block - 1 if self.pooled else 0)

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.q,) if self.weights is None else (self.q, self.weights)

    @property
    def state(self) -> tuple[int, ...]:
        return (self.layer,)

    @property
    def flops_per_position(self) -> int:
        return 2 * self.q.width


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

    With a `selection`, a row reads only the positions that it lists (`SelectPositions`), in order. All key-value heads
    share the one slice of a row, or each has its own. Such a layer has no window and is causal.

    With `pools`, a row also reads that layer of the cache, which holds a key and a value for every pool of positions
    (`Append` with `every`): those of all pools that it sees the end of. A selection then chooses among these, by the
    positions that end a pool, and not among the positions of `layer`.
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
    selection: Value | None = None  # (T, slices * (1 + maximum number of positions))
    slices: int = 1  # 1: all key-value heads read the same positions; else there is a slice for each
    pools: int | None = None  # a layer of the cache

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.q,) if self.selection is None else (self.q, self.selection)

    @property
    def vectors(self) -> tuple[Weight, ...]:
        return given(self.sinks, self.slopes, self.distances)

    @property
    def reach(self) -> int:
        """The farthest distance that has a number of its own in `distances`; 0 without them."""
        return self.distances.shape[1] // 2 if self.distances is not None else 0

    @property
    def state(self) -> tuple[int, ...]:
        return (self.layer,) if self.pools is None else (self.layer, self.pools)

    @property
    def flops_per_position(self) -> int:
        """A multiplication and an addition for score and weighted sum each; 0 if a row reads a bounded number."""
        return 0 if self.window or self.selection else 2 * (self.q.width + self.out.width)

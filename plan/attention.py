"""Attention operations: rotate heads, append to the KV cache, select positions with an indexer, and attend."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.plan.operation import Operation, Producer, Unary
from localllm.plan.values import Rope, Value
from localllm.plan.weights import Weight, given


@dataclass(frozen=True, slots=True)
class Rotate(Unary):
    """out = x with every head (width `head_dim`) rotated to the token's position."""

    head_dim: int
    rope: Rope


@dataclass(frozen=True, slots=True)
class Append(Operation):
    """Write k and v of every token to the cache of `layer`, at the token's slot; an indexer stores only keys."""

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
class IndexerTopK(Producer):
    """out = the positions that each token attends to: the top-k by indexer score (arXiv:2512.02556).

    The indexer's keys k are in the cache of `layer`, one per position. With `weights` (heads,) per token, the score of
    position p is the sum over heads h, in order, of weights[h] * max(0, q[h] . k[p]), and there is one selection
    (`groups` is 1). Without weights, each head is a group with a separate selection, by the score q[h] . k[p].

    Blocks of `block` positions are selected together, by the highest score of their visible positions. A token selects
    the `count` best blocks. The block that contains its position and the `local` - 1 blocks before always rank first;
    ties go to the earlier block. If there are at most `count` blocks, all are selected without computing scores.

    If `pooled`, each block has a single key, at its last position. Only this key is scored, and only completely visible
    blocks can be selected. The cache may contain just these keys (`CacheLayer.every`). The positions after the last
    complete block are always selected; `local` is 0.

    `out` has one slice per token and group: the number of positions, then the positions in order, then zeros.
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
        """The maximum number of positions that a token selects."""
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
    """out = softmax(scale * q k^T) v over the positions of the sequence up to the token's own; grouped heads share k
    and v.

    If not `causal`, a token also attends to the later positions of its sequence in the batch. In encoder-decoder models
    (`Batch.borders`), non-causal attention covers the whole encoder text and nothing else, and attention with `after`
    covers only positions after the encoder text.

    Head h of q reads KV head h // (heads / kv_heads); values may be wider or narrower than keys. With a `window`, a
    token at position p attends only to positions above p - window, including itself. If `chunked`, it attends to
    positions from the last multiple of the window on; if not `causal`, positions at most window // 2 away on either
    side. With a `softcap`, a score s becomes softcap * tanh(s / softcap) after scaling.

    `sinks` (heads,) are logits of an extra position per head with value zero: they only add to the softmax denominator.
    With `slopes` (heads,), the head's slope times the distance of the two positions is subtracted from a score as the
    last step (ALiBi, arXiv:2108.12409). With `distances` (heads, 2 reach + 1), a relative position bias is added to a
    score, indexed by key position minus query position, clamped to -reach..reach (T5, arXiv:1910.10683).

    With `spans`, causal attention covers the later positions of a token's own span too (`Batch.span_ends`), such as the
    rest of a picture. A `window` bounds only earlier positions.

    With a `selection`, a token attends only to the listed positions (`IndexerTopK`), in order. The selection has one
    slice for all KV heads, or one per KV head. Such a layer has no window and is causal.

    With `pools`, a token also attends to the cache layer of that index, which stores one key and value per pool of
    positions (`Append` with `every`): to all pools whose last position is visible. A selection then refers to these
    pools, by their last position, and not to the positions of `layer`.
    """

    q: Value
    layer: int
    heads: int
    scale: float
    window: int = 0  # 0: all positions
    softcap: float = 0.0  # 0: no cap
    sinks: Weight | None = None  # (heads,)
    slopes: Weight | None = None  # (heads,)
    chunked: bool = False
    causal: bool = True
    distances: Weight | None = None  # (heads, 2 reach + 1); not together with slopes
    after: bool = False  # attend only to positions after the encoder text
    selection: Value | None = None  # (T, slices * (1 + maximum number of positions))
    slices: int = 1  # 1: all KV heads read the same positions; otherwise one slice per KV head
    pools: int | None = None  # index of the cache layer that stores pools
    spans: bool = False  # tokens of a span see each other

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.q,) if self.selection is None else (self.q, self.selection)

    @property
    def vectors(self) -> tuple[Weight, ...]:
        return given(self.sinks, self.slopes, self.distances)

    @property
    def reach(self) -> int:
        """The largest distance with its own bias in `distances`; 0 without `distances`."""
        return self.distances.shape[1] // 2 if self.distances is not None else 0

    @property
    def state(self) -> tuple[int, ...]:
        return (self.layer,) if self.pools is None else (self.layer, self.pools)

    @property
    def flops_per_position(self) -> int:
        """Two per multiply-add of scores and weighted sum; 0 if a token reads a bounded number of positions."""
        return 0 if self.window or self.selection else 2 * (self.q.width + self.out.width)

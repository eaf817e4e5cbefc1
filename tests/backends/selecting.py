"""Build plans of sparse attention for tests: over selected positions, and over pooled positions."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from localllm.plan import Recorder, Value
from tests.backends.attending import Heads
from tests.backends.support import Build
from tests.models.support import MemoryWeight


@dataclass(frozen=True)
class Selecting:
    """The heads of attention and of its indexer, and the number of positions that the indexer selects."""

    heads: Heads
    index_heads: int
    index_dim: int
    count: int
    block: int = 1
    local: int = 0
    weighted: bool = True
    pooled: bool = False

    @property
    def widths(self) -> tuple[int, ...]:
        """Return the widths of queries, keys and values, followed by the indexer's queries, keys and weights."""
        return (*self.heads.widths, self.index_heads * self.index_dim, self.index_dim, self.index_heads)

    @property
    def most(self) -> int:
        """Return the largest number of positions that a query can select."""
        return self.count * self.block + (self.block - 1 if self.pooled else 0)

    @property
    def groups(self) -> int:
        return 1 if self.weighted else self.index_heads


# Partly filled SIMD vectors; one head; selections below, equal to and above a cache block; blocks of positions.
SELECTING = (
    Selecting(Heads(4, 1, 24, value_dim=16), 3, 20, 9),
    Selecting(Heads(2, 1, 72, value_dim=64), 1, 32, 70),
    Selecting(Heads(6, 2, 16), 8, 16, 64),
    Selecting(Heads(5, 1, 576, value_dim=512), 16, 128, 33),
    Selecting(Heads(4, 2, 16), 2, 16, 3, 4, 1, weighted=False),
    Selecting(Heads(2, 2, 20), 2, 7, 5, 16, 2, weighted=False),
    Selecting(Heads(3, 1, 16), 1, 16, 1, 64, 0, weighted=False),
    Selecting(Heads(4, 1, 24), 3, 20, 5, 4, pooled=True),
    Selecting(Heads(2, 2, 16), 2, 16, 11, 3, weighted=False, pooled=True),
    Selecting(Heads(64, 2, 16), 3, 20, 70),
    Selecting(Heads(64, 2, 16), 2, 16, 3, 4, 1, weighted=False),
)


def select(s: Selecting) -> Build:
    """Build only the selection."""
    cuts = np.cumsum([0, *s.widths])

    def build(r: Recorder, x: Value) -> Value:
        q, k, weights = (r.slice(x, int(start), int(stop)) for start, stop in pairwise(cuts[3:]))
        own = weights if s.weighted else None
        return r.indexer_top_k(q, own, r.append_index(k), s.index_heads, s.count, s.block, s.local, s.pooled)

    return build


def attend_selected(s: Selecting, values: str = "own") -> Build:
    """Build attention over selected positions. Values are "own", "copied" from the first part of the keys, or a
    "prefix" of the keys that the plan declares.
    """
    cuts, h = np.cumsum([0, *s.widths]), s.heads

    def build(r: Recorder, x: Value) -> Value:
        selection = select(s)(r, x)
        q, k, v = (r.slice(x, int(start), int(stop)) for start, stop in pairwise(cuts[:4]))
        if values != "own":
            v = r.slice(k, 0, h.value_dim or h.head_dim)
        layer = r.append(k, v, h.kv_heads, prefix=values == "prefix")
        return r.attention(q, layer, h.heads, h.head_dim**-0.5, selection=selection, slices=s.groups)

    return build


@dataclass(frozen=True)
class Pooling:
    """Attention heads with a sliding window, the positions per pool, and the number of pools that an indexer
    selects.
    """

    heads: Heads
    every: int
    count: int = 0  # pools that the indexer selects; 0: attention reads all pools
    prefix: bool = False  # values are the first elements of the keys

    @property
    def widths(self) -> tuple[int, ...]:
        """Return the widths of queries, keys and values; pooled keys and values; the indexer's queries, keys and
        weights.
        """
        return (*self.heads.widths, *self.heads.widths[1:], 2 * 20, 20, 2)

    def listed(self, position: int) -> int:
        """Return the number of cache entries that a query at this position reads."""
        pools = (position + 1) // self.every
        return min(position + 1, self.heads.window) + min(pools, self.count or pools)


# Pools below and above a cache block; windows within a block and over several; all pools, or a selection.
POOLING = (
    Pooling(Heads(4, 1, 24, window=9, value_dim=16), 4, 5),
    Pooling(Heads(2, 2, 20, window=70, sinks=True), 2, 33),
    Pooling(Heads(8, 1, 72, window=33, value_dim=64), 4),
    Pooling(Heads(6, 2, 16, window=20), 64),
    Pooling(Heads(3, 1, 32, window=40, sinks=True), 100),
    Pooling(Heads(17, 1, 512, window=16), 48),
    Pooling(Heads(4, 1, 96, window=9, value_dim=64), 4, 5, prefix=True),
    Pooling(Heads(48, 1, 40, window=70, value_dim=32, sinks=True), 4, 33),
)


def attend_pools(p: Pooling) -> Build:
    """Build attention over a sliding window and pools."""
    cuts, h = np.cumsum([0, *p.widths]), p.heads
    sinks = MemoryWeight.of("sinks", np.linspace(-1.0, 1.0, h.heads)) if h.sinks else None

    def build(r: Recorder, x: Value) -> Value:
        parts = [r.slice(x, int(start), int(stop)) for start, stop in pairwise(cuts)]
        q, k, v, far_k, far_v, index_q, index_k, weights = parts
        if p.prefix:
            v, far_v = (r.slice(keys, 0, v.width) for keys in (k, far_k))
        near = r.append(k, v, h.kv_heads, prefix=p.prefix)
        far = r.append(far_k, far_v, h.kv_heads, p.every, p.prefix)
        selection = None
        if p.count:
            keys = r.append_index(index_k, p.every)
            selection = r.indexer_top_k(index_q, weights, keys, 2, p.count, p.every, pooled=True)
        return r.attention(q, near, h.heads, h.head_dim**-0.5, h.window, sinks=sinks, selection=selection, pools=far)

    return build


def rows_of(s: Selecting | Pooling, vocabulary: int) -> np.ndarray:
    """Return an embedding table with random scores, which tie only between positions of the same token."""
    return np.random.RandomState(s.widths[-2]).standard_normal((vocabulary, sum(s.widths))).astype(np.float32)

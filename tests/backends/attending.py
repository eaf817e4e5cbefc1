"""Build attention plans for tests: head shapes, KV cache types, and the rounding bound."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from localllm.backends.base import CacheTypes
from localllm.backends.cache import CACHE_TYPES
from localllm.plan import BLOCK, Recorder, Rope, Value
from tests.backends.support import UNIT, Build
from tests.models.support import MemoryWeight


@dataclass(frozen=True)
class Heads:
    """The shape of an attention operation: heads, KV heads, head dimension, and optional features."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    slopes: bool = False
    chunked: bool = False
    value_dim: int = 0  # 0: the same as head_dim
    causal: bool = True
    reach: int = 0  # learned biases for distances up to this; 0: none

    @property
    def widths(self) -> tuple[int, int, int]:
        """Return the widths of the queries, keys and values of one token."""
        value_dim = self.value_dim or self.head_dim
        return self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * value_dim


HEADS = (  # 1 to 32 query heads per KV head; dimensions that fill no SIMD vector; windows below and above a block
    Heads(1, 1, 8),
    Heads(3, 3, 7),
    Heads(2, 1, 64),
    Heads(6, 2, 16),
    Heads(4, 1, 20),
    Heads(7, 1, 96),
    Heads(8, 1, 80),
    Heads(4, 2, 128),
    Heads(9, 1, 12),
    Heads(4, 2, 16, window=9),
    Heads(2, 2, 32, window=70),
    Heads(2, 1, 16, softcap=1.5),
    Heads(6, 2, 16, sinks=True),
    Heads(8, 2, 24, window=33, softcap=2.0, sinks=True),
    Heads(4, 2, 32, slopes=True),
    Heads(6, 2, 16, window=70, softcap=1.5, sinks=True, slopes=True),
    Heads(4, 2, 16, window=48, chunked=True),
    Heads(4, 2, 24, value_dim=16),
    Heads(3, 1, 7, value_dim=20),
    Heads(6, 2, 16, window=9, sinks=True, value_dim=40),
    Heads(16, 1, 72, value_dim=64),
    Heads(5, 1, 576, value_dim=512),
    Heads(4, 2, 32, reach=5),
    Heads(3, 1, 20, reach=40, softcap=2.0),
    Heads(64, 2, 16, sinks=True, slopes=True),
)
WIDE = (Heads(5, 1, 1088, value_dim=1024),)  # the MLA latents of dots3note's sliding-window layers, too wide for GPUs


def attend(h: Heads) -> Build:
    """Build attention over a value that holds queries, keys and values, in this order."""
    cuts = np.cumsum([0, *h.widths])
    sinks = MemoryWeight.of("sinks", 2 * np.random.RandomState(4).standard_normal(h.heads)) if h.sinks else None

    slopes = MemoryWeight.of("slopes", 2.0 ** -np.arange(1, h.heads + 1)) if h.slopes else None

    def build(r: Recorder, x: Value) -> Value:
        q, k, v = (r.slice(x, int(start), int(stop)) for start, stop in pairwise(cuts))
        r.append(k, v, h.kv_heads)
        how = (h.window, h.softcap, sinks, slopes, h.chunked, h.causal, distances(h))
        return r.attention(q, 0, h.heads, h.head_dim**-0.5, *how)

    return build


def distances(h: Heads) -> MemoryWeight | None:
    """Return a learned bias for every head and relative position."""
    if not h.reach:
        return None
    numbers = np.random.RandomState(5).standard_normal((h.heads, 2 * h.reach + 1))
    return MemoryWeight.of("distances", numbers)


def attend_twice(h: Heads) -> Build:
    """Build two attentions with different queries that share a KV cache layer. Only the first writes the cache."""
    once = attend(h)

    def build(r: Recorder, x: Value) -> Value:
        first = once(r, x)
        q = r.linear(first, MemoryWeight.of("own queries", np.eye(first.width)[::-1].copy()))
        return r.add(first, r.attention(q, 0, h.heads, h.head_dim**-0.5, h.window))

    return build


def attention_slack(values: np.ndarray, h: Heads, seen: int, blocks: bool = False) -> float:
    """Return a bound on the error of attention.

    The error of a score is (D + 3) u times the magnitude of its terms, estimated as twice their root mean
    square. A soft-capped score also errs by the error of tanh. Each weight errs by twice the error of its
    score plus the error of exp. The sums have at most `seen` terms. For block-quantized values, weights are
    rounded to 2^-15 of the largest of 64 weights. These rounding errors are random in sign, so their sum
    grows with the square root of their number.
    """
    q, k, v = np.split(np.abs(values.astype(np.float64)), np.cumsum(h.widths[:2]), axis=1)
    terms = 2 * h.head_dim**0.5 * np.sqrt((q**2).mean() * (k**2).mean())
    score = (h.head_dim + 3) * UNIT * terms + 4e-7 * h.softcap + h.slopes * UNIT * seen
    rounded = blocks * BLOCK**0.5 * 2.0**-15
    return float((2 * score + 4e-7 + 2 * seen * UNIT + rounded) * v.max())


CACHES = (  # every KV cache type; head dimensions below, equal to and above a quantization block
    *((Heads(4, 2, width), CacheTypes(name, name)) for width in (20, 64) for name in CACHE_TYPES if name != "f16"),
    (Heads(7, 1, 96), CacheTypes("q8_0", "q4_0")),
    (Heads(8, 1, 80), CacheTypes("q5_1", "f16")),
    (Heads(4, 2, 128), CacheTypes("f16", "q5_0")),
    (Heads(8, 2, 24, window=33, softcap=2.0, sinks=True), CacheTypes("q4_1", "fp8")),
    (Heads(4, 2, 256, window=70), CacheTypes("bf16", "q8_0")),
    *((Heads(4, 2, 48, value_dim=32), CacheTypes(name, name)) for name in CACHE_TYPES if name != "f16"),
    (Heads(17, 1, 80, value_dim=64), CacheTypes("q4_0", "q5_1")),
    (Heads(6, 2, 20, value_dim=34, sinks=True), CacheTypes("q8_0", "q4_1")),
)


MANY = (
    Heads(17, 1, 4),
    Heads(37, 1, 4),
    Heads(263, 1, 4, sinks=True),
    Heads(37, 1, 4, slopes=True),
    Heads(37, 1, 4, reach=20),
)  # enough query heads per KV head for a loop in kernels


BOTH_WAYS = (
    Heads(4, 2, 16, causal=False),
    Heads(2, 1, 24, softcap=1.5, sinks=True, causal=False),
    Heads(4, 2, 32, slopes=True, causal=False),
    Heads(6, 2, 16, window=9, causal=False),
    Heads(2, 2, 32, window=140, slopes=True, causal=False),
    Heads(6, 2, 16, reach=3, causal=False),
    Heads(4, 4, 24, reach=128, causal=False),
)


def attend_wanted(h: Heads, early: bool) -> Build:
    """Build attention that returns only the wanted tokens. They are selected before the rotation of the
    queries or after attention.
    """
    width = (h.heads + 2 * h.kv_heads) * h.head_dim
    cuts = np.cumsum([0, h.heads * h.head_dim, h.kv_heads * h.head_dim, h.kv_heads * h.head_dim])
    rope = Rope("neox", h.head_dim, tuple(0.8**i for i in range(h.head_dim // 2)))

    def build(r: Recorder, x: Value) -> Value:
        q, k, v = (r.linear(x, MemoryWeight.of(f"pick{i}", np.eye(width)[cuts[i] : cuts[i + 1]])) for i in range(3))
        r.append(r.rotate(k, h.head_dim, rope), v, h.kv_heads)
        q = r.select_rows(q) if early else q
        y = r.attention(r.rotate(q, h.head_dim, rope), 0, h.heads, h.head_dim**-0.5, h.window)
        return y if early else r.select_rows(y)

    return build

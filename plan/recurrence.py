"""Operations of recurrent layers, and the cache layers that store their state.

A recurrent layer's cache is paged like a KV cache. It stores a row per token, and a state at the start of every block.
When the first token of a block is evaluated, its state is computed from the state and the rows of the previous block. A
sequence can therefore be forked, and truncated to any length, by its blocks. The results are bitwise independent of its
division into steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from localllm.plan.batch import BLOCK
from localllm.plan.operation import Producer
from localllm.plan.values import Value
from localllm.plan.weights import Weight


@dataclass(frozen=True, slots=True)
class RowLayer:
    """The cache of a convolution: its inputs, float32 (width,) per token. A token reads the last `window` rows
    including its own.

    With `every` above 1, only tokens at positions every - 1, 2 every - 1, ... read rows.
    """

    width: int
    window: int
    every: int = 1

    @property
    def row(self) -> int:
        """Number of values per token."""
        return self.width

    @property
    def state(self) -> int:
        """Number of values per block in addition to its rows."""
        return 0


@dataclass(frozen=True, slots=True)
class StateLayer:
    """The cache of linear attention, float32. A token's row: keys, updates, and one decay per head or per key channel.

    The stored state (heads, key_dim, value_dim) is the state before the first token of the block.
    """

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    channels: bool = False  # every channel of a key head has its own decay

    @property
    def window(self) -> int:
        """BLOCK + 1, because a block's first token computes the state from the whole previous block."""
        return BLOCK + 1

    @property
    def row(self) -> int:
        decays = self.key_dim if self.channels else 1
        return self.key_heads * self.key_dim + self.heads * (self.value_dim + decays)

    @property
    def state(self) -> int:
        return self.heads * self.key_dim * self.value_dim


@dataclass(frozen=True, slots=True)
class ScanLayer:
    """The cache of a selective scan, float32. A token's row: inputs, time steps and B.

    A block contains two states (state_dim, width): the state before its first token, and the state after its newest
    token. The newest token's index within the block is stored next to every channel. A token that follows the newest
    one continues from its state; after a truncation the tokens are scanned again.
    """

    width: int
    state_dim: int

    @property
    def window(self) -> int:
        return BLOCK + 1

    @property
    def row(self) -> int:
        return 2 * self.width + self.state_dim

    @property
    def state(self) -> int:
        return (2 * self.state_dim + 1) * self.width


@dataclass(frozen=True, slots=True)
class Convolve(Producer):
    """out[t, c] = bias[c] + sum_j weight[c, j] * x[t - K + 1 + j, c]: a causal depthwise convolution.

    Before position 0, x is zero. Inputs of earlier steps are read from the cache layer `layer`, which stores x of every
    token.
    """

    x: Value
    layer: int
    weight: Weight  # (width, K)
    bias: Weight | None = None  # (width,)

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.x,)

    @property
    def vectors(self) -> tuple[Weight, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def state(self) -> tuple[int, ...]:
        return (self.layer,)


@dataclass(frozen=True, slots=True)
class LinearAttention(Producer):
    """Gated linear attention. Every head has a state S (key_dim, value_dim), initially zero; for every token in order:

            S = exp(rate step) S;  u = strength (v - S^T k);  S = S + k u^T;  out = S^T q + skip v

    which is the gated delta rule (arXiv:2412.06464). Without `delta`, u = strength v, which is Mamba-2
    (arXiv:2405.21060) with k = B, q = C and strength = step. Rate times step is never positive. A step or strength of
    None means 1; lightning attention (arXiv:2401.04658) has neither.

    With a step for every channel of a head's key, each row of S decays separately: Kimi Delta Attention
    (arXiv:2510.26692).

    Value head h uses key head h // (heads / key_heads), or h % key_heads if key heads are `tiled`.

    The cache stores k, u and rate times step, or sums or exponentials of the latter. With the state S0 at the start of
    the block and the sum g of rate times step since then, a token is computed as follows. This is the chunkwise form of
    the papers, evaluated token by token, so results are bitwise independent of the division into steps:

            u_t = strength (v_t - exp(g_t) S0^T k_t - sum_{i<t} exp(g_t - g_i) (k_i . k_t) u_i)
            out_t = exp(g_t) S0^T q_t + sum_{i<=t} exp(g_t - g_i) (k_i . q_t) u_i + skip v_t
            next S0 = exp(g_last) S0 + sum_i exp(g_last - g_i) k_i u_i^T

    An exponential per channel multiplies the key or query inside the product.
    """

    q: Value  # (T, key_heads * key_dim)
    k: Value  # (T, key_heads * key_dim)
    v: Value  # (T, heads * value_dim)
    step: Value | None  # (T, heads), or (T, heads * key_dim)
    strength: Value | None  # (T, heads)
    rate: Weight  # (heads,)
    layer: int
    key_heads: int
    delta: bool
    tiled: bool
    skip: Weight | None = None  # (heads,)

    @property
    def inputs(self) -> tuple[Value, ...]:
        return tuple([x for x in (self.q, self.k, self.v, self.step, self.strength) if x is not None])

    @property
    def vectors(self) -> tuple[Weight, ...]:
        return (self.rate,) if self.skip is None else (self.rate, self.skip)

    @property
    def state(self) -> tuple[int, ...]:
        return (self.layer,)

    @property
    def store(self) -> StateLayer:
        heads, key_dim = self.rate.shape[0], self.q.width // self.key_heads
        channels = self.step is not None and self.step.width != heads
        return StateLayer(heads, self.key_heads, key_dim, self.v.width // heads, channels)


@dataclass(frozen=True, slots=True)
class SelectiveScan(Producer):
    """The scan of Mamba-1 (arXiv:2312.00752). Every channel c has a state h (state_dim,), initially zero; for every
    token:

            h = exp(dt a[c]) h + dt x B;  out = sum_n C[n] h[n] + d[c] x

    with the token's x and dt in channel c, and the token's B and C (state_dim,).
    """

    x: Value  # (T, width)
    dt: Value  # (T, width)
    b: Value  # (T, state_dim)
    c: Value  # (T, state_dim)
    layer: int
    a: Weight  # (width, state_dim), negative
    d: Weight  # (width,)

    @property
    def inputs(self) -> tuple[Value, ...]:
        return self.x, self.dt, self.b, self.c

    @property
    def vectors(self) -> tuple[Weight, ...]:
        return self.a, self.d

    @property
    def state(self) -> tuple[int, ...]:
        return (self.layer,)

    @property
    def store(self) -> ScanLayer:
        return ScanLayer(self.x.width, self.b.width)

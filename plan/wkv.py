"""The WKV scan of RWKV-6 and 7, whose heads have a matrix as state, and its cache layer; see `recurrence`."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.plan.batch import BLOCK
from localllm.plan.operation import Producer
from localllm.plan.values import Value


@dataclass(frozen=True, slots=True)
class WkvLayer:
    """The cache layer of a matrix scan, float32. A token's row: values, keys, decays, and with `erases` also probes and
    erases.

    A block contains two states (heads, key_dim, value_dim): the state before its first token, and the state after its
    newest token. The newest token's index within the block is stored next to every element of a value. A token that
    follows the newest one continues from its state; after a truncation the tokens are scanned again.
    """

    heads: int
    key_dim: int
    value_dim: int
    erases: bool

    @property
    def window(self) -> int:
        """BLOCK + 1, because a block's first token reads the last state of the previous block."""
        return BLOCK + 1

    @property
    def row(self) -> int:
        return self.heads * (self.value_dim + (4 if self.erases else 2) * self.key_dim)

    @property
    def state(self) -> int:
        return self.heads * (2 * self.key_dim + 1) * self.value_dim


@dataclass(frozen=True, slots=True)
class Wkv(Producer):
    """The WKV recurrence. Every head has a state S (key_dim, value_dim), initially zero; for every token in order:

            S = decay S - erase (probe^T S) + k v^T;  out = S^T q

    where `decay` has a value per key dimension. Without a probe, nothing is erased. With `before`, a token reads the
    state before updating it: out is S^T q of the previous state.

    RWKV-7 (arXiv:2503.14456) erases; RWKV-6 (arXiv:2404.05892) uses `before`; gated linear attention (arXiv:2312.06635)
    uses neither.
    """

    q: Value  # (T, heads * key_dim)
    k: Value  # (T, heads * key_dim)
    v: Value  # (T, heads * value_dim)
    decay: Value  # (T, heads * key_dim), from 0 to 1
    layer: int
    heads: int
    before: bool = False
    probe: Value | None = None  # (T, heads * key_dim)
    erase: Value | None = None  # (T, heads * key_dim)

    @property
    def inputs(self) -> tuple[Value, ...]:
        return self.q, *self.stored

    @property
    def stored(self) -> tuple[Value, ...]:
        """The values of a token that are stored in the cache layer, in the order of `WkvLayer`."""
        erases = () if self.probe is None or self.erase is None else (self.probe, self.erase)
        return self.v, self.k, self.decay, *erases

    @property
    def state(self) -> tuple[int, ...]:
        return (self.layer,)

    @property
    def store(self) -> WkvLayer:
        key_dim, value_dim = self.k.width // self.heads, self.v.width // self.heads
        return WkvLayer(self.heads, key_dim, value_dim, self.probe is not None)

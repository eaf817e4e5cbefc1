"""The indexer of a layer (DeepSeek 3.2's "lightning indexer", arXiv:2512.02556): which positions attention reads.

It has small queries and one small key per position, in a cache of their own, and chooses the positions with the highest
scores (`plan.SelectPositions`). Some layers read the choice of an earlier one. In a context in which every position is
chosen nothing is recorded: attention then reads all that it sees, and the indexer costs nothing.

DeepSeek's models rotate queries and keys by a Hadamard matrix before they round them to FP8. The scores are the same
without it, so it is left to cache types that need it (`backends.cache`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from localllm.models.architecture import Indexer
from localllm.models.builder import Builder
from localllm.models.config import IndexerConfig
from localllm.plan import Rope, Value


@dataclass(frozen=True, slots=True)
class Selector:
    """Records the choice of positions of each layer."""

    builder: Builder
    config: IndexerConfig
    row: Indexer
    context: int  # number of positions that the plan serves
    chosen: dict[int, Value] = field(default_factory=dict)  # by layer

    def selection(self, layer: int, x: Value, narrow: Value, rope: Rope | None) -> Value | None:
        """Return the positions that a layer reads, or None for all; `narrow` is what the matrix of queries reads.

        `rope` is the rotation of the keys of attention.
        """
        chooses = self.config.chooses[layer]
        if chooses < 0 or self.config.count * self.config.block >= self.context:
            return None
        if chooses == layer:
            name = f"blk.{layer}.indexer."
            by_blocks = self.row.layers == "routed"
            self.chosen[layer] = self.by_blocks(name, x, rope) if by_blocks else self.recorded(name, x, narrow, rope)
        return self.chosen[chooses]

    def by_blocks(self, name: str, x: Value, rope: Rope | None) -> Value:
        """Each head chooses blocks of positions for the key-value head of its number (MiniMax M3)."""
        builder, own = self.builder, self.config
        recorder, sizes = builder.recorder, {"q": own.heads * own.head_dim, "k": own.head_dim}
        heads = []
        for part, size in sizes.items():
            value = builder.linear(f"{name}{part}_proj", x, size, x.width)
            weight = builder.tensors.vector(f"{name}{part}_norm.weight", own.head_dim)
            value = recorder.rms_norm(value, weight, builder.config.eps, size // own.head_dim)
            if rope is not None:
                value = recorder.rotate(value, own.head_dim, replace(rope, style=self.row.rope_style))
            heads.append(value)
        q, k = heads
        layer = recorder.append_index(k)
        return recorder.select_positions(q, None, layer, own.heads, own.count, own.block, own.local)

    def recorded(self, name: str, x: Value, narrow: Value, rope: Rope | None) -> Value:
        builder, own = self.builder, self.config
        recorder, tensors = builder.recorder, builder.tensors
        q = builder.linear(name + "attn_q_b", narrow, own.heads * own.head_dim, narrow.width)
        k = builder.linear(name + "attn_k", x, own.head_dim, x.width)
        weight, bias = (tensors.vector(f"{name}k_norm.{part}", own.head_dim) for part in ("weight", "bias"))
        k = recorder.layer_norm(k, weight, bias, own.eps)
        if rope is not None:
            style = replace(rope, style=self.row.rope_style)
            q, k = (self.turned(heads, style) for heads in (q, k))
        if self.row.pooled:
            gate = builder.linear(name.removesuffix(".") + "_compressor_gate", x, own.head_dim, x.width)
            bias = tensors.matrix(name.removesuffix(".") + "_compressor_ape.weight", own.block, own.head_dim)
            k = recorder.pool(k, gate, bias)
        weights = self.weights(name, x)
        return recorder.select_positions(
            q, weights, recorder.append_index(k), own.heads, own.count, own.block, own.local, self.row.pooled
        )

    def weights(self, name: str, x: Value) -> Value:
        """The weights of the indexer's heads, by which their scores are added up."""
        own = self.config
        proj = self.builder.tensors.matrix(f"{name}proj.weight", own.heads, x.width)
        return self.builder.recorder.linear(x, proj, None, 1.0 / math.sqrt(own.heads * own.head_dim))

    def turned(self, x: Value, rope: Rope) -> Value:
        """Rotate the first or the last dimensions of every head."""
        recorder, size = self.builder.recorder, self.config.head_dim
        if not self.row.trailing:
            return recorder.rotate(x, size, rope)
        heads, plain = x.width // size, size - rope.n_rot
        turned = recorder.rotate(recorder.columns(x, plain, size, heads), rope.n_rot, rope)
        return recorder.join(recorder.columns(x, 0, plain, heads), turned, heads)

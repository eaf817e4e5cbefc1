"""The indexer of sparse attention (DeepSeek 3.2's "lightning indexer", arXiv:2512.02556) selects top-k positions.

The indexer has small queries and one small key per position, in a separate cache. It selects the positions with the
highest scores (`plan.IndexerTopK`). Some layers reuse the selection of an earlier layer. If the context is so short
that every position would be selected, no indexer is recorded, and attention is dense.

DeepSeek models rotate queries and keys by a Hadamard matrix before rounding them to FP8. The rotation does not change
scores, so it is applied only with 4-bit and 5-bit cache types (`backends.cache`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

from localllm.models.builder import Part
from localllm.models.config import IndexerConfig
from localllm.models.errors import ModelError
from localllm.models.properties import Indexer
from localllm.plan import Rope, Value


@dataclass(frozen=True, slots=True)
class Selector(Part):
    """Records the selection of positions for each layer."""

    own: IndexerConfig
    row: Indexer
    context: int  # number of positions that the plan serves
    chosen: dict[int, Value] = field(default_factory=dict)  # selection by layer

    by_head: ClassVar[bool] = False  # each KV head has its own selection
    pooled: ClassVar[bool] = False  # select pools of positions, each represented by one key

    def selection(self, layer: int, x: Value, narrow: Value, rope: Rope | None) -> Value | None:
        """Return the positions that a layer reads, or None for all.

        `narrow` is the input of the indexer's query matrix, and `rope` is the rotation of the attention keys.
        """
        chooses = self.own.chooses[layer]
        if chooses < 0 or self.own.count * self.own.block >= self.context:
            return None
        if rope is not None and rope.n_rot > self.own.head_dim:
            raise ModelError(
                f"{self.config.architecture}.attention.indexer.key_length: expected at least "
                f"rope.dimension_count {rope.n_rot}, found {self.own.head_dim}"
            )
        if chooses == layer:
            self.chosen[layer] = self.recorded(f"blk.{layer}.indexer.", x, narrow, rope)
        return self.chosen[chooses]

    @property
    def every(self) -> int:
        """Positions per key in the cache: the pool size if it is 2 or 4, which fill whole SIMD vectors, otherwise 1."""
        return self.own.block if self.pooled and self.own.block in (2, 4) else 1

    def recorded(self, name: str, x: Value, narrow: Value, rope: Rope | None) -> Value:
        """Record the selection of a layer that has an indexer. The arguments are as in `selection`."""
        builder, own = self.builder, self.own
        recorder, tensors = builder.recorder, builder.tensors
        q = builder.linear(name + "attn_q_b", narrow, own.heads * own.head_dim, narrow.width)
        k = builder.linear(name + "attn_k", x, own.head_dim, x.width)
        weight, bias = (tensors.vector(f"{name}k_norm.{part}", own.head_dim) for part in ("weight", "bias"))
        k = recorder.layer_norm(k, weight, bias, own.eps)
        if rope is not None:
            style = replace(rope, style=self.row.rope_style)
            q, k = (self.turned(heads, style) for heads in (q, k))
        k, weights = self.keys(name, k, x), self.weights(name, x)
        layer = recorder.append_index(k, self.every)
        return recorder.indexer_top_k(q, weights, layer, own.heads, own.count, own.block, pooled=self.pooled)

    def keys(self, name: str, k: Value, x: Value) -> Value:
        """Return the keys to cache, given one key k per position and the attention's input x."""
        return k

    def weights(self, name: str, x: Value) -> Value:
        """Return the weight of each indexer head in the sum of their scores."""
        own = self.own
        proj = self.tensors.matrix(f"{name}proj.weight", own.heads, x.width)
        return self.recorder.linear(x, proj, None, 1.0 / math.sqrt(own.heads * own.head_dim))

    def turned(self, x: Value, rope: Rope) -> Value:
        """Rotate the first dimensions of every head."""
        return self.recorder.rotate(x, self.own.head_dim, rope)


@dataclass(frozen=True, slots=True)
class NormedSelector(Selector):
    """An indexer whose queries and keys are both projections of the attention's input, with a norm each."""

    def projected(self, name: str, x: Value, heads: int) -> Value:
        return self.builder.linear(f"{name}_proj", x, heads * self.own.head_dim, x.width)

    def placed(self, name: str, x: Value, rope: Rope | None) -> Value:
        """Return heads, normed and rotated to their positions."""
        recorder, size = self.recorder, self.own.head_dim
        weight = self.tensors.vector(f"{name}_norm.weight", size)
        x = recorder.rms_norm(x, weight, self.config.eps, x.width // size)
        return x if rope is None else recorder.rotate(x, size, replace(rope, style=self.row.rope_style))

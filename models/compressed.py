"""The attention of DeepSeek 4: recent positions are cached one by one, distant ones as one compressed entry per pool.

All heads share one vector per position, which serves as key and value. A layer attends to the positions of a sliding
window and to the compressed entries of its pools (`plan.Pool`): to all entries, or, with small pools, to the entries
that an indexer selects. The vectors are rotated although they also serve as values, so the head outputs are rotated
back. The output matrix is low-rank, with one factor per group of heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from localllm.models.attention import Attention
from localllm.models.config import CompressionConfig
from localllm.models.reading.compression import OVERLAPPING
from localllm.plan import Rope, Value


@dataclass(frozen=True, slots=True)
class CompressedAttention(Attention):
    """Maps normed hidden states (T, width) to head outputs (T, heads * head_dim), and head outputs to (T, width)."""

    def mixed(self, x: Value, layer: int) -> Value:
        builder, name = self.builder, f"blk.{layer}.attn_"
        config, recorder, tensors, ratio = builder.config, builder.recorder, builder.tensors, self.own.ratios[layer]
        heads, size = config.heads[layer], config.head_dim[layer]
        rope = self.rope(layer)
        rank = tensors.height(name + "q_a.weight")
        narrow = builder.norm(name + "q_a_norm", builder.linear(name + "q_a", x, rank, x.width))
        q = builder.linear(name + "q_b", narrow, heads * size, rank)
        q = self.turned(recorder.rms_norm(q, tensors.ones(size), config.eps, heads), size, rope)
        row = builder.norm(name + "kv_a_norm", builder.linear(name + "kv", x, size, x.width))
        row = self.turned(row, size, rope)
        near = recorder.append(row, row, 1, prefix=True)
        far = selection = None
        if ratio:
            pooled = self.pooled(name + "compressor", x, size, ratio, rope)
            far = recorder.append(pooled, pooled, 1, ratio, prefix=True)
        if ratio == OVERLAPPING:
            selection = self.selection(f"blk.{layer}.indexer", x, narrow, rope)
        sinks = tensors.vector(name + "sinks.weight", heads)
        seen = recorder.attention(
            q, near, heads, config.attention_scale[layer], config.windows[layer], sinks=sinks, selection=selection,
            pools=far,
        )  # fmt: skip
        back = replace(rope, inverse_frequency=tuple([-f for f in rope.inverse_frequency]))
        return self.turned(seen, size, back)

    def output(self, mixed: Value, layer: int) -> Value:
        builder, name, groups, rank = self.builder, f"blk.{layer}.attn_output_", self.own.groups, self.own.rank
        shape = (groups, rank, mixed.width // groups)
        weight = builder.tensors.either(name + "a.weight", shape, (groups * rank, shape[2]))
        low = builder.recorder.head_linear(mixed, replace(weight, shape=shape))
        return builder.linear(name + "b", low, builder.config.width, groups * rank)

    @property
    def own(self) -> CompressionConfig:
        own = self.builder.config.compression
        assert own is not None, "not a model with compressed rows"
        return own

    def rope(self, layer: int) -> Rope:
        rope = (self.full if self.own.ratios[layer] else self.sliding).key
        assert rope is not None
        return rope

    def pooled(self, name: str, x: Value, size: int, ratio: int, rope: Rope) -> Value:
        """Return compressed entries (T, size), valid where a pool ends, rotated to the pool's first position."""
        builder, parts = self.builder, 2 if ratio == OVERLAPPING else 1
        values, scores = (builder.linear(f"{name}_{part}", x, parts * size, x.width) for part in ("kv", "gate"))
        bias = builder.tensors.matrix(f"{name}_ape.weight", ratio, parts * size)
        pooled = builder.norm(f"{name}_norm", builder.recorder.pool(values, scores, bias, parts))
        return self.turned(pooled, size, replace(rope, shift=1 - ratio))

    def selection(self, name: str, x: Value, narrow: Value, rope: Rope) -> Value | None:
        """Return the pools that each token reads, or None for all."""
        builder, own = self.builder, self.builder.config.indexer
        assert own is not None
        assert self.selector is not None
        if own.count * own.block >= self.selector.context:
            return None
        recorder = builder.recorder
        q = builder.linear(f"{name}.attn_q_b", narrow, own.heads * own.head_dim, narrow.width)
        k = self.pooled(f"{name}_compressor", x, own.head_dim, own.block, rope)
        weights = self.selector.weights(f"{name}.", x)
        q = self.turned(q, own.head_dim, rope)
        return recorder.indexer_top_k(
            q, weights, recorder.append_index(k, own.block), own.heads, own.count, own.block, pooled=True
        )

    def turned(self, x: Value, size: int, rope: Rope) -> Value:
        """Rotate the last dimensions of every head; the head width is `size`."""
        recorder, heads, plain = self.builder.recorder, x.width // size, size - rope.n_rot
        if not plain:
            return recorder.rotate(x, size, rope)
        turned = recorder.rotate(recorder.slice(x, plain, size, heads), rope.n_rot, rope)
        return recorder.concat(recorder.slice(x, 0, plain, heads), turned, heads)

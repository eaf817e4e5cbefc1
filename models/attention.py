"""The attention of a layer: projections, norms and rotation of heads, the cache, and what comes out."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.models.builder import Builder
from localllm.plan import Rope, Value


@dataclass(frozen=True, slots=True)
class Ropes:
    """The rotations of queries and of keys."""

    query: Rope
    key: Rope


@dataclass(frozen=True, slots=True)
class Attention:
    """Maps normed rows (T, width) to what the heads see (T, heads * head_dim), and that to rows (T, width)."""

    builder: Builder
    full: Ropes
    sliding: Ropes  # of the layers with a window

    def mixed(self, x: Value, layer: int) -> Value:
        """What the heads see."""
        builder = self.builder
        config, recorder, name = builder.config, builder.recorder, f"blk.{layer}."
        heads, kv_heads, window = config.heads[layer], config.kv_heads[layer], config.windows[layer]
        head_dim = config.head_dim[layer]
        q, k, v = self.projections(x, layer)
        if config.clamp:
            q, k, v = (recorder.clamp(value, config.clamp) for value in (q, k, v))
        ropes = (self.sliding if window else self.full) if config.rotated[layer] else None
        late = builder.row.norms_rotated
        if ropes is not None and late:
            q, k = self.rotated(q, k, head_dim, ropes)
        q, k = self.head_norm(name + "attn_q_norm", q, heads), self.head_norm(name + "attn_k_norm", k, kv_heads)
        if ropes is not None and not late:
            q, k = self.rotated(q, k, head_dim, ropes)
        stored = recorder.append(k, v, kv_heads)
        sinks = builder.tensors.optional(name + "attn_sinks.weight", heads)
        mixed = recorder.attention(
            q, stored, heads, config.attention_scale[layer], window, config.attention_softcap, sinks
        )  # (T, heads * head_dim)
        if not builder.row.gated:
            return mixed
        return recorder.glu(builder.linear(name + "attn_gate", x, mixed.width, config.width), mixed, "sigmoid")

    def output(self, mixed: Value, layer: int) -> Value:
        """The output matrix times what the heads see, which a file may norm first."""
        name = f"blk.{layer}."
        mixed = self.builder.optional_norm(name + "attn_sub_norm", mixed)
        return self.builder.linear(name + "attn_output", mixed, self.builder.config.width, mixed.width)

    def projections(self, x: Value, layer: int) -> tuple[Value, Value, Value]:
        """Queries, keys and values: from three matrices, or from one that holds the rows of all three."""
        builder, config, name = self.builder, self.builder.config, f"blk.{layer}."
        q = config.heads[layer] * config.head_dim[layer]
        kv = config.kv_heads[layer] * config.head_dim[layer]
        if name + "attn_qkv.weight" not in builder.tensors:
            return (
                builder.linear(name + "attn_q", x, q, config.width),
                builder.linear(name + "attn_k", x, kv, config.width),
                builder.linear(name + "attn_v", x, kv, config.width),
            )
        name, of, scale = name + "attn_qkv", q + 2 * kv, builder.scale(name + "attn_qkv")
        return (
            builder.rows(name, x, 0, q, of, scale),
            builder.rows(name, x, q, q + kv, of, scale),
            builder.rows(name, x, q + kv, of, of, scale),
        )

    def rotated(self, q: Value, k: Value, head_dim: int, ropes: Ropes) -> tuple[Value, Value]:
        recorder = self.builder.recorder
        return recorder.rotate(q, head_dim, ropes.query), recorder.rotate(k, head_dim, ropes.key)

    def head_norm(self, name: str, x: Value, heads: int) -> Value:
        """The norm of each head, with shared or own weights, or of all as one row: the shape of the weights decides."""
        builder = self.builder
        name, head_dim, eps = name + ".weight", x.width // heads, builder.config.eps
        if not builder.row.qk_norm and name not in builder.tensors:
            return x
        weight = builder.tensors.either(name, (head_dim,), (heads * head_dim,), (heads, head_dim))
        groups = 1 if tuple(weight.shape) == (heads * head_dim,) else heads
        if builder.row.norm == "rms":
            return builder.recorder.rms_norm(x, weight, eps, groups)
        return builder.recorder.layer_norm(x, weight, None, eps, groups)

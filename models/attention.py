"""The attention of a layer: Q/K/V projections, head norms and rotation, the KV cache, and the output projection."""

from __future__ import annotations

from dataclasses import dataclass, field

from localllm.models.builder import Builder
from localllm.models.distances import by_distance
from localllm.models.indexer import Selector
from localllm.plan import Rope, Value, Weight


@dataclass(frozen=True, slots=True)
class Ropes:
    """The rotations of queries and of keys."""

    query: Rope | None
    key: Rope | None


NOT_ROTATED = Ropes(None, None)


@dataclass(frozen=True, slots=True)
class Attention:
    """Maps normed hidden states (T, width) to head outputs (T, heads * value_dim), and head outputs to (T, width)."""

    builder: Builder
    full: Ropes
    sliding: Ropes  # rotations of sliding-window layers
    # model layer -> cache layer, for the layers recorded so far
    stored: dict[int, int] = field(default_factory=dict)
    after: bool = False  # attend only to positions after the encoder text
    still: Ropes = NOT_ROTATED  # for layers without RoPE: rotations by angle 0, which apply the query temperature
    selector: Selector | None = None  # sparse attention: selects the positions that layers read

    def mixed(self, x: Value, layer: int) -> Value:
        """Return the head outputs (T, heads * value_dim), gated if the model has an output gate."""
        builder = self.builder
        config, recorder, name = builder.config, builder.recorder, f"blk.{layer}."
        heads, kv_heads, window = config.heads[layer], config.kv_heads[layer], config.windows[layer]
        q, *own = self.projections(x, layer)
        rotated = config.rotated[layer]
        ropes = (self.sliding if window else self.full) if rotated else self.still
        unit = config.unit_qk_norm and rotated
        q = self.placed(name + "attn_q_norm", q, heads, ropes.query, unit)
        if own:
            k, v = own[0], own[-1]
            if builder.row.value_norm:
                v = recorder.rms_norm(v, builder.tensors.ones(v.width // kv_heads), config.eps, kv_heads)
            if config.value_scale != 1.0:
                v = recorder.scale(v, config.value_scale)
            both = (
                builder.row.qk_norm or name + "attn_q_norm.weight" in builder.tensors
            )  # a k norm without a q norm is ignored
            k = self.placed(name + "attn_k_norm" if both else "", k, kv_heads, ropes.key, unit)
            self.stored[layer] = recorder.append(k, v, kv_heads)
        sinks = builder.tensors.optional(name + "attn_sinks.weight", heads)
        slopes = builder.tensors.slopes(heads, config.alibi) if config.alibi else None
        chunked = builder.row.sliding is not None and builder.row.sliding.chunked and window > 0
        stored, scale = self.stored[config.kv_layer[layer]], config.attention_scale[layer]
        selection = None if self.selector is None else self.selector.selection(layer, x, x, ropes.key)
        slices = kv_heads if self.selector is not None and selection is not None and self.selector.each else 1
        mixed = recorder.attention(
            q, stored, heads, scale, window, config.attention_softcap, sinks, slopes, chunked, config.causal,
            self.distances(layer, heads), self.after, selection, slices,
        )  # fmt: skip
        if builder.row.query_gate:
            return recorder.glu(self.half(x, layer, 1), mixed, "sigmoid")
        if builder.row.gated is None:
            return mixed
        each = heads if builder.tensors.height(name + "attn_gate.weight") == heads else mixed.width
        return recorder.glu(builder.linear(name + "attn_gate", x, each, config.width), mixed, builder.row.gated)

    def distances(self, layer: int, heads: int) -> Weight | None:
        """Return the relative position bias of the layer, or the first layer's bias if it is shared."""
        builder, buckets = self.builder, self.builder.config.buckets
        if not buckets:
            return None
        own = f"blk.{layer}.attn_rel_b.weight"
        name = own if own in builder.tensors else "blk.0.attn_rel_b.weight"
        return by_distance(builder.tensors.matrix(name, buckets, heads), builder.config.causal)

    def output(self, mixed: Value, layer: int) -> Value:
        """Return the output projection of the head outputs, normed first if the GGUF has a norm."""
        name = f"blk.{layer}."
        mixed = self.builder.optional_norm(name + "attn_sub_norm", mixed)
        return self.builder.linear(name + "attn_output", mixed, self.builder.config.width, mixed.width)

    def projections(self, x: Value, layer: int) -> list[Value]:
        """Return [queries, keys, values].

        A layer that reads another layer's KV cache has only queries. Values are omitted if the keys also serve as
        values. The projections have separate matrices, or one fused matrix.
        """
        builder, config, name = self.builder, self.builder.config, f"blk.{layer}.attn_"
        q, k = (heads[layer] * config.head_dim[layer] for heads in (config.heads, config.kv_heads))
        v = config.kv_heads[layer] * config.value_dim[layer]
        sizes = {"q": q, "k": k, "v": v} if config.kv_layer[layer] == layer else {"q": q}
        if name + "qkv.weight" in builder.tensors:
            of, scale, starts = q + k + v, builder.scale(name + "qkv"), {"q": 0, "k": q, "v": q + k}
            found = [
                builder.rows(name + "qkv", x, starts[part], starts[part] + size, of, scale)
                for part, size in sizes.items()
            ]
        else:
            if builder.row.keys_as_values and name + "v.weight" not in builder.tensors:
                sizes.pop("v", None)
            gated = builder.row.query_gate
            found = [
                self.half(x, layer, 0) if gated and part == "q" else builder.linear(name + part, x, size, config.width)
                for part, size in sizes.items()
            ]
        return [builder.recorder.clamp(value, config.clamp) for value in found] if config.clamp else found

    def half(self, x: Value, layer: int, which: int) -> Value:
        """Return the queries (0) or the output gate (1); one matrix contains both, alternating per head."""
        builder, config, name = self.builder, self.builder.config, f"blk.{layer}.attn_q"
        size = config.head_dim[layer]
        of, part = 2 * size * config.heads[layer], (2 * size, which * size, (which + 1) * size)
        weight = builder.tensors.matrix(f"{name}.weight", of, config.width).rows_of_each(*part)
        bias = builder.tensors.optional(f"{name}.bias", of)
        return builder.recorder.linear(x, weight, bias and bias.rows_of_each(*part), builder.scale(name))

    def placed(self, name: str, x: Value, heads: int, rope: Rope | None, unit: bool) -> Value:
        """Return queries or keys, normed and rotated in the architecture's order.

        With `unit`, a norm without weights precedes the GGUF's norm, if it has one.
        """
        recorder, late = self.builder.recorder, self.builder.row.norms_rotated
        head_dim = x.width // heads
        if rope is not None and late:
            x = recorder.rotate(x, head_dim, rope)
        if unit:
            x = recorder.rms_norm(x, self.builder.tensors.ones(head_dim), self.builder.config.eps, heads)
        x = self.head_norm(name, x, heads)
        return recorder.rotate(x, head_dim, rope) if rope is not None and not late else x

    def head_norm(self, name: str, x: Value, heads: int) -> Value:
        """Norm each head (with shared or separate weights) or the whole projection, depending on the shape of the
        weights.
        """
        builder = self.builder
        bias, name, head_dim, eps = name + ".bias", name + ".weight", x.width // heads, builder.config.eps
        if not builder.row.qk_norm and name not in builder.tensors:
            return x
        if builder.config.unit_qk_norm:  # only the per-head scale remains to be applied
            return builder.recorder.scale_columns(x, builder.tensors.repeated(name, heads, head_dim), heads)
        weight = builder.tensors.either(name, (head_dim,), (heads * head_dim,), (heads, head_dim))
        groups = 1 if tuple(weight.shape) == (heads * head_dim,) else heads
        if builder.config.norm == "rms" and not builder.row.head_norm_eps:
            return builder.recorder.rms_norm(x, weight, eps, groups)
        eps, added = builder.row.head_norm_eps or eps, builder.tensors.optional(bias, *weight.shape)
        return builder.recorder.layer_norm(x, weight, added, eps, groups)

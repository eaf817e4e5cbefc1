"""The attention of a layer: Q/K/V projections, head norms and rotation, the KV cache, and the output projection."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from localllm.models.builder import Part
from localllm.models.indexer import Selector
from localllm.plan import Rope, Value, Weight


@dataclass(frozen=True, slots=True)
class Ropes:
    """The rotations of queries and of keys."""

    query: Rope | None
    key: Rope | None


NOT_ROTATED = Ropes(None, None)


@dataclass(frozen=True, slots=True)
class Attention(Part):
    """Maps normed hidden states (T, width) to head outputs (T, heads * value_dim), and head outputs to (T, width)."""

    full: Ropes
    sliding: Ropes  # rotations of sliding-window layers
    selector: Selector | None = None  # sparse attention: selects the positions that layers read
    # model layer -> cache layer, for the layers recorded so far
    stored: dict[int, int] = field(default_factory=dict)

    chunked: ClassVar[bool] = False  # a window is a chunk of the context
    after: ClassVar[bool] = False  # attend only to positions after the encoder text
    layer_norm_eps: ClassVar[float | None] = None  # q/k norms are layer norms with this epsilon
    sliding_factors: ClassVar[bool] = True  # frequency factors also apply to sliding-window layers

    def mixed(self, x: Value, layer: int) -> Value:
        """Return the head outputs (T, heads * value_dim), gated if the model has an output gate."""
        builder = self.builder
        config, recorder, name = builder.config, builder.recorder, f"blk.{layer}."
        heads, kv_heads, window = config.heads[layer], config.kv_heads[layer], config.windows[layer]
        q, *own = self.projections(x, layer)
        ropes, unit = self.ropes(layer), config.unit_qk_norm and config.rotated[layer]
        q = self.placed(name + "attn_q_norm", q, heads, ropes.query, unit)
        if own:
            v = self.values(own[-1], kv_heads)
            # a k norm without a q norm is ignored
            both = builder.row.qk_norm or name + "attn_q_norm.weight" in builder.tensors
            k = self.placed(name + "attn_k_norm" if both else "", own[0], kv_heads, ropes.key, unit)
            self.stored[layer] = recorder.append(k, v, kv_heads)
        sinks = builder.tensors.optional(name + "attn_sinks.weight", heads)
        slopes = builder.tensors.slopes(heads, config.alibi) if config.alibi else None
        selection = None if self.selector is None else self.selector.selection(layer, x, x, ropes.key)
        slices = kv_heads if self.selector is not None and selection is not None and self.selector.by_head else 1
        mixed = recorder.attention(
            q, self.stored[config.kv_layer[layer]], heads, config.attention_scale[layer], window,
            config.attention_softcap, sinks, slopes, self.chunked and window > 0, config.causal,
            self.distances(layer, heads), self.after, selection, slices, spans=self.spans(layer),
        )  # fmt: skip
        return self.gated(x, mixed, layer)

    def spans(self, layer: int) -> bool:
        """Return whether the tokens of a picture see each other."""
        media = self.builder.media
        spans = self.builder.row.spans == "all" or self.config.windows[layer] > 0
        return media is not None and media.span > 0 and spans

    def ropes(self, layer: int) -> Ropes:
        config = self.config
        return (self.sliding if config.windows[layer] else self.full) if config.rotated[layer] else NOT_ROTATED

    def values(self, v: Value, kv_heads: int) -> Value:
        """Return the values to cache."""
        return v

    def distances(self, layer: int, heads: int) -> Weight | None:
        """Return the score bias of each head by distance, if the model has one."""
        return None

    def gated(self, x: Value, mixed: Value, layer: int) -> Value:
        """Return the head outputs, multiplied by a gate of the attention's input x if the model has one."""
        builder, name = self.builder, f"blk.{layer}.attn_gate"
        if builder.row.gated is None:
            return mixed
        heads = builder.config.heads[layer]
        each = heads if builder.tensors.height(f"{name}.weight") == heads else mixed.width
        return builder.recorder.glu(builder.linear(name, x, each, builder.config.width), mixed, builder.row.gated)

    def output(self, mixed: Value, layer: int) -> Value:
        """Return the output projection of the head outputs, normed first if the GGUF has a norm."""
        name = f"blk.{layer}."
        mixed = self.builder.optional_norm(name + "attn_sub_norm", mixed)
        return self.builder.linear(name + "attn_output", mixed, self.config.width, mixed.width)

    def projections(self, x: Value, layer: int) -> list[Value]:
        """Return [queries, keys, values].

        A layer that reads another layer's KV cache has only queries. Values are omitted if the keys also serve as
        values. The projections have separate matrices, or one fused matrix.
        """
        builder, config, name = self.builder, self.config, f"blk.{layer}.attn_"
        q, k = (heads[layer] * config.head_dim[layer] for heads in (config.heads, config.kv_heads))
        sizes = {"q": q, "k": k, "v": config.kv_heads[layer] * config.value_dim[layer]}
        parts = self.parts(layer) if config.kv_layer[layer] == layer else "q"
        if name + "qkv.weight" in builder.tensors:
            of, scale, starts = sum(sizes.values()), builder.scale(name + "qkv"), {"q": 0, "k": q, "v": q + k}
            found = [
                builder.rows(name + "qkv", x, starts[part], starts[part] + sizes[part], of, scale) for part in parts
            ]
        else:
            found = [self.projection(name + part, x, sizes[part], layer) for part in parts]
        return [builder.recorder.clamp(value, config.clamp) for value in found] if config.clamp else found

    def parts(self, layer: int) -> str:
        """Return which projections a layer with its own KV cache has."""
        return "qkv"

    def projection(self, name: str, x: Value, size: int, layer: int) -> Value:
        return self.builder.linear(name, x, size, x.width)

    def placed(self, name: str, x: Value, heads: int, rope: Rope | None, unit: bool) -> Value:
        """Return queries or keys, normed and rotated in the architecture's order.

        With `unit`, a norm without weights precedes the GGUF's norm, if it has one.
        """
        recorder, late = self.recorder, self.builder.row.norms_rotated
        head_dim = x.width // heads
        if rope is not None and late:
            x = recorder.rotate(x, head_dim, rope)
        if unit:
            x = self.builder.unit(x, heads)
        x = self.head_norm(name, x, heads)
        return recorder.rotate(x, head_dim, rope) if rope is not None and not late else x

    def head_norm(self, name: str, x: Value, heads: int) -> Value:
        """Norm each head (with shared or separate weights) or the whole projection, depending on the shape of the
        weights.
        """
        builder = self.builder
        bias, name, head_dim = name + ".bias", name + ".weight", x.width // heads
        if not builder.row.qk_norm and name not in builder.tensors:
            return x
        if builder.config.unit_qk_norm:  # only the per-head scale remains to be applied
            return builder.recorder.scale_columns(x, builder.tensors.repeated(name, heads, head_dim), heads)
        weight = builder.tensors.either(name, (head_dim,), (heads * head_dim,), (heads, head_dim))
        groups = 1 if tuple(weight.shape) == (heads * head_dim,) else heads
        if self.layer_norm_eps is None and builder.config.norm == "rms":
            return builder.recorder.rms_norm(x, weight, builder.config.eps, groups)
        eps = self.layer_norm_eps or builder.config.eps
        return builder.recorder.layer_norm(x, weight, builder.tensors.optional(bias, *weight.shape), eps, groups)

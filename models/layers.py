"""One layer of the forward: attention and a feed-forward, each added to the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.models.attention import Attention
from localllm.models.builder import Builder
from localllm.models.feed_forward import FeedForward
from localllm.models.per_layer import PerLayer
from localllm.plan import Value

OLD_POST_NORM = "layer_output_norm"


@dataclass(frozen=True, slots=True)
class LayerRecorder:
    """Records one layer: T rows to T rows. The last one continues with only the rows whose logits are wanted."""

    builder: Builder
    attention: Attention
    feed_forward: FeedForward
    per_layer: PerLayer | None = None

    def layer(self, x: Value, layer: int) -> Value:
        """Attention, then the feed-forward; or both of the same rows."""
        builder, name = self.builder, f"blk.{layer}."
        row, recorder = builder.row, builder.recorder
        normed = self.input_norm(name + row.attention_norm, x)
        second = builder.optional_norm(name + "attn_norm_2", x)  # Falcon 40B: attention has a norm of its own
        mixed = self.attention.mixed(normed if second is x else second, layer)
        last = layer == builder.config.layers - 1
        if last:  # no later operation reads other rows; they skip the last feed-forward
            mixed, x = recorder.select_rows(mixed), recorder.select_rows(x)
        y = self.attention.output(mixed, layer)
        if not builder.config.parallel:
            before, x = x, self.residual(x, y, name + row.attention_post_norm)
            z = self.feed_forward(self.input_norm(name + row.ffn_norm, x), layer, x, before)
            x = self.residual(x, z, name + row.ffn_post_norm)
            if self.per_layer is not None:
                x = recorder.add(x, self.per_layer.branch(x, layer))
            if row.embedding_skip:  # its number is not of the layer's result
                return x
            scale = builder.tensors.optional_numbers(name + "layer_output_scale.weight", 1)
            return x if scale is None else recorder.scale(x, float(scale[0]))
        if row.ffn_norm != row.attention_norm:
            normed = self.input_norm(name + row.ffn_norm, x)
        elif last:
            normed = recorder.select_rows(normed)
        return recorder.add(x, recorder.add(self.feed_forward(normed, layer, x, x), y))

    def residual(self, x: Value, y: Value, norm: str) -> Value:
        """x + y; the architecture may norm or scale y first."""
        builder = self.builder
        if builder.row.post_norms:
            if f"{norm}.weight" not in builder.tensors and norm.endswith(OLD_POST_NORM):  # Grok's name since 2025
                norm = norm.removesuffix(OLD_POST_NORM) + "post_ffw_norm"
            y = builder.norm(norm, y, builder.row.post_norm_eps)
        if builder.config.residual_scale != 1.0:
            y = builder.recorder.scale(y, builder.config.residual_scale)
        return builder.recorder.add(x, y)

    def input_norm(self, name: str, x: Value) -> Value:
        """The norm of that name; x itself if the architecture has none, which the name then ends in."""
        return x if name.endswith(".") else self.builder.norm(name, x)

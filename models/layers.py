"""Records one transformer layer: attention and a feed-forward, each added to the residual stream."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

from localllm.models.attention import Attention
from localllm.models.builder import Builder
from localllm.models.feed_forward import FeedForward
from localllm.models.per_layer import PerLayer
from localllm.models.recurrent import Recurrence
from localllm.plan import Value

OLD_POST_NORM = "layer_output_norm"


@dataclass(frozen=True, slots=True)
class LayerRecorder:
    """Records one layer for the hidden states of T tokens. One layer selects the tokens whose logits are requested."""

    builder: Builder
    attention: Attention
    recurrence: Recurrence
    feed_forward: FeedForward
    per_layer: PerLayer | None = None
    every_row: bool = False  # the last layer keeps the hidden states of all tokens

    def begin(self, x: Value) -> Value:
        """Return the input of the first layer from the token embeddings."""
        return x

    def end(self, x: Value) -> Value:
        """Return the input of the output norm from the last layer's output."""
        return x

    def hidden(self, x: Value) -> Value | None:
        """Return the input of multi-token-prediction heads from the last layer's output; None if it
        equals the input of the output norm.
        """
        return None

    def layer(self, x: Value, layer: int) -> Value:
        """Record attention and the feed-forward, in sequence or in parallel."""
        builder, name = self.builder, f"blk.{layer}."
        row, recorder = builder.row, builder.recorder
        if row.recurrent is not None and row.recurrent.alone:
            return self.alone(x, layer)
        normed = self.input_norm(name + row.attention_norm, x)
        # Falcon 40B has a separate norm for attention. In Jina's code encoder and in recurrent layers of MiniMax 01,
        # the same tensor name belongs to a different norm.
        other = row.sum_norms or builder.config.recurs[layer]
        second = x if other else builder.optional_norm(name + "attn_norm_2", x)
        mixers = self.mixers(layer)
        mixed = [mixer.mixed(normed if second is x else second, layer) for mixer in mixers]
        if row.normed_residual:
            x = normed
        selects = self.selects(layer)
        if selects:
            mixed, x = [recorder.select_rows(value) for value in mixed], recorder.select_rows(x)
        y = reduce(recorder.add, [mixer.output(value, layer) for mixer, value in zip(mixers, mixed, strict=True)])
        if not builder.config.parallel:
            before, x = x, self.residual(x, y, name + row.attention_post_norm)
            if row.sum_norms and name + "attn_norm_2.weight" in builder.tensors:
                x = self.residual(before, x, name + "attn_norm_2")
            normed = self.input_norm(name + row.ffn_norm, x)
            z = self.feed_forward(normed, layer, x, before)
            x = self.residual(normed if row.normed_residual else x, z, name + row.ffn_post_norm)
            if self.per_layer is not None:
                x = recorder.add(x, self.per_layer.branch(x, layer))
            if row.embedding_skip:  # here `layer_output_scale` scales the embedding instead
                return x
            scale = builder.tensors.optional_numbers(name + "layer_output_scale.weight", 1)
            return x if scale is None else recorder.scale(x, float(scale[0]))
        if row.ffn_norm != row.attention_norm:
            normed = self.input_norm(name + row.ffn_norm, x)
        elif selects:
            normed = recorder.select_rows(normed)
        return recorder.add(x, recorder.add(self.feed_forward(normed, layer, x, x), y))

    def alone(self, x: Value, layer: int) -> Value:
        """Record a layer with a single block: attention, a recurrent mixer, or a feed-forward."""
        builder, name = self.builder, f"blk.{layer}."
        recorder, mixers = builder.recorder, self.mixers(layer)
        mixed = self.input_norm(name + builder.row.attention_norm, x)
        for mixer in mixers:
            mixed = mixer.mixed(mixed, layer)
        if self.selects(layer):
            mixed, x = recorder.select_rows(mixed), recorder.select_rows(x)
        y = mixers[0].output(mixed, layer) if mixers else self.feed_forward(mixed, layer, x, x)
        return self.residual(x, y, name + builder.row.attention_post_norm)

    def mixers(self, layer: int) -> list[Attention | Recurrence]:
        """Return the mixers of the layer: attention, recurrence, or both."""
        config = self.builder.config
        attention: list[Attention | Recurrence] = [self.attention] if config.attends[layer] else []
        return [*attention, self.recurrence] if config.recurs[layer] else attention

    def selects(self, layer: int) -> bool:
        """Return whether later layers read only the hidden states of tokens whose logits are requested.

        This is the last layer with its own KV cache; later layers read cached keys and values of all tokens.
        """
        return not self.every_row and layer == max(self.builder.config.kv_layer)

    def residual(self, x: Value, y: Value, norm: str) -> Value:
        """Return x + y. Depending on the architecture, y is normed or scaled first, or x is scaled."""
        builder = self.builder
        if builder.row.normed_residual:
            return builder.recorder.add(builder.recorder.scale(x, builder.config.residual_scale), y)
        if builder.row.sum_norms:
            return builder.norm(norm, builder.recorder.add(x, y))
        if builder.row.post_norms:
            if f"{norm}.weight" not in builder.tensors and norm.endswith(OLD_POST_NORM):  # Grok's name since 2025
                norm = norm.removesuffix(OLD_POST_NORM) + "post_ffw_norm"
            y = builder.norm(norm, y, builder.row.post_norm_eps)
        if builder.config.residual_scale != 1.0:
            y = builder.recorder.scale(y, builder.config.residual_scale)
        return builder.recorder.add(x, y)

    def input_norm(self, name: str, x: Value) -> Value:
        """Return the named norm of x, or x if the architecture has no such norm (the name ends in ".")."""
        bare = self.builder.row.bare_start and name.startswith("blk.0.")
        if name.endswith(".") or (bare and f"{name}.weight" not in self.builder.tensors):
            return x
        return self.builder.norm(name, x)


class LateNorms(LayerRecorder):
    """Norms the outputs of attention and feed-forward instead of their inputs (Swin Transformer V2)."""

    __slots__ = ()

    def residual(self, x: Value, y: Value, norm: str) -> Value:
        """Return x plus the norm of y."""
        return self.builder.recorder.add(x, self.builder.norm(norm, y))

    def input_norm(self, name: str, x: Value) -> Value:
        """Return x unchanged."""
        return x

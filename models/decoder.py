"""The decoder of T5 (arXiv:1910.10683): its layers attend to the decoded tokens, then to the encoder's output.

The cross-attention keys and values, computed from the encoder's output, are cached at the positions of the encoded
text. Decoded tokens get the positions after the encoded text: relative position biases depend only on distances, so any
start position works.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from localllm.models.attention import NOT_ROTATED, Attention
from localllm.models.builder import Builder
from localllm.models.config import Config
from localllm.models.distances import name_in_stack
from localllm.models.feed_forward import FeedForward
from localllm.models.tensors import Tensors
from localllm.plan import Value, Weight


def decoder_of(builder: Builder, tensors: Tensors) -> Decoder:
    """Return the decoder for the encoder with this builder; `tensors` use the decoder's names."""
    own = Builder(_config(builder.config), builder.row, tensors, builder.recorder)
    return Decoder(own, FromText(own, NOT_ROTATED, NOT_ROTATED, after=True), FeedForward(own))


def _config(config: Config) -> Config:
    """Return the decoder's config: causal layers like the encoder's first layer, without
    sliding-window attention and RoPE."""
    assert config.decoder is not None
    count = config.decoder.layers

    def many(name: str) -> tuple[object, ...]:
        return (getattr(config, name)[0],) * count

    same = ("heads", "kv_heads", "head_dim", "value_dim", "ffn_width", "attention_scale", "limits", "sparsity")
    none = {"windows": (0,) * count, "rotated": (False,) * count, "kv_layer": tuple(range(count))}
    return replace(config, layers=count, causal=True, **{name: many(name) for name in same}, **none)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class FromText(Attention):
    """Self-attention over the decoded tokens, and cross-attention to the text."""

    def remember(self, text: Value, layer: int) -> int:
        """Cache the cross-attention keys and values of the encoder's output; return their cache layer."""
        config, recorder, name = self.builder.config, self.builder.recorder, f"blk.{layer}.cross_attn_"
        heads = config.kv_heads[layer]
        k, v = (
            self.builder.linear(name + part, text, heads * width, config.width)
            for part, width in (("k", config.head_dim[layer]), ("v", config.value_dim[layer]))
        )
        return recorder.append(k, v, heads)

    def across(self, x: Value, layer: int, stored: int) -> Value:
        """Return the head outputs of cross-attention, (T, heads * value_dim)."""
        config, heads = self.builder.config, self.builder.config.heads[layer]
        q = self.builder.linear(f"blk.{layer}.cross_attn_q", x, heads * config.head_dim[layer], config.width)
        return self.builder.recorder.attention(q, stored, heads, config.attention_scale[layer], causal=False)


@dataclass(frozen=True, slots=True)
class Decoder:
    """Records the decoder, from T decoded tokens to the hidden states of tokens whose logits are requested."""

    builder: Builder
    attention: FromText
    feed_forward: FeedForward

    def record(self, text: Value, table: Weight) -> Value:
        """Record all layers. `text` is the encoder's output, `table` the token embedding matrix."""
        recorder, count = self.builder.recorder, self.builder.config.layers
        stored = [self.attention.remember(text, layer) for layer in range(count)]
        recorder.end_encoder()
        x = recorder.embed(table)
        for layer in range(count):
            recorder.begin_layer()
            x = self.layer(x, layer, stored[layer])
        return x

    def layer(self, x: Value, layer: int, stored: int) -> Value:
        builder, name = self.builder, f"blk.{layer}."
        recorder = builder.recorder
        mixed = self.attention.mixed(builder.norm(name + "attn_norm", x), layer)
        x = recorder.add(x, self.attention.output(mixed, layer))
        seen = self.attention.across(builder.norm(name + "cross_attn_norm", x), layer, stored)
        if layer == builder.config.layers - 1:
            seen, x = recorder.select_rows(seen), recorder.select_rows(x)
        x = recorder.add(x, builder.linear(name + "cross_attn_o", seen, builder.config.width, seen.width))
        return recorder.add(x, self.feed_forward(builder.norm(name + "ffn_norm", x), layer, x, x))


def tensors_of(checked: Tensors) -> Tensors:
    """Return the GGUF's tensors under the decoder's names."""
    return checked.renamed(partial(name_in_stack, "dec"))

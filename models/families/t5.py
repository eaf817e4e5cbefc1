"""T5 (arXiv:1910.10683): a relative position bias, and a decoder that attends to the encoder's output.

The GGUF contains a score bias for each bucket of distances and each head. Each short distance has its own bucket,
longer distances share buckets, and all distances from FARTHEST on share the last.

The decoder's layers attend to the decoded tokens, then to the encoder's output. The cross-attention keys and values,
computed from the encoder's output, are cached at the positions of the encoded text. Decoded tokens get the positions
after the encoded text: relative position biases depend only on distances, so any start position works.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from localllm.models import derived
from localllm.models.architecture import Architecture, FeedForward, LayerRecorder, Output
from localllm.models.attention import NOT_ROTATED, Attention
from localllm.models.config import Config, DecoderConfig
from localllm.models.properties import Properties
from localllm.models.reading import Keys, read_general
from localllm.models.reading.bounds import MAX_LAYERS
from localllm.models.reading.config import read_vocabulary
from localllm.plan import Plan, Value, Weight

FARTHEST = 128
_MAX_BUCKETS = 128  # maximum buckets of the relative position bias; known models have 32


def _read(keys: Keys, row: Properties, head: int) -> Config:
    """Read an encoder; `own` is the number of buckets."""
    config = read_general(keys, row, head)
    return replace(config, own=keys.integer("attention.relative_buckets_count", 4, _MAX_BUCKETS))


def _read_both(keys: Keys, row: Properties, head: int) -> Config:
    """Read an encoder and its decoder; the decoder start token defaults to BOS."""
    config = _read(keys.having(attention__causal=False), row, head)
    count = keys.integer("decoder_block_count", 1, MAX_LAYERS, default=config.layers)
    own, last = replace(keys, prefix=""), read_vocabulary(keys) - 1
    starts = "tokenizer.ggml.bos_token_id"
    default = own.integer(starts, 0, last) if starts in keys.metadata else None
    start = keys.integer("decoder_start_token_id", 0, last, default=default)
    return replace(config, decoder=DecoderConfig(count, start))


def _in_stack(stack: str, name: str) -> str:
    """Return the GGUF's name of a layer tensor in the encoder ("enc") or in the decoder ("dec")."""
    return f"{stack}.{name.replace('attn_output.', 'attn_o.')}" if name.startswith("blk.") else name


class T5Attention(Attention):
    def distances(self, layer: int, heads: int) -> Weight | None:
        """Return the relative position bias of the layer, or the first layer's bias if it is shared."""
        own = f"blk.{layer}.attn_rel_b.weight"
        name = own if own in self.tensors else "blk.0.attn_rel_b.weight"
        return _by_distance(self.tensors.matrix(name, self.builder.own(int), heads), self.config.causal)


class T5FeedForward(FeedForward):
    def activated(self, x: Value, layer: int) -> Value:
        return self.recorder.activate(x, "relu")


class T5Layers(LayerRecorder):
    """Records a layer of the encoder, and the decoder after the last one unless the encoder's output is wanted."""

    @staticmethod
    def stored(config: Config, name: str) -> str:
        return _in_stack("enc", name)

    @property
    def decodes(self) -> bool:
        return self.config.decoder is not None and not self.embeddings

    def selects(self, layer: int) -> bool:
        return not self.decodes and super().selects(layer)

    def layer(self, x: Value, layer: int) -> Value:
        x = super().layer(x, layer)
        if not self.decodes or layer < self.config.layers - 1:
            return x
        tensors = self.tensors.renamed(partial(_in_stack, "dec"))
        own = replace(self.builder, config=_decoder_config(self.config), tensors=tensors)
        decoder = DecoderRecorder(own, FromText(own, NOT_ROTATED, NOT_ROTATED), self.recurrence, T5FeedForward(own))
        return decoder.record(self.builder.norm(self.builder.row.output_norm, x))


def _decoder_config(config: Config) -> Config:
    """Return the decoder's config: causal layers like the encoder's first layer, without
    sliding-window attention and RoPE."""
    assert config.decoder is not None
    count = config.decoder.layers

    def many(name: str) -> tuple[object, ...]:
        return (getattr(config, name)[0],) * count

    same = ("heads", "kv_heads", "head_dim", "value_dim", "ffn_width", "attention_scale", "limits")
    none = {"windows": (0,) * count, "rotated": (False,) * count, "kv_layer": tuple(range(count))}
    return replace(config, layers=count, causal=True, **{name: many(name) for name in same}, **none)  # type: ignore[arg-type]


class FromText(T5Attention):
    """Self-attention over the decoded tokens, and cross-attention to the text."""

    after = True

    def remember(self, text: Value, layer: int) -> int:
        """Cache the cross-attention keys and values of the encoder's output; return their cache layer."""
        config, recorder, name = self.config, self.recorder, f"blk.{layer}.cross_attn_"
        heads = config.kv_heads[layer]
        k, v = (
            self.builder.linear(name + part, text, heads * width, config.width)
            for part, width in (("k", config.head_dim[layer]), ("v", config.value_dim[layer]))
        )
        return recorder.append(k, v, heads)

    def across(self, x: Value, layer: int, stored: int) -> Value:
        """Return the head outputs of cross-attention, (T, heads * value_dim)."""
        config, heads = self.config, self.config.heads[layer]
        q = self.builder.linear(f"blk.{layer}.cross_attn_q", x, heads * config.head_dim[layer], config.width)
        return self.recorder.attention(q, stored, heads, config.attention_scale[layer], causal=False)


@dataclass(frozen=True, slots=True)
class DecoderRecorder(LayerRecorder):
    """Records the decoder, from T decoded tokens to the hidden states of tokens whose logits are requested."""

    attention: FromText

    def record(self, text: Value) -> Value:
        """Record all layers; `text` is the encoder's output."""
        recorder, config = self.recorder, self.config
        stored = [self.attention.remember(text, layer) for layer in range(config.layers)]
        recorder.end_encoder()
        x = recorder.embed(self.tensors.matrix("token_embd.weight", config.vocabulary, config.width))
        for layer in range(config.layers):
            recorder.begin_layer()
            x = self.decoded(x, layer, stored[layer])
        return x

    def decoded(self, x: Value, layer: int, stored: int) -> Value:
        builder, name = self.builder, f"blk.{layer}."
        recorder = builder.recorder
        mixed = self.attention.mixed(builder.norm(name + "attn_norm", x), layer)
        x = recorder.add(x, self.attention.output(mixed, layer))
        seen = self.attention.across(builder.norm(name + "cross_attn_norm", x), layer, stored)
        if self.selects(layer):
            seen, x = recorder.select_rows(seen), recorder.select_rows(x)
        x = recorder.add(x, builder.linear(name + "cross_attn_o", seen, builder.config.width, seen.width))
        return recorder.add(x, self.feed_forward(builder.norm(name + "ffn_norm", x), layer, x, x))


class T5Output(Output):
    def finish(
        self, x: Value, norm: str, name: str = "output", every_row: bool = False, hidden: Value | None = None
    ) -> Plan:
        return super().finish(x, "dec.output_norm", name)

    @property
    def tied_scale(self) -> float:
        return float(self.config.width**-0.5)  # T5 was trained with this scale


def bucket(distance: int, buckets: int, causal: bool) -> int:
    """Return the bucket of a distance, key position minus query position.

    If `causal`, all buckets are for earlier keys; otherwise half of the buckets are.
    """
    behind = max(-distance, 0) if causal else abs(distance)
    if not causal:
        buckets //= 2
    exact = buckets // 2  # smaller distances each have their own bucket
    first = buckets if distance > 0 and not causal else 0
    if behind < exact:
        return first + behind
    # The other buckets are equal steps of the distance's logarithm. Integer powers are compared, as they are exact.
    shared, step = buckets - exact, 0
    while step < shared - 1 and behind**shared * exact ** (step + 1) >= FARTHEST ** (step + 1) * exact**shared:
        step += 1
    return first + exact + step


def _by_distance(biases: Weight, causal: bool) -> Weight:
    """Expand biases per bucket (buckets, heads) to biases per distance -FARTHEST..FARTHEST, (heads, 2 FARTHEST + 1)."""
    buckets, heads = biases.shape
    order = [bucket(distance, buckets, causal) for distance in range(-FARTHEST, FARTHEST + 1)]
    name, shape = f"{biases.name} by distance", (heads, len(order))
    return Weight.of(derived.Derived(name, shape, lambda start, stop: derived.values(biases)[order].T[start:stop]))


_t5 = partial(
    Architecture, layers=T5Layers, attention=T5Attention, feed_forward=T5FeedForward, output=T5Output,
    rope_style=None, activation="gelu", ffn="found", score_scale=1.0, output_norm="enc.output_norm",
)  # fmt: skip
ROWS = (
    _t5("t5", read=_read_both, decoder=True),  # T5, Flan-T5, MADLAD-400, ...
    _t5("t5encoder", read=_read, encoder=True),  # Sentence-T5, GTR, the text encoders of Stable Diffusion 3 and FLUX
)  # fmt: skip

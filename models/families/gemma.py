"""Gemma 2 to 4.

Per-layer embeddings (Gemma 3n and 4) are a second embedding table with one slice per layer, which gates a branch.

AltUp (Gemma 3n, arXiv:2301.13310) keeps four residual streams; a layer computes one. A layer predicts all streams from
its input, computes the active stream from its prediction, and corrects all streams by the prediction error. A low-rank
product (LAuReL, arXiv:2411.07501) is added in parallel with attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial

from localllm.models.architecture import Architecture, Attention, FeedForward, LayerRecorder
from localllm.models.config import Config, ExpertConfig
from localllm.models.errors import ModelError
from localllm.models.properties import Properties, Sliding
from localllm.models.reading import Keys, read_general
from localllm.models.reading.bounds import MAX_FACTOR, MAX_LAYERS, MAX_WIDTH
from localllm.models.reading.config import check_causal, read_softcap
from localllm.models.routing import ExpertGating
from localllm.plan import Rows, Value

EPS = 1e-5  # minimum mean square of a stream, as in transformers
TOP_TWENTIETH = 1.6448533535003662  # standard deviations above the mean that 5 % of a normal distribution exceed
_MAX_STREAMS = 64  # maximum residual streams; known models have 4


@dataclass(frozen=True, slots=True)
class GemmaConfig:
    """The properties of Gemma 3n and 4."""

    per_layer_width: int  # width of a layer's slice of the per-layer embeddings; 0: no such embeddings
    streams: int = 1  # AltUp streams
    active_stream: int = 0  # index of the AltUp stream that layers compute
    # standard deviations above the mean that active gates must exceed; None: all gates are active
    sparsity: tuple[float | None, ...] = ()


def _read(wide: int, softcap: float | None, keys: Keys, row: Properties, head: int) -> Config:
    """Read a model; those with `wide` layers divide scores by sqrt(width / heads) instead of sqrt(head width)."""
    config = read_general(keys, row, head)
    config = replace(config, attention_softcap=read_softcap(keys, "attn_logit_softcapping", softcap))
    if config.layers != wide:
        return config
    return replace(config, attention_scale=(1.0 / math.sqrt(config.width // max(config.heads)),) * wide)


def _read_3n(keys: Keys, row: Properties, head: int) -> Config:
    config = _with_kv_layers(keys, read_general(keys, row, head), 20)
    streams = keys.integer("altup.num_inputs", 2, _MAX_STREAMS, default=4)
    active = keys.integer("altup.active_idx", 0, streams - 1, default=0)
    default = tuple([TOP_TWENTIETH if layer < 10 else -math.inf for layer in range(config.layers)])
    values = keys.reals("activation_sparsity_scale", config.layers, -math.inf, MAX_FACTOR, default)
    sparsity = tuple([None if value < -MAX_FACTOR else value for value in values])
    return replace(config, own=GemmaConfig(_per_layer_width(keys, 1, 256), streams, active, sparsity))


def _read_4(keys: Keys, row: Properties, head: int) -> Config:
    config = _with_kv_layers(keys, read_general(keys, row, head), 0)
    return replace(config, own=GemmaConfig(_per_layer_width(keys, 0, 0)))


def _per_layer_width(keys: Keys, least: int, default: int) -> int:
    return keys.integer("embedding_length_per_layer_input", least, MAX_WIDTH // MAX_LAYERS, default=default)


def _with_kv_layers(keys: Keys, config: Config, default: int) -> Config:
    """Return a config whose last layers reuse the KV cache of the last earlier layer of the same kind (sliding-window
    or full attention); `default` is the number of layers with their own (0: all).
    """
    check_causal(config.architecture, config.causal)
    key, layers, windows, kv_heads = "attention.shared_kv_layers", config.layers, config.windows, config.kv_heads
    own = layers - keys.integer(key, 0, layers - 1, default=max(layers - default, 0) if default else 0)
    last = {windows[layer]: layer for layer in range(own)}
    for layer in range(own, layers):
        read = last.get(windows[layer])
        if read is None or kv_heads[read] != kv_heads[layer]:
            problem = "none of its kind" if read is None else f"{kv_heads[read]} key-value heads"
            raise ModelError(
                f"{keys.prefix}{key}: layer {layer} has {kv_heads[layer]} key-value heads and needs an earlier layer "
                f"with the same number, found {problem} in the first {own} layers"
            )
    return replace(config, kv_layer=(*range(own), *(last[window] for window in windows[own:])))


class Gemma3nAttention(Attention):
    """Norms the values of each head, without weights."""

    def values(self, v: Value, kv_heads: int) -> Value:
        return self.builder.unit(v, kv_heads)


class Gemma4Attention(Gemma3nAttention):
    """A layer without a value matrix uses the keys before their norm as values."""

    sliding_factors = False

    def parts(self, layer: int) -> str:
        names = (f"blk.{layer}.attn_{part}.weight" for part in ("v", "qkv"))
        return "qkv" if any(name in self.tensors for name in names) else "qk"


class SparseFeedForward(FeedForward):
    """Keeps only the gates that exceed a threshold (Gemma 3n)."""

    def gate(self, layer: int, name: str, x: Value, inner: int) -> Value:
        gate, sparsity = super().gate(layer, name, x, inner), self.builder.own(GemmaConfig).sparsity[layer]
        return gate if sparsity is None else self.recorder.gaussian_top_k(gate, sparsity)


class Gemma4FeedForward(FeedForward):
    """Adds the outputs of the dense feed-forward and of the experts. Experts and router have separate norms of the
    residual stream.
    """

    def mixture(self, x: Value, layer: int, residual: Value, before: Value, experts: ExpertConfig) -> Value:
        builder, name = self.builder, f"blk.{layer}."
        config, recorder, tensors = builder.config, builder.recorder, builder.tensors
        dense = builder.norm(name + "post_ffw_norm_1", self.dense(layer, x, config.ffn_width[layer]))
        own = builder.norm(name + "pre_ffw_norm_2", residual)
        normed = recorder.rms_norm(residual, tensors.vector(name + "ffn_gate_inp.scale", config.width), config.eps)
        weight = tensors.matrix(name + "ffn_gate_inp.weight", experts.count, config.width)
        router = recorder.linear(normed, weight, None, 1.0 / math.sqrt(config.width))  # (T, experts)
        return recorder.add(dense, builder.norm(name + "post_ffw_norm_2", self.experts(layer, own, router, experts)))


@dataclass(frozen=True, slots=True)
class PerLayerRecorder(LayerRecorder):
    """Records a layer of Gemma 4, with a branch gated by the layer's slice of the second embedding table."""

    # the concatenated slices of all layers, (T, layers * slice width), for all tokens or the selected ones
    inputs: dict[Rows, Value] = field(default_factory=dict)

    @property
    def own(self) -> GemmaConfig:
        return self.builder.own(GemmaConfig)

    def begin(self, x: Value) -> Value:
        """Record the slices: the token's embedding in the second table plus a projection of its embedding x."""
        builder, width = self.builder, self.own.per_layer_width
        config, recorder, tensors = builder.config, builder.recorder, builder.tensors
        if not width:
            return x
        wide = config.layers * width
        rows = recorder.embed(tensors.matrix("per_layer_token_embd.weight", config.vocabulary, wide))
        rows = recorder.scale(rows, math.sqrt(width))
        projection = tensors.matrix("per_layer_model_proj.weight", wide, config.width)
        projected = recorder.linear(x, projection, None, 1.0 / math.sqrt(config.width))
        norm = tensors.vector("per_layer_proj_norm.weight", width)
        projected = recorder.rms_norm(projected, norm, config.eps, config.layers)
        self.inputs["batch"] = recorder.scale(recorder.add(projected, rows), math.sqrt(0.5))
        return x

    def layer(self, x: Value, layer: int) -> Value:
        x, recorder = LayerRecorder.layer(self, x, layer), self.recorder
        if self.own.per_layer_width:
            x = recorder.add(x, self.branch(x, layer))
        scale = self.tensors.optional_numbers(f"blk.{layer}.layer_output_scale.weight", 1)
        return x if scale is None else recorder.scale(x, float(scale[0]))

    def branch(self, x: Value, layer: int) -> Value:
        """Return the branch's contribution to a layer's hidden states x."""
        builder, name, width = self.builder, f"blk.{layer}.", self.own.per_layer_width
        if x.rows not in self.inputs:
            self.inputs[x.rows] = builder.recorder.select_rows(self.inputs["batch"])
        own = builder.recorder.slice(self.inputs[x.rows], layer * width, (layer + 1) * width)
        hidden = builder.recorder.glu(builder.linear(name + "inp_gate", x, width, x.width), own, "gelu")
        return builder.norm(name + "post_norm", builder.linear(name + "proj", hidden, x.width, width))


@dataclass(frozen=True, slots=True)
class AltUpRecorder(PerLayerRecorder):
    """Records a layer on hidden states (T, streams * width), and the conversion from one stream to all and back."""

    def begin(self, x: Value) -> Value:
        """Return all streams: the first is x, the others are projections of x rescaled to the magnitude of x."""
        x, recorder, tensors = PerLayerRecorder.begin(self, x), self.recorder, self.tensors
        streams = self.own.streams
        others = tensors.flat("altup_proj.weight", streams - 1, x.width, x.width)
        made = recorder.match(recorder.linear(x, others), x, EPS, streams - 1)
        first = recorder.mix(x, 1, tensors.numbers("first stream", [1.0] + [0.0] * (streams - 1)))
        rest = [float(i == j + 1) for i in range(streams) for j in range(streams - 1)]
        return recorder.mix(made, streams - 1, tensors.numbers("other streams", rest), first)

    def end(self, streams: Value) -> Value:
        """Return the mean of the streams, after projecting all but the first and rescaling them to the first one's
        magnitude.
        """
        recorder, width, count = self.recorder, self.config.width, self.own.streams
        matrices = self.tensors.flat("altup_unembd_proj.weight", count - 1, width, width)
        first = total = self.stream(streams, 0)
        for number in range(1, count):
            matrix = matrices.part((number - 1) * width, number * width)
            made = recorder.linear(self.stream(streams, number), matrix)
            total = recorder.add(total, recorder.match(made, first, EPS))
        return recorder.scale(total, 1.0 / count)

    def layer(self, x: Value, layer: int) -> Value:
        builder, name = self.builder, f"blk.{layer}."
        recorder, tensors, count, active_stream = (
            builder.recorder,
            builder.tensors,
            self.own.streams,
            self.own.active_stream,
        )
        predicts = tensors.matrix(name + "altup_predict_coef.weight", count * count, count)
        modes = self.modes(self.stream(x, active_stream), name)
        predicted = recorder.mix(x, count, recorder.linear(modes, predicts), x)
        active = self.stream(predicted, active_stream)
        normed = builder.norm(name + "attn_norm", active)
        low = self.low_rank(normed, name)
        mixed = self.attention.mixed(normed, layer)
        if self.selects(layer):
            mixed, low, active, predicted = (recorder.select_rows(value) for value in (mixed, low, active, predicted))
        y = builder.norm(name + "post_attention_norm", self.attention.output(mixed, layer))
        y = recorder.scale(recorder.add(recorder.add(active, y), low), math.sqrt(0.5))
        z = self.feed_forward(builder.norm(name + "ffn_norm", y), layer, y, y)
        y = recorder.add(y, builder.norm(name + "post_ffw_norm", z))
        corrects = tensors.matrix(name + "altup_correct_coef.weight", count, count)
        shares = recorder.linear(self.modes(y, name), corrects, tensors.ones(count))
        off = recorder.add(y, recorder.scale(active, -1.0))
        corrected = recorder.mix(off, 1, shares, predicted)
        scale = tensors.vector(name + "altup_correct_scale.weight", builder.config.width)
        own = recorder.mul(self.stream(corrected, active_stream), scale)
        others = tensors.numbers("all but the first stream", [0.0] + [1.0] * (count - 1))
        return recorder.mix(self.branch(own, layer), 1, others, corrected)

    def stream(self, x: Value, number: int) -> Value:
        width = self.config.width
        return self.recorder.slice(x, number * width, (number + 1) * width)

    def modes(self, x: Value, name: str) -> Value:
        """Return values (T, streams) in -1..1, from which the prediction and correction coefficients are computed."""
        builder, width = self.builder, self.config.width
        router = builder.tensors.matrix(name + "altup_router.weight", self.own.streams, width)
        normed = builder.norm(name + "altup_router_norm", x)
        return builder.recorder.softcap(builder.recorder.linear(normed, router, None, 1.0 / width), 1.0)

    def low_rank(self, x: Value, name: str) -> Value:
        """Return x plus the normed product of x with two low-rank matrices."""
        builder, rank = self.builder, self.tensors.height(name + "laurel_l.weight")
        y = builder.linear(name + "laurel_l", x, rank, x.width)
        y = builder.linear(name + "laurel_r", y, x.width, rank)
        return builder.recorder.add(builder.norm(name + "laurel_post_norm", y), x)


_row = partial(Architecture, rope_style="neox", activation="gelu", root_width_embedding=True)
ROWS = (
    _row("gemma2", read=partial(_read, 46, 50.0), post_norms=True, logit_softcap=30.0, sliding=Sliding(2, window=4096)),
    _row(
        "gemma3", read=partial(_read, 62, None), post_norms=True, qk_norm=True, logit_softcap=0.0,
        sliding=Sliding(6, stretched=False, rope_base=10000.0),
    ),
    _row(
        "gemma3n", read=_read_3n, layers=AltUpRecorder, attention=Gemma3nAttention, feed_forward=SparseFeedForward,
        score_scale=1.0, qk_norm=True, logit_softcap=30.0, ignored=("rope_freqs.weight",),
        sliding=Sliding(5, stretched=False, rope_base=10000.0),
    ),
    _row(
        "gemma4", read=_read_4, layers=PerLayerRecorder, attention=Gemma4Attention, feed_forward=Gemma4FeedForward,
        spans="sliding", post_norms=True, score_scale=1.0, qk_norm=True, logit_softcap=0.0,
        sliding=Sliding(6, stretched=False, rope_base=10000.0),
        routing=ExpertGating("softmax", True, scales=True, activation="gelu"),
    ),
)  # fmt: skip

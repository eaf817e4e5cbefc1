"""Families with one small change to a layer each: to its norms, its activation, its attention or its mixer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial

from localllm.models.architecture import Architecture, Attention, FeedForward, LayerRecorder
from localllm.models.config import Config
from localllm.models.errors import ModelError
from localllm.models.properties import QKV_EXTRAS, Properties, Recurrent, Sliding
from localllm.models.reading import Keys, read_general
from localllm.models.reading.bounds import MAX_FACTOR
from localllm.models.recurrent import Parts, Recurrence, scanned
from localllm.models.routing import FILE_SIGMOID, ExpertGating
from localllm.plan import Value


def _apertus(keys: Keys, row: Properties, head: int) -> Config:
    """Read a model; `own` has (positive, negative, beta, eps) of xIELU per layer. GGUFs store the raw parameters,
    before the functions that constrain them.
    """
    config, raw = read_general(keys, row, head), replace(keys, prefix="")
    bounds = {"alpha_p": -MAX_FACTOR, "alpha_n": -MAX_FACTOR, "beta": 0.0, "eps": -1.0}
    found = [raw.reals(f"xielu.{key}", config.layers, low, MAX_FACTOR) for key, low in bounds.items()]
    own = [(_softplus(p), beta + _softplus(n), beta, min(eps, 0.0)) for p, n, beta, eps in zip(*found, strict=True)]
    return replace(config, own=tuple(own))


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


class XieluFeedForward(FeedForward):
    def activated(self, x: Value, layer: int) -> Value:
        return self.recorder.xielu(x, *self.builder.own(tuple)[layer])


APERTUS = Architecture(
    "apertus", "neox", "xielu", read=_apertus, feed_forward=XieluFeedForward, ffn="plain", qk_norm=True,
    attention_scale=True,
)  # fmt: skip


class FalconLayers(LayerRecorder):
    """Falcon 40B has a separate norm for attention."""

    def mixer_input(self, x: Value, normed: Value, layer: int) -> Value:
        name = f"blk.{layer}.attn_norm_2"
        return self.builder.norm(name, x) if f"{name}.weight" in self.tensors else normed


FALCON = Architecture(  # Falcon 7B and 40B
    "falcon", "neox", "gelu", layers=FalconLayers, norm="layer", ffn="plain", ffn_norm="attn_norm", parallel=True,
)  # fmt: skip


def _mimo2(keys: Keys, row: Properties, head: int) -> Config:
    """Read a model; `own` is the factor on values."""
    scale = keys.real("attention.value_scale", 0.0, MAX_FACTOR, 0.0) or 1.0
    return replace(read_general(keys, row, head), own=scale)


class MimoAttention(Attention):
    def values(self, v: Value, kv_heads: int) -> Value:
        scale = self.builder.own(float)
        return v if scale == 1.0 else self.recorder.scale(v, scale)


MIMO2 = Architecture(  # MiMo V2
    "mimo2", "neox", read=_mimo2, attention=MimoAttention, heads_norm=False, chained_heads=False,
    ignored=QKV_EXTRAS,
    sliding=Sliding(0, stretched=False, rope_base=10000.0), routing=ExpertGating("sigmoid", True),
)  # fmt: skip


def _step35(keys: Keys, row: Properties, head: int) -> Config:
    """Read a model; full-attention layers rotate half of the dimensions."""
    config = read_general(keys, row, head)
    n_rot = config.rope.n_rot
    if n_rot % 4:
        raise ModelError(f"{keys.prefix}rope.dimension_count: expected a multiple of 4, found {n_rot}")
    return replace(config, rope=replace(config.rope, n_rot=n_rot // 2))


class StepAttention(Attention):
    sliding_factors = False


STEP35 = Architecture(  # Step 3.5
    "step35", "neox", read=_step35, attention=StepAttention, heads_norm=False, gated="sigmoid", limits="silu_clamp",
    sliding=Sliding(0, stretched=False, rope_base=10000.0), routing=FILE_SIGMOID,
)  # fmt: skip


class Plamo2(Recurrence):
    """The mixer of PLaMo 2: Mamba-2 with one key head; B, C and steps depend on the convolved input, as in Mamba-1."""

    def mix(self, parts: Parts, x: Value) -> Value:
        recorder, sizes, builder = parts.recorder, parts.sizes, parts.builder
        dim, rank = sizes.inner // sizes.heads, max(64, builder.config.width // 16)
        z, inner = parts.rows("ssm_in", x, (dim, dim), sizes.heads)
        (inner,) = parts.active(parts.convolved("ssm_conv1d", [inner]))
        b, c, dt = parts.rows("ssm_x", inner, (sizes.state, sizes.state, rank))
        b, c, dt = (builder.norm(f"{parts.prefix}ssm_{n}_norm", v) for n, v in (("b", b), ("c", c), ("dt", dt)))
        weight = builder.tensors.matrix(f"{parts.prefix}ssm_dt.weight", sizes.heads, rank)
        seen = scanned(parts, inner, b, c, parts.steps(dt, weight), 1)
        return recorder.glu(z, seen, "silu")


PLAMO2 = Architecture(
    "plamo2", "neox", recurrence=Plamo2, ignored=("attn_qkv.scale", "ssm_in.scale", "ssm_out.scale"), ffn="fused",
    post_norms=True, recurrent=Recurrent("plamo2", "without_heads"),
)  # fmt: skip


class MuseLayers(LayerRecorder):
    """Norms the embeddings without weights; post-norms have their own epsilon."""

    def begin(self, x: Value) -> Value:
        return self.builder.unit(x)

    def post_norm(self, name: str, y: Value) -> Value:
        return self.builder.norm(name, y, 1e-08)


MUSE = Architecture(
    "muse-glimmer", "interleaved", layers=MuseLayers, ignored=("attn_gate.scale",), qk_norm=True, post_norms=True,
    gated="sigmoid", logit_softcap=0.0, multipliers="multiplied", sliding=Sliding(4, only_rope=True),
)  # fmt: skip


def _talkie(keys: Keys, row: Properties, head: int) -> Config:
    return replace(read_general(keys, row, head), unit_qk_norm=True)


@dataclass(frozen=True, slots=True)
class TalkieLayers(LayerRecorder):
    """Norms the embeddings without weights, and adds them after every layer, times the layer's scale."""

    embedding: list[Value] = field(default_factory=list)

    def begin(self, x: Value) -> Value:
        self.embedding.append(self.builder.unit(x))
        return self.embedding[0]

    def layer(self, x: Value, layer: int) -> Value:
        x, recorder = LayerRecorder.layer(self, x, layer), self.recorder
        name = f"blk.{layer}.layer_output_scale.weight"
        scale = self.tensors.optional_numbers(name, 1)
        if scale is None:
            raise ModelError(f"{name}: this tensor is missing; expected shape (1)")
        own = self.embedding[0] if self.embedding[0].rows == x.rows else recorder.select_rows(self.embedding[0])
        return recorder.add(x, recorder.scale(own, float(scale[0])))


TALKIE = Architecture(
    "talkie", "neox", read=_talkie, layers=TalkieLayers, ffn_scales=True,
    ignored=("ffn_gate.scale", "ffn_up.scale"), norm_weights=False, norms_rotated=True, multipliers="multiplied",
)  # fmt: skip


class AloneLayers(LayerRecorder):
    """Records a layer with a single block: attention, a recurrent mixer, or a feed-forward (Mamba, Nemotron H)."""

    def layer(self, x: Value, layer: int) -> Value:
        builder, name = self.builder, f"blk.{layer}."
        recorder, mixers = builder.recorder, self.mixers(layer)
        mixed = self.input_norm(name + builder.row.attention_norm, x)
        for mixer in mixers:
            mixed = mixer.mixed(mixed, layer)
        if self.selects(layer):
            mixed, x = recorder.select_rows(mixed), recorder.select_rows(x)
        y = mixers[0].output(mixed, layer) if mixers else self.feed_forward(mixed, layer, x, x)
        return self.residual(x, y, name + builder.row.attention_post_norm)


_alone = partial(Architecture, layers=AloneLayers, ffn_scales=True)
_nemotron = partial(
    _alone, rope_style="neox", activation="relu2", ffn="plain", no_rope_every=1,
    recurrent=Recurrent("mamba2", "without_heads", alone=True),
)  # fmt: skip
ROWS = (
    APERTUS, FALCON, MIMO2, MUSE, PLAMO2, STEP35, TALKIE,
    _alone("mamba", "interleaved", recurrent=Recurrent("mamba", "all", alone=True)),  # also Falcon Mamba
    _alone("mamba2", "interleaved", recurrent=Recurrent("mamba2", "all", alone=True)),
    _nemotron("nemotron_h"),
    # Nemotron 3
    _nemotron("nemotron_h_moe", routing=ExpertGating("sigmoid", False, from_file=True, scales=True, activation="relu")),
)  # fmt: skip

"""Rows of the Gemma models: Gemma 3 (pictures), Gemma 4 (pictures and sound), and Gemma 4 without encoder layers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.convert import tensor as t
from localllm.convert.changes import of_one, plus
from localllm.convert.encoders import keys as k
from localllm.convert.encoders.parts import GATED, HEAD, SIGLIP, SIGLIP_SIZES, TOWER, embeddings, reordered, squares
from localllm.convert.encoders.row import Encoder, EncoderRow, Settings, Stack
from localllm.convert.errors import ConvertError
from localllm.convert.hf_config import HfConfig
from localllm.convert.recipe import Layer, Tensors, taken
from localllm.convert.tensor import LazyTensor


def _pooled(settings: Settings) -> int | None:
    """Return the patches per side of a token, or None for 4, which files leave out."""
    tokens = settings.preparing.integer("image_seq_length") or 256
    sides = k.side(settings.own, "image_size") // settings.own.needed("patch_size")
    factor = sides // max(1, math.isqrt(tokens))
    return factor if factor not in (0, 4) else None


_GEMMA3 = Encoder(
    kind="vision", projector="gemma3", tables=("vision_config",),
    top={
        **embeddings("vision_tower.embeddings"), "v.post_ln": "vision_tower.post_layernorm",
        "mm.input_projection.weight": "multi_modal_projector.mm_input_projection_weight",
        # Gemma's norms add 1 to their weights
        "mm.soft_emb_norm.weight": taken("multi_modal_projector.mm_soft_emb_norm.weight", plus(1.0)),
    },
    stacks=(Stack("vision_tower.encoder.layers.{}.", "v.blk.{}.", SIGLIP),),
    keys={
        "use_gelu": True, "vision.attention.layer_norm_epsilon": k.own("layer_norm_eps", otherwise=1e-6),
        "vision.projector.scale_factor": _pooled,
    },
    defaults=SIGLIP_SIZES,
)  # fmt: skip

# -- Gemma 4 -------------------------------------------------------------------------------------------------------

_LIMITS = tuple([f"{way}_{end}" for way in ("input", "output") for end in ("max", "min")])


def _clamped(layer: Layer) -> Layer:
    """Return the sources of products, with the limits of their inputs and outputs."""
    limits = {f"{key}.{limit}.": f"{name}.{limit}" for key, name in layer.items() for limit in _LIMITS}
    return {**layer, **limits}


_SEES: Layer = {
    **_clamped({
        **GATED, "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_out": "self_attn.o_proj",
    }),
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ln1": "input_layernorm",
    "attn_post_norm": "post_attention_layernorm", "ln2": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm", "out_scale.weight": "layer_scalar",
}  # fmt: skip
_softplus = of_one(lambda tensor: t.computed(tensor, lambda x: np.logaddexp(x, np.float32(0))))
_flat_kernel = reordered(lambda values: values.reshape(len(values), values.shape[2]))
_HEARS: Layer = {
    **_clamped({
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_out": "self_attn.post", "ffn_up": "feed_forward1.ffw_layer_1", "ffn_down": "feed_forward1.ffw_layer_2",
        "ffn_up_1": "feed_forward2.ffw_layer_1", "ffn_down_1": "feed_forward2.ffw_layer_2",
        "conv_pw1": "lconv1d.linear_start", "conv_pw2": "lconv1d.linear_end",
    }),
    "attn_k_rel": "self_attn.relative_k_proj", "per_dim_scale.weight": taken("self_attn.per_dim_scale", _softplus),
    "attn_pre_norm": "norm_pre_attn", "attn_post_norm": "norm_post_attn", "ln2": "norm_out",
    "ffn_norm": "feed_forward1.pre_layer_norm", "ffn_post_norm": "feed_forward1.post_layer_norm",
    "ffn_norm_1": "feed_forward2.pre_layer_norm", "ffn_post_norm_1": "feed_forward2.post_layer_norm",
    "conv_dw.weight": taken("lconv1d.depthwise_conv1d.weight", _flat_kernel), "conv_norm": "lconv1d.pre_layer_norm",
    "norm_conv": "lconv1d.conv_norm",
}  # fmt: skip
_SUBSAMPLE = "audio_tower.subsample_conv_projection"
_EPS = k.own("layer_norm_eps", otherwise=1e-6)
_BINS = {
    "audio.num_mel_bins": lambda s: s.own.integer("input_feat_size") or 128,
    "audio.attention.layer_norm_epsilon": _EPS,
}
_GEMMA4 = Encoder(
    kind="vision", projector="gemma4v", tables=("vision_config",), own_key=True,
    top={
        "v.patch_embd.weight": taken("vision_tower.patch_embedder.input_proj.weight", reordered(squares)),
        "v.position_embd.weight": "vision_tower.patch_embedder.position_embedding_table",
        "v.std_bias.": "vision_tower.std_bias", "v.std_scale.": "vision_tower.std_scale",
        "mm.input_projection": "embed_vision.embedding_projection",
    },
    stacks=(Stack("vision_tower.encoder.layers.{}.", "v.blk.{}.", _SEES),),
    keys={"vision.image_size": 224, "vision.attention.layer_norm_epsilon": _EPS},
    defaults={
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 12,
        "patch_size": 16,
    },
)  # fmt: skip
_GEMMA4_AUDIO = Encoder(
    kind="audio", projector="gemma4a", tables=("audio_config",), own_key=True, optional=True,
    top={
        **{f"a.conv1d.{n}.weight": f"{_SUBSAMPLE}.layer{n}.conv.weight" for n in (0, 1)},
        **{f"a.conv1d.{n}.norm": f"{_SUBSAMPLE}.layer{n}.norm" for n in (0, 1)},
        "a.input_projection": f"{_SUBSAMPLE}.input_proj_linear", "a.pre_encode.out": "audio_tower.output_proj",
        "mm.a.input_projection": "embed_audio.embedding_projection",
    },
    stacks=(Stack("audio_tower.layers.{}.", "a.blk.{}.", _HEARS),),
    keys={**_BINS, "audio.feed_forward_length": lambda s: 4 * s.own.needed("hidden_size")},
    defaults={"hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 8},
)  # fmt: skip

# -- Gemma 4 without layers ----------------------------------------------------------------------------------------


def _cell(config: HfConfig) -> int:
    """Return the pixels per side of a cell, which becomes one token."""
    side = config.integer("model_patch_size")
    return side or config.needed("patch_size") * config.needed("pooling_kernel_size")


def _by_channel(parts: Tensors, config: HfConfig) -> LazyTensor:
    """Order columns of (row, column, channel) by channel first."""
    side, tensor = _cell(config), parts[0]
    if tensor.shape[-1] != 3 * side * side:
        raise ConvertError(f"{tensor.name}: is {tensor.shape}; expected {3 * side * side} columns, as config.json has")
    return t.picked_columns(tensor, np.arange(3 * side * side).reshape(side, side, 3).transpose(2, 0, 1).reshape(-1))


def _by_axis(values: NDArray[Any]) -> NDArray[Any]:
    return values.transpose(1, 0, 2)


_UNIFIED = Encoder(
    kind="vision", projector="gemma4uv", tables=("vision_config",), own_key=True, stacks=(),
    top={
        "v.patch_embd.weight": taken("vision_embedder.patch_dense.weight", _by_channel),
        "v.patch_embd.bias.": "vision_embedder.patch_dense.bias",
        "v.position_embd.weight": taken("vision_embedder.pos_embedding", reordered(_by_axis)),
        "v.patch_norm.1": taken("vision_embedder.patch_ln1", _by_channel),
        "v.patch_norm.2": "vision_embedder.patch_ln2", "v.patch_norm.3": "vision_embedder.pos_norm",
        "mm.input_projection": "embed_vision.embedding_projection",
    },
    keys={
        "vision.image_size": 224, "vision.attention.layer_norm_epsilon": _EPS, "vision.block_count": 0,
        "vision.embedding_length": k.own_count("mm_embed_dim"), "vision.feed_forward_length": 0,
        "vision.attention.head_count": 0,
    },
    defaults={"patch_size": 16, "pooling_kernel_size": 3, "mm_embed_dim": 3840},
)  # fmt: skip
_UNIFIED_AUDIO = Encoder(
    kind="audio", projector="gemma4ua", tables=("audio_config",), own_key=True, stacks=(),
    top={"mm.a.input_projection": "embed_audio.embedding_projection"},
    keys={
        **_BINS, "audio.embedding_length": k.own_count("audio_embed_dim"), "audio.feed_forward_length": 0,
        "audio.block_count": 0, "audio.attention.head_count": 0,
    },
    defaults={"audio_embed_dim": 640},
)  # fmt: skip

ROWS = (
    EncoderRow(
        classes=("Gemma3ForConditionalGeneration",), encoders=(_GEMMA3,), skipped=HEAD, spellings=TOWER,
        starts=("vision_tower.", "multi_modal_projector."),
        formats=((r"^mm\.input_projection", "F16"), (r"^v\.(patch|position)_embd", "F32")),
    ),
    EncoderRow(
        classes=("Gemma4ForConditionalGeneration",), encoders=(_GEMMA4, _GEMMA4_AUDIO),
        starts=("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio."),
        spellings=((r"\.linear(?=\.(weight|bias)$)", ""),),
        formats=((r"^a\.(conv1d|input_projection)|\.conv_dw\.", "F32"),),
    ),
    EncoderRow(
        classes=("Gemma4UnifiedForConditionalGeneration",), encoders=(_UNIFIED, _UNIFIED_AUDIO),
        starts=("vision_embedder.", "embed_vision.", "embed_audio."),
    ),
)  # fmt: skip

"""Rows of the Qwen models: pictures (Qwen2-VL to Qwen 3.5), sound (Qwen2-Audio, Qwen3-ASR), and both (Omni)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from localllm.convert.encoders import keys as k
from localllm.convert.encoders import whisper
from localllm.convert.encoders.parts import FRAMES, GATED, NORMS, QKV, column, cube
from localllm.convert.encoders.row import Encoder, EncoderRow, Settings, Stack
from localllm.convert.recipe import Layer, taken
from localllm.convert.tensor import LazyTensor, array_tensor
from localllm.models.encoders.keys import MOST_WIDTH

_TOP: Layer = {
    **FRAMES, "v.post_ln": "visual.merger.ln_q", "mm.0": "visual.merger.mlp.0", "mm.2": "visual.merger.mlp.2",
}  # fmt: skip
_SQUARE = {
    "vision.image_size": lambda s: s.own.integer("image_size") or 560,
    "vision.attention.layer_norm_epsilon": k.outer("rms_norm_eps", otherwise=1e-6),
}


def _period(settings: Settings) -> int:
    """Return after how many layers one attends to the whole picture."""
    own = settings.own
    layers = k.indexes(own, "fullatt_block_indexes", own.needed("depth"))
    if not layers or layers != list(range(layers[0], layers[-1] + 1, layers[0] + 1)):
        raise own.error("fullatt_block_indexes", layers or None, "the numbers of every nth layer, such as [7, 15, 23]")
    return layers[0] + 1


_SIZES = {"depth": 32, "num_heads": 16, "patch_size": 14}
_QWEN2 = Encoder(
    kind="vision", projector="qwen2vl_merger", tables=("vision_config",), top=_TOP,
    stacks=(
        Stack("visual.blocks.{}.", "v.blk.{}.",
              {**QKV, **NORMS, "attn_out": "attn.proj", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}),
    ),
    # llama.cpp takes the width of the projector for the width of the layers' feed-forward network
    keys={**_SQUARE, "vision.embedding_length": k.own_count("embed_dim"),
          "vision.feed_forward_length": k.own_count("hidden_size")},
    defaults={**_SIZES, "hidden_size": 3584, "embed_dim": 1280},
)  # fmt: skip
_QWEN25 = Encoder(
    kind="vision", projector="qwen2.5vl_merger", tables=("vision_config",), top=_TOP,
    stacks=(Stack("visual.blocks.{}.", "v.blk.{}.", {**QKV, **NORMS, **GATED, "attn_out": "attn.proj"}),),
    keys={**_SQUARE, "use_silu": True, "vision.n_wa_pattern": _period},
    defaults={**_SIZES, "hidden_size": 3584, "intermediate_size": 3420, "fullatt_block_indexes": [7, 15, 23, 31]},
)  # fmt: skip


def _image_size(settings: Settings) -> int:
    """Return the pixels per side of a square whose patches have the positions of the table."""
    own = settings.own
    if own.integer("image_size"):
        return k.side(own, "image_size")
    return int((own.integer("num_position_embeddings") or 2304) ** 0.5 * own.needed("patch_size"))


def _deepstack(settings: Settings) -> list[int]:
    """Return the layers whose outputs are projected, too."""
    return k.indexes(settings.own, "deepstack_visual_indexes", settings.own.needed("depth"))


def _is_deepstack(settings: Settings) -> list[bool]:
    layers = _deepstack(settings)
    return [n in layers for n in range(settings.own.needed("depth"))]


def _text_eps(settings: Settings) -> float:
    return settings.config.inner("text_config").real("rms_norm_eps") or 1e-6


_QWEN3 = Encoder(
    kind="vision", projector="qwen3vl_merger", tables=("vision_config",),
    top={
        **FRAMES, "v.patch_embd.bias.": "visual.patch_embed.proj.bias",
        "v.position_embd.weight": "visual.pos_embed.weight", "v.post_ln": "visual.merger.norm",
        "mm.0": "visual.merger.linear_fc1", "mm.2": "visual.merger.linear_fc2",
    },
    stacks=(
        Stack("visual.blocks.{}.", "v.blk.{}.", {
            **NORMS, "attn_qkv": "attn.qkv", "attn_out": "attn.proj", "ffn_up": "mlp.linear_fc1",
            "ffn_down": "mlp.linear_fc2",
        }),
        Stack("visual.deepstack_merger_list.{}.", "v.deepstack.{}.",
              {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}, _deepstack),
    ),
    keys={
        "use_gelu": True, "vision.image_size": _image_size, "vision.attention.layer_norm_epsilon": _text_eps,
        "vision.spatial_merge_size": lambda s: s.own.integer("spatial_merge_size"),
        "vision.is_deepstack_layers": _is_deepstack,
    },
    defaults={
        "depth": 27, "num_heads": 16, "patch_size": 16, "hidden_size": 1152, "intermediate_size": 4304,
        "spatial_merge_size": 2, "deepstack_visual_indexes": [8, 16, 24],
    },
)  # fmt: skip
_QWEN35 = replace(_QWEN3, defaults={**_QWEN3.defaults, "deepstack_visual_indexes": []})

# Qwen Omni calls the parts of its merger as Qwen 2 does.
_OMNI_NAMES = (
    (r"^(visual\.)merger_list\.", r"\1deepstack_merger_list."),
    (r"(?<=merger)(_list\.[0-9]+)?\.ln_q\.", r"\1.norm."),
    (r"(?<=merger)(_list\.[0-9]+)?\.mlp\.0\.", r"\1.linear_fc1."),
    (r"(?<=merger)(_list\.[0-9]+)?\.mlp\.2\.", r"\1.linear_fc2."),
)


def _waves(settings: Settings) -> list[LazyTensor]:
    """Return the table of positions: sines and cosines of 1500 positions, in the arithmetic of torch."""
    width = settings.own.needed("d_model")
    if width > MOST_WIDTH:
        raise settings.own.error("d_model", width, f"at most {MOST_WIDTH}")
    half = max(1, width // 2)
    step = np.float32(np.log(10000) / max(1, half - 1))
    angles = np.arange(1500, dtype=np.float32)[:, None] * np.exp(-step * np.arange(half, dtype=np.float32))
    return [array_tensor("a.position_embd.weight", np.concatenate([np.sin(angles), np.cos(angles)], axis=1))]


_OMNI_AUDIO = {
    "audio.embedding_length": k.own_count("d_model"), "audio.feed_forward_length": k.own_count("encoder_ffn_dim"),
    "audio.attention.head_count": k.own_count("encoder_attention_heads"),
    "audio.num_mel_bins": k.own_count("num_mel_bins"),
    "audio.attention.layer_norm_epsilon": k.own("layer_norm_eps", otherwise=1e-5),
}  # fmt: skip
_QWEN3A = Encoder(
    kind="audio", projector="qwen3a", tables=("audio_config",), own_key=True, keys=_OMNI_AUDIO, made=_waves,
    defaults=whisper.SIZES,
    stacks=(Stack("audio_tower.layers.{}.", "a.blk.{}.", whisper.LAYER),),
    top={
        **{f"a.conv2d.{n}.weight": f"audio_tower.conv2d{n}.weight" for n in (1, 2, 3)},
        **{f"a.conv2d.{n}.bias": taken(f"audio_tower.conv2d{n}.bias", cube) for n in (1, 2, 3)},
        "a.conv_out": "audio_tower.conv_out", "a.post_ln": "audio_tower.ln_post",
        "mm.a.mlp.1": ("audio_tower.proj1", "multi_modal_projector.linear_1"),
        "mm.a.mlp.2": ("audio_tower.proj2", "multi_modal_projector.linear_2"),
    },
)  # fmt: skip
_ASR = {
    "d_model": 1024, "encoder_layers": 24, "encoder_attention_heads": 16, "encoder_ffn_dim": 4096, "num_mel_bins": 128,
}  # fmt: skip
_QWEN25O_AUDIO = Encoder(
    kind="audio", projector="qwen2.5o", tables=("thinker_config.audio_config",), keys=_OMNI_AUDIO, made=_waves,
    defaults=whisper.SIZES,
    stacks=(Stack("audio_tower.layers.{}.", "a.blk.{}.", whisper.LAYER),),
    top={
        **{f"a.conv1d.{n}.weight": f"audio_tower.conv{n}.weight" for n in (1, 2)},
        **{f"a.conv1d.{n}.bias": taken(f"audio_tower.conv{n}.bias", column) for n in (1, 2)},
        "a.post_ln": "audio_tower.ln_post", "mm.a.fc": "audio_tower.proj",
    },
)  # fmt: skip


def _below(encoder: Encoder, **changes: Any) -> Encoder:
    """Return an encoder of a model whose settings are in the table of its thinker, or in none."""
    return replace(encoder, tables=(f"thinker_config.{encoder.tables[0]}", *encoder.tables), **changes)


ROWS = (
    EncoderRow(classes=("Qwen2VLForConditionalGeneration", "Qwen2VLModel"), encoders=(_QWEN2,), starts=("visual.",)),
    EncoderRow(classes=("Qwen2_5_VLForConditionalGeneration",), encoders=(_QWEN25,), starts=("visual.",)),
    EncoderRow(
        classes=("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"), encoders=(_QWEN3,),
        starts=("visual.",),
    ),
    EncoderRow(
        classes=("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"), encoders=(_QWEN35,),
        starts=("visual.",),
    ),
    EncoderRow(
        classes=("Qwen2_5OmniModel", "Qwen2_5OmniForConditionalGeneration"),
        encoders=(_below(_QWEN25, projector="qwen2.5o"), _QWEN25O_AUDIO), inside=("thinker.",),
        starts=("visual.", "audio_tower."), skipped=r"audio_bos_eos_token", formats=whisper.FORMATS,
    ),
    EncoderRow(
        classes=("Qwen3OmniMoeForConditionalGeneration",),
        encoders=(_below(_QWEN3, own_key=True), _below(_QWEN3A)), inside=("thinker.",),
        starts=("visual.", "audio_tower."), spellings=_OMNI_NAMES, formats=whisper.FORMATS,
    ),
    EncoderRow(
        classes=("Qwen3ASRForConditionalGeneration",), encoders=(_below(_QWEN3A, defaults=_ASR),),
        inside=("thinker.", "model."), starts=("audio_tower.", "multi_modal_projector."), formats=whisper.FORMATS,
    ),
)  # fmt: skip

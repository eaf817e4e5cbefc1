"""Rows of models whose encoder of pictures is SigLIP's: Idefics 3, LFM2-VL, PaddleOCR-VL and MiniCPM-V 4.6."""

from __future__ import annotations

import math
from typing import Any

from numpy.typing import NDArray

from localllm.convert.encoders import keys as k
from localllm.convert.encoders.parts import HEAD, SIGLIP, SIGLIP_SIZES, TOWER, embeddings, reordered
from localllm.convert.encoders.row import LAYERS, Encoder, EncoderRow, Read, Settings, Stack
from localllm.convert.recipe import taken

# -- Idefics 3, SmolVLM, Granite-Docling ---------------------------------------------------------------------------


def _longest(settings: Settings) -> int:
    """Return the length to which the longest side of a picture is scaled."""
    size = settings.preparing.inner("size")
    return size.integer("longest_edge") or k.side(settings.own, "image_size")


_IDEFICS = Encoder(
    kind="vision", projector="idefics3", tables=("vision_config",),
    top={
        **embeddings("vision_model.embeddings"), "v.post_ln": "vision_model.post_layernorm",
        "mm.model.fc": "connector.modality_projection.proj",
    },
    stacks=(Stack("vision_model.encoder.layers.{}.", "v.blk.{}.", SIGLIP),),
    keys={
        "use_gelu": True, "vision.attention.layer_norm_epsilon": k.own("layer_norm_eps", otherwise=1e-5),
        "vision.projector.scale_factor": k.count("scale_factor", otherwise=2), "vision.preproc_image_size": _longest,
    },
    defaults={**SIGLIP_SIZES, "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32},
)  # fmt: skip

# -- LFM2-VL -------------------------------------------------------------------------------------------------------


def _used_layers(settings: Settings) -> int:
    """Return how many layers are used; -1 names the last one."""
    layers, last = settings.own.needed(*LAYERS), settings.config.get("vision_feature_layer")
    last = -1 if last is None else last
    if type(last) is not int or not -layers <= last <= -1:
        raise settings.config.error("vision_feature_layer", last, f"a number from -{layers} to -1")
    return layers + last + 1


def _kernels(values: NDArray[Any]) -> NDArray[Any]:
    """Return kernels of 16 x 16 pixels, the only size of this model, with the channels in front."""
    return values.reshape(len(values), 16, 16, 3).transpose(0, 3, 1, 2)


_LFM2 = Encoder(
    kind="vision", projector="lfm2", tables=("vision_config",),
    top={
        **embeddings("vision_tower.embeddings"), "v.patch_embd.bias.": "vision_tower.embeddings.patch_embedding.bias",
        "v.patch_embd.weight": taken("vision_tower.embeddings.patch_embedding.weight", reordered(_kernels)),
        "v.post_ln": "vision_tower.post_layernorm", "mm.input_norm": "multi_modal_projector.layer_norm",
        "mm.1": "multi_modal_projector.linear_1", "mm.2": "multi_modal_projector.linear_2",
    },
    stacks=(Stack("vision_tower.encoder.layers.{}.", "v.blk.{}.", SIGLIP),),
    keys={
        "use_gelu": True, "vision.image_size": 256, "vision.block_count": _used_layers,
        "vision.attention.layer_norm_epsilon": k.own("layer_norm_eps"),
        "vision.projector.scale_factor": k.count("downsample_factor", otherwise=2),
    },
    defaults=SIGLIP_SIZES,
)  # fmt: skip

# -- PaddleOCR-VL --------------------------------------------------------------------------------------------------


def _pixels(name: str, edge: str) -> Read:
    """Return a reader of a limit of pixels, which newer checkpoints keep among the sizes."""

    def read(settings: Settings) -> int:
        preparing = settings.preparing
        return preparing.integer(name) or preparing.inner("size").integer(edge) or preparing.needed(name)

    return read


_MOST = _pixels("max_pixels", "longest_edge")
_PADDLE = Encoder(
    kind="vision", projector="paddleocr", tables=("vision_config",),
    top={
        **embeddings("visual.vision_model.embeddings"), "v.post_ln": "visual.vision_model.post_layernorm",
        "mm.input_norm": "mlp_AR.pre_norm", "mm.1": "mlp_AR.linear_1", "mm.2": "mlp_AR.linear_2",
    },
    stacks=(Stack("visual.vision_model.encoder.layers.{}.", "v.blk.{}.", SIGLIP),),
    keys={
        "use_gelu": True, "vision.image_size": lambda s: math.isqrt(_MOST(s)),
        "vision.image_min_pixels": _pixels("min_pixels", "shortest_edge"), "vision.image_max_pixels": _MOST,
        "vision.attention.layer_norm_epsilon": k.own("rms_norm_eps", otherwise=1e-6),
    },
    defaults={
        "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
        "patch_size": 14,
    },
)  # fmt: skip

# -- MiniCPM-V 4.6 -------------------------------------------------------------------------------------------------

_MODES = {"4x": 2, "16x": 4}


def _merged(settings: Settings) -> int:
    """Return the patches per side of a token."""
    return settings.preparing.choice("downsample_mode", of=_MODES, default="16x")


def _insertion(settings: Settings) -> list[int]:
    """Return the layer behind which the merger of windows stands."""
    found = settings.config.integer("insert_layer_id")
    found = settings.own.integer("insert_layer_id") if found is None else found
    return [6 if found is None else found]


_MERGER = "vision_tower.vit_merger"
_MINICPM = Encoder(
    kind="vision", projector="minicpmv4_6", tables=("vision_config",),
    top={
        **embeddings("vision_tower.embeddings"), "v.post_ln": "vision_tower.post_layernorm",
        **{f"v.vit_merger.{key}": f"{_MERGER}.{name}" for key, name in SIGLIP.items() if key.startswith("attn")},
        "v.vit_merger.ln1": f"{_MERGER}.layer_norm1", "v.vit_merger.ds_ln": f"{_MERGER}.pre_norm",
        "v.vit_merger.ds_ffn_up": f"{_MERGER}.linear_1", "v.vit_merger.ds_ffn_down": f"{_MERGER}.linear_2",
        "mm.input_norm": "merger.mlp.0.pre_norm", "mm.up": "merger.mlp.0.linear_1", "mm.down": "merger.mlp.0.linear_2",
    },
    stacks=(Stack("vision_tower.encoder.layers.{}.", "v.blk.{}.", SIGLIP),),
    keys={
        "use_gelu": True, "vision.attention.layer_norm_epsilon": k.own("layer_norm_eps", otherwise=1e-6),
        # the side of a slice; the table of positions is larger
        "vision.image_size": lambda s: s.preparing.integer("scale_resolution") or k.side(s.own, "image_size"),
        "vision.projector.scale_factor": _merged, "vision.wa_layer_indexes": _insertion,
    },
    defaults=SIGLIP_SIZES,
)  # fmt: skip

ROWS = (
    EncoderRow(
        classes=("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"), encoders=(_IDEFICS,),
        starts=("vision_model.", "connector."), formats=((r"^v\.(patch|position)_embd", "F32"),),
    ),
    EncoderRow(
        classes=("Lfm2VlForConditionalGeneration",), encoders=(_LFM2,), skipped=HEAD, spellings=TOWER,
        starts=("vision_tower.", "multi_modal_projector."),
    ),
    EncoderRow(
        classes=("PaddleOCRVLForConditionalGeneration",), encoders=(_PADDLE,), starts=("visual.", "mlp_AR."),
        skipped=r"packing_position_embedding|vision_model\.head\.",
    ),
    EncoderRow(
        classes=("MiniCPMV4_6ForConditionalGeneration",), encoders=(_MINICPM,), skipped=HEAD, spellings=TOWER,
        starts=("vision_tower.", "merger."),
    ),
)  # fmt: skip

"""The row of DeepSeek-OCR, whose picture goes through SAM and CLIP."""

from __future__ import annotations

import math

from localllm.convert.encoders import keys as k
from localllm.convert.encoders.parts import row
from localllm.convert.encoders.row import Encoder, EncoderRow, Settings, Stack
from localllm.convert.hf_config import HfConfig
from localllm.convert.recipe import Layer, taken

_CLIP: Layer = {
    "attn_qkv": "self_attn.qkv_proj", "attn_out": "self_attn.out_proj", "ln1": "layer_norm1", "ln2": "layer_norm2",
    "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2",
}  # fmt: skip
_SAM: Layer = {
    "pre_ln": "norm1", "post_ln": "norm2", "attn.pos_h.weight": "attn.rel_pos_h", "attn.pos_w.weight": "attn.rel_pos_w",
    "attn.qkv": "attn.qkv", "attn.out": "attn.proj", "mlp.lin1": "mlp.lin1", "mlp.lin2": "mlp.lin2",
}  # fmt: skip


def _clip(settings: Settings) -> HfConfig:
    return settings.own.inner("width").inner("clip-l-14-224")


def _sam(settings: Settings) -> HfConfig:
    return settings.own.inner("width").inner("sam_vit_b")


def _pooled(settings: Settings) -> int | None:
    """Return the patches per side of a token as llama.cpp's converter computes it, which the encoder does not use."""
    tokens, own = settings.preparing.integer("image_seq_length") or 256, _clip(settings)
    factor = own.needed("image_size") // own.needed("patch_size") // max(1, math.isqrt(tokens))
    return factor if factor not in (0, 4) else None


_ENCODER = Encoder(
    kind="vision", projector="deepseekocr", tables=("vision_config",),
    top={
        "v.class_embd.": "vision_model.embeddings.class_embedding",
        "v.patch_embd": "vision_model.embeddings.patch_embedding",
        "v.position_embd.weight": "vision_model.embeddings.position_embedding.weight",
        "v.pre_ln": "vision_model.pre_layrnorm", "mm.model.fc": "projector.layers", "v.image_newline.": "image_newline",
        "v.view_seperator.": taken("view_seperator", row), "v.sam.pos_embd.weight": "sam_model.pos_embed",
        "v.sam.patch_embd": "sam_model.patch_embed.proj",
        **{f"v.sam.neck.{n}": f"sam_model.neck.{n}" for n in range(4)},
        **{f"v.sam.net_{n}": f"sam_model.net_{n}" for n in (2, 3)},
    },
    stacks=(
        Stack("vision_model.transformer.layers.{}.", "v.blk.{}.", _CLIP, lambda s: range(_clip(s).needed("layers"))),
        Stack("sam_model.blocks.{}.", "v.sam.blk.{}.", _SAM, lambda s: range(_sam(s).needed("layers"))),
    ),
    keys={
        "use_gelu": True, "vision.attention.layer_norm_epsilon": k.own("layer_norm_eps", otherwise=1e-6),
        "vision.image_size": lambda s: _clip(s).needed("image_size"),
        "vision.patch_size": lambda s: _clip(s).needed("patch_size"),
        "vision.embedding_length": lambda s: _clip(s).needed("width"),
        "vision.block_count": lambda s: _clip(s).needed("layers"),
        "vision.attention.head_count": lambda s: _clip(s).needed("heads"),
        # llama.cpp's converter computes this number, which no encoder reads
        "vision.feed_forward_length": lambda s: 4 * _clip(s).needed("heads"),
        "vision.projector.scale_factor": _pooled, "vision.window_size": lambda s: s.own.integer("window_size") or 14,
        "vision.preproc_min_tiles": 2, "vision.preproc_max_tiles": 9,
        "vision.sam.block_count": lambda s: _sam(s).needed("layers"),
        "vision.sam.embedding_length": lambda s: _sam(s).needed("width"),
        "vision.sam.head_count": lambda s: _sam(s).needed("heads"),
    },
)  # fmt: skip

ROWS = (
    EncoderRow(
        classes=("DeepseekOCRForCausalLM",), encoders=(_ENCODER,),
        starts=("sam_model.", "vision_model.", "projector.", "image_newline", "view_seperator"),
        skipped=r"position_ids$",
        formats=((r"^v\.(patch_embd|position_embd|sam\.pos_embd|sam\.neck|sam\.net_)|\.attn\.pos_[hw]\.", "F32"),),
    ),
)  # fmt: skip

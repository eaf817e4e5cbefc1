"""The row of InternVL, with the tensor names of InternVLChatModel and of transformers."""

from __future__ import annotations

from localllm.convert.encoders import keys as k
from localllm.convert.encoders.parts import thirds
from localllm.convert.encoders.row import Encoder, EncoderRow, Read, Settings, Stack
from localllm.convert.recipe import Layer

_LAYER: Layer = {
    **{f"attn_{x}": (thirds("attn.qkv", which), f"attention.{x}_proj") for which, x in enumerate("qkv")},
    "attn_out": ("attn.proj", "attention.projection_layer"), "attn_q_norm": ("attn.q_norm", "attention.q_norm"),
    "attn_k_norm": ("attn.k_norm", "attention.k_norm"), "ln1": ("norm1", "layernorm_before"),
    "ln2": ("norm2", "layernorm_after"), "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2",
    "ls1.weight": ("ls1", "lambda_1"), "ls2.weight": ("ls2", "lambda_2"),
}  # fmt: skip


def _merged(settings: Settings) -> int:
    """Return the patches per side of a token."""
    ratio = settings.config.real("downsample_ratio") or 0.5
    if not 1 / 16 <= ratio <= 1:
        raise settings.config.error("downsample_ratio", ratio, "a number from 0.0625 to 1")
    return int(1.0 / ratio)


def _tiles(name: str, other: str) -> Read:
    """Return a reader of a number of tiles, which older checkpoints leave out."""
    return lambda s: s.config.integer(name) or s.preparing.integer(other) or None


_TABLES = "vision_model.embeddings"
_MLP = {0: "layer_norm", 1: "linear_1", 3: "linear_2"}
_ENCODER = Encoder(
    kind="vision", projector="internvl", tables=("vision_config",),
    top={
        "v.class_embd.": (f"{_TABLES}.class_embedding", f"{_TABLES}.cls_token"),
        "v.patch_embd": (f"{_TABLES}.patch_embedding", f"{_TABLES}.patch_embeddings.projection"),
        "v.position_embd.weight": (f"{_TABLES}.position_embedding", f"{_TABLES}.position_embeddings"),
        **{f"mm.model.mlp.{n}": (f"mlp1.{n}", f"multi_modal_projector.{name}") for n, name in _MLP.items()},
    },
    stacks=(Stack("vision_model.encoder.layers.{}.", "v.blk.{}.", _LAYER),),
    keys={
        **k.ACTIVATION, "vision.attention.layer_norm_epsilon": k.own("layer_norm_eps"),
        "vision.projector.scale_factor": _merged,
        "vision.preproc_min_tiles": _tiles("min_dynamic_patch", "min_patches"),
        "vision.preproc_max_tiles": _tiles("max_dynamic_patch", "max_patches"),
    },
    defaults={
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        "image_size": 448, "patch_size": 14, "hidden_act": "gelu", "layer_norm_eps": 1e-6,
    },
)  # fmt: skip

ROWS = (
    EncoderRow(
        classes=("InternVLChatModel", "InternVLForConditionalGeneration"),
        encoders=(_ENCODER,), starts=("vision_model.", "mlp1.", "vision_tower.", "multi_modal_projector."),
        spellings=((r"^vision_tower\.", "vision_model."), (r"\.encoder\.layer\.", ".encoder.layers.")),
        skipped=r"mask_token",
    ),
)  # fmt: skip

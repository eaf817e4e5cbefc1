"""The settings of the tiny checkpoints with encoders (see `mmproj_make`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.localllm.convert import mmproj_embed as e

TEXT = {
    "vocab_size": 40, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
VIT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
QWEN = {"hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "spatial_merge_size": 2,
        "temporal_patch_size": 2}  # fmt: skip
WHISPER = {
    "hidden_size": 32, "d_model": 32, "intermediate_size": 128, "encoder_ffn_dim": 128, "num_hidden_layers": 2,
    "encoder_layers": 2, "num_attention_heads": 2, "encoder_attention_heads": 2, "num_mel_bins": 128,
    "max_source_positions": 1500,
}  # fmt: skip
COLORS = {"image_mean": [0.5, 0.25, 0.125], "image_std": [0.5, 0.75, 0.25]}
SIGHT = r"^(model\.)?(visual|vision_|multi_modal|connector|mlp_AR|merger|embed_vision|embed_audio|audio_tower)"


@dataclass(frozen=True)
class Case:
    config: str = ""  # class names in transformers
    program: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    preparing: dict[str, Any] = field(default_factory=lambda: dict(COLORS))
    changes: dict[str, Any] = field(default_factory=dict)  # keys of config.json that differ from transformers' own
    spellings: tuple[tuple[str, str], ...] = ()  # from transformers' names of tensors to the hub's
    keeps: str = SIGHT
    tensors: list[list[Any]] = field(default_factory=list)  # of models that transformers lacks
    dtype: str = "F32"
    converts: bool = True  # llama.cpp's converter knows the class
    embed: Callable[[Path], dict[str, np.ndarray]] | None = None  # runs transformers

    def told(self, config: dict[str, Any]) -> dict[str, Any]:
        return config | self.changes


def _qwen(name: str, vision: dict[str, Any], **more: Any) -> Case:
    settings = {"text_config": TEXT | ROPE, "vision_config": QWEN | vision}
    return Case(f"{name}Config", f"{name}ForConditionalGeneration", settings, **more)


CASES: dict[str, Case] = {
    "qwen2vl": _qwen(
        "Qwen2VL", {"depth": 3, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, "patch_size": 14}, embed=e.qwen
    ),
    "qwen2.5vl": _qwen(
        "Qwen2_5_VL", {"depth": 4, "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [1, 3]}, embed=e.qwen
    ),
    "qwen2.5vl-bf16": _qwen(
        "Qwen2_5_VL", {"depth": 3, "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [1]}, dtype="BF16"
    ),
    "qwen3vl": _qwen(
        "Qwen3VL",
        {"depth": 3, "patch_size": 16, "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2]}, embed=e.qwen,
    ),
    "qwen3.5": _qwen("Qwen3_5", {"depth": 3, "patch_size": 16, "num_position_embeddings": 36}, embed=e.qwen),
}  # fmt: skip

"""The text models in vision models. Their rope has sections for the sides of an image; text uses a single position.

CogVLM's layers also have separate matrices for images. llama.cpp requires these matrices, so they are written to the
GGUF file.
"""

from __future__ import annotations

import numpy as np

from localllm.convert.changes import heads, share, turned
from localllm.convert.hf_config import HfConfig
from localllm.convert.recipe import Change, Keys, Layer, Recipe, Tensors, only, taken
from localllm.convert.recipes.shared import NORMED_SPARSE
from localllm.convert.tensor import LazyTensor


def _upright(axis: int, change: Change) -> Change:
    """Return a change that transposes the matrices of checkpoints of 2025, which are recognized by the axis with the
    model's width."""

    def then(parts: Tensors, config: HfConfig) -> LazyTensor:
        upright = len(parts[0].shape) == 3 and parts[0].shape[axis] == config.width
        return change(parts if upright else [turned(parts, config)], config)

    return then


_EXPERTS: Layer = {
    "ffn_gate_exps.weight": taken("mlp.experts.gate_up_proj", _upright(-1, share(0))),
    "ffn_up_exps.weight": taken("mlp.experts.gate_up_proj", _upright(-1, share(1))),
    "ffn_down_exps.weight": taken("mlp.experts.down_proj", _upright(-2, only)),
}


def _sections(config: HfConfig) -> np.ndarray | None:
    """Return the number of rotated pairs for time, height and width, and 0 for a fourth axis."""
    sizes = config.table("rope_parameters", "rope_scaling").get("mrope_section")
    if sizes is None:
        return None
    if not isinstance(sizes, list) or len(sizes) != 3 or not all(type(n) is int and 0 <= n < 1 << 16 for n in sizes):
        raise config.error("mrope_section", sizes, "three numbers of pairs")
    return np.array([*sizes, 0], np.int32)


def _deepstack(config: HfConfig) -> int:
    """Return the number of layers that add image features."""
    indexes = config.table("vision_config").get("deepstack_visual_indexes")
    return len(indexes) if isinstance(indexes, list) else 0


SECTIONED: Keys = {"rope.dimension_sections": _sections}
_QWEN3: Keys = {**SECTIONED, "n_deepstack_layers": _deepstack}


def _is_count(value: object) -> bool:
    """Return whether a value is an integral number of pairs. Older checkpoints store it as a float, such as 16.0."""
    return type(value) in (int, float) and value in range(1 << 16)


def _four_sections(config: HfConfig) -> np.ndarray | None:
    """Return the number of rotated pairs for position, width, height and image number."""
    sizes = config.table("rope_parameters", "rope_scaling")
    found = sizes.get("mrope_section") or sizes.get("xdrope_section")
    if found is None:
        return None
    if not isinstance(found, list) or len(found) not in (3, 4) or not all(_is_count(n) for n in found):
        raise config.error("mrope_section", found, "three or four numbers of pairs")
    return np.array([*found, 0][:4], np.int32)


_COGVLM: Layer = {
    "vis_attn_qkv.weight": "self_attn.vision_expert_query_key_value.weight",
    "vis_attn_output.weight": "self_attn.vision_expert_dense.weight",
    **{f"vis_{x}": f"mlp.vision_mlp.{x}_proj" for x in ("gate", "up", "down")},
}


ROWS = (
    Recipe("cogvlm", ("CogVLMForCausalLM",), _COGVLM, fixed={"num_multi_query_heads": heads}),
    Recipe(
        "hunyuan_vl", ("HunYuanVLForConditionalGeneration",), keys={"rope.dimension_sections": _four_sections},
        fixed={"attention_bias": False},
    ),
    Recipe(
        "paddleocr", ("PaddleOCRVLForConditionalGeneration",), keys=SECTIONED, fixed={"use_bias": False},
        defaults={"head_dim": 128, "rope_theta": 5e5},
    ),
    Recipe(
        "qwen2vl", ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "Qwen2VLModel"),
        keys=SECTIONED,
    ),
    Recipe("qwen3vl", ("Qwen3VLForConditionalGeneration",), keys=_QWEN3),
    Recipe("qwen3vlmoe", ("Qwen3VLMoeForConditionalGeneration",), _EXPERTS, keys=_QWEN3, fixed=NORMED_SPARSE),
)  # fmt: skip

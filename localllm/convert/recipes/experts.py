"""The recipes of small mixture-of-experts families: Arctic, Maple, SmallThinker.

Models that transformers does not support keep the tensor names of their reference implementation.
"""

from __future__ import annotations

import numpy as np

from localllm.convert.changes import PERMUTED
from localllm.convert.hf_config import HfConfig
from localllm.convert.recipe import Recipe


def _layout(config: HfConfig, name: str) -> list[bool]:
    """Return a list from config.json with 0 or 1 for each layer; all 0 if the list is missing."""
    if config.get(name) is None:
        return [False] * config.layers
    return [flag == 1 for flag in config.per_layer(name, "0 or 1, {} times", lambda flag: flag in (0, 1))]


def _window(config: HfConfig) -> int | None:
    return config.integer("sliding_window_size") if any(_layout(config, "sliding_window_layout")) else None


def _small_kinds(config: HfConfig) -> list[str]:
    slides = _layout(config, "sliding_window_layout")
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def _rotated_in_windows(config: HfConfig) -> str | None:
    """Require one of two patterns: layers 0, 4, 8, ... have full attention and no rope, or no layer uses sliding-window
    attention.

    In the second pattern all layers have rope.
    """
    slides, rotated = _layout(config, "sliding_window_layout"), _layout(config, "rope_layout")
    if any(slides) and slides != [layer % 4 != 0 for layer in range(len(slides))]:
        return "sliding_window_layout does not select all but every fourth layer, as the GGUF architecture requires"
    if rotated != (slides if any(slides) else [True] * len(slides)):
        return (
            "rope_layout is not sliding_window_layout, or 1 for all without windows; the GGUF architecture requires it"
        )
    return None


ROWS = (
    Recipe(
        "arctic", ("ArcticForCausalLM",),
        {"ffn_norm": "residual_layernorm", "ffn_norm_exps": "post_attention_layernorm"}, changes=PERMUTED,
        fixed={"parallel_attn_mlp_res": True, "use_residual": True}, defaults={"parallel_attn_mlp_res": False},
    ),
    Recipe(
        "maple", ("MapleForCausalLM",), like="qwen3moe",
        keys={"swiglu_clamp_exp": lambda config: np.full(config.layers, 7.0, np.float32)},
        fixed={"num_shared_experts": 0, "norm_topk_prob": True, "nope_on_global_attention": True},
        defaults={"nope_on_global_attention": False},
    ),
    Recipe(
        "smallthinker", ("SmallThinkerForCausalLM",),
        keys={
            "expert_count": "moe_num_primary_experts", "expert_used_count": "moe_num_active_primary_experts",
            "feed_forward_length": "moe_ffn_hidden_size", "expert_feed_forward_length": "moe_ffn_hidden_size",
            "expert_gating_func": lambda config: 1 if config.flag("moe_primary_router_apply_softmax") else 2,
        },
        fixed={"norm_topk_prob": True, "moe_enable_early_router": True, "moe_enable_secondary_experts": False},
        checks=(_rotated_in_windows,), defaults={"sliding_window": _window, "layer_types": _small_kinds},
    ),
)  # fmt: skip

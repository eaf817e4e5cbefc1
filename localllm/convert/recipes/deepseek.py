"""The recipes of DeepSeek MoE, 2 and 3, and of other models with the same layers: Kimi VL, Youtu, dots.llm1.

Models that transformers does not support keep the tensor names of their reference implementation.
"""

from __future__ import annotations

from localllm.convert.changes import PERMUTED
from localllm.convert.hf_config import HfConfig
from localllm.convert.latent import LATENT, LATENT_KEYS, gating, one_mscale
from localllm.convert.recipe import Recipe


def _softmax_as_is(config: HfConfig) -> str | None:
    if gating(config) == 2 or not config.flag("norm_topk_prob"):
        return None
    return "norm_topk_prob is true, which transformers does not implement"


def _every_layer(config: HfConfig) -> int:
    """Return the number of leading dense layers. Youtu has no experts, so all of its layers are dense."""
    return config.layers


ROWS = (
    Recipe(
        "deepseek2",
        (
            "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM",
            "KimiK25ForConditionalGeneration", "KimiVLForConditionalGeneration",
        ),
        LATENT, keys=LATENT_KEYS, fixed={"rope_interleave": True}, checks=(one_mscale, _softmax_as_is),
        defaults={"kv_lora_rank": 512, "first_k_dense_replace": 1},
    ),
    Recipe("dots1", ("Dots1ForCausalLM",)),
    Recipe(
        "deepseek", ("DeepseekForCausalLM",), changes=PERMUTED,
        keys={"expert_weights_scale": 1.0, "expert_weights_norm": None, "expert_gating_func": 1},
        fixed={"norm_topk_prob": False, "scoring_func": "softmax", "moe_layer_freq": 1, "attention_bias": False},
    ),
    Recipe(
        "deepseek2", ("YoutuForCausalLM", "YoutuVLForConditionalGeneration"), LATENT,
        keys={
            **LATENT_KEYS, "leading_dense_block_count": _every_layer, "expert_shared_count": 0,
            "expert_feed_forward_length": "intermediate_size", "expert_gating_func": None, "expert_used_count": None,
            "expert_group_count": None, "expert_group_used_count": None,
        },
        fixed={"rope_interleave": True, "n_routed_experts": 0}, checks=(one_mscale,), others=("siglip2.", "merger."),
    ),
)  # fmt: skip

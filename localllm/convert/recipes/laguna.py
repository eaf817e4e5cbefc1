"""The recipes of Laguna and Mellum 2."""

from __future__ import annotations

import numpy as np

from localllm.convert.hf_config import HfConfig, is_count
from localllm.convert.recipe import Recipe, real
from localllm.convert.recipes.shared import leading, rotated_when


def _all_sparse(config: HfConfig) -> str | None:
    return "mlp_layer_types has dense layers; only sparse layers are supported" if leading(config) else None


def _heads(config: HfConfig) -> np.ndarray | int:
    """Return the number of heads: an array by layer, or one value for all layers."""
    if config.get("num_attention_heads_per_layer") is None:
        return config.heads
    return np.array(config.per_layer("num_attention_heads_per_layer", "{} numbers of heads", is_count), np.int32)


_LAGUNA = {
    "attn_gate": "self_attn.g_proj",
    "exp_probs_b.bias": "mlp.experts.e_score_correction_bias",
}


ROWS = (
    Recipe(
        "laguna", ("LagunaForCausalLM",), _LAGUNA, like="dots1",
        keys={
            "expert_weights_norm": True, "expert_weights_scale": real("moe_routed_scaling_factor"),
            "leading_dense_block_count": leading, "attention.head_count": _heads,
            "rope.dimension_count_swa": rotated_when("sliding_attention"),
        },
        fixed={"moe_router_logit_softcapping": 0, "moe_apply_router_weight_on_input": False},
    ),
    Recipe(
        "mellum", ("MellumForCausalLM",), like="qwen3moe qwen2moe", fixed={"norm_topk_prob": True},
        checks=(_all_sparse,),
    ),
)  # fmt: skip

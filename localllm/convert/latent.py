"""Tensors and metadata keys of multi-head latent attention (DeepSeek 2, 3 and similar models)."""

from __future__ import annotations

from localllm.convert.changes import Groups, in_turn, of_heads, turned
from localllm.convert.hf_config import HfConfig, class_of
from localllm.convert.recipe import Keys, integer, taken
from localllm.convert.recipes.shared import dense_layers


def key_and_value(config: HfConfig) -> Groups:
    """Return the number of heads in latent attention, and the rows per head of the keys without rope and of the
    values."""
    widths = config.needed("qk_nope_head_dim"), config.needed("v_head_dim")
    return config.heads, widths


LATENT = {
    "attn_k_b.weight": taken("self_attn.kv_b_proj.weight", in_turn(of_heads(key_and_value, 0), turned)),
    "attn_v_b.weight": taken("self_attn.kv_b_proj.weight", of_heads(key_and_value, 1)),
}


def gating(config: HfConfig) -> int:
    return 1 if class_of(config) == "DeepseekV2ForCausalLM" else 2  # expert gating function: 1 softmax, 2 sigmoid


def _groups(config: HfConfig) -> int | None:
    return None if config.get("topk_method") == "greedy" else config.integer("n_group")


def all_dimensions(config: HfConfig) -> float | None:
    """Return the value of the key rope.scaling.yarn_log_multiplier, or None to omit the key."""
    rope = config.inner("rope_parameters", "rope_scaling")
    scale = rope.real("mscale_all_dim")
    if scale:
        return 0.1 * scale  # GGUF files store a tenth of the factor
    return 0.0 if rope.get("rope_type", "type") == "yarn" else None  # a GGUF reader assumes 1 if the key is missing


def one_mscale(config: HfConfig) -> str | None:
    rope = config.inner("rope_parameters", "rope_scaling")
    one, all_dim = rope.real("mscale"), rope.real("mscale_all_dim")
    if (one or None) == (all_dim or None) and rope.real("attention_factor") is None:
        return None
    return f"mscale is {one} and mscale_all_dim {all_dim}; the GGUF architecture has one number for both"


LATENT_WIDTHS: Keys = {
    "attention.q_lora_rank": integer("q_lora_rank"),
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.key_length": lambda config: config.needed("kv_lora_rank") + config.needed("qk_rope_head_dim"),
    "attention.value_length": "kv_lora_rank",
    "attention.key_length_mla": lambda config: config.needed("qk_nope_head_dim") + config.needed("qk_rope_head_dim"),
    "attention.value_length_mla": "v_head_dim",
    "rope.dimension_count": "qk_rope_head_dim",
}
LATENT_KEYS: Keys = {
    "attention.head_count_kv": 1,
    **LATENT_WIDTHS,
    "rope.scaling.attn_factor": None,
    "rope.scaling.yarn_log_multiplier": all_dimensions,
    "expert_gating_func": gating,
    "expert_group_count": _groups,
}
ROUTED_KEYS: Keys = {
    **LATENT_WIDTHS,
    "leading_dense_block_count": dense_layers,
    "expert_shared_count": integer("num_shared_experts", "n_shared_experts"),
    "expert_group_count": integer("num_expert_group", "n_group"),
}

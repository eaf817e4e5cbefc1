"""Settings shared by several tiny models of `hf_table`, named as in transformers."""

from __future__ import annotations

from tests.localllm.convert.hf_tokenizers import VOCABULARY

WINDOW = 8
CONTEXT = 256
XIELU = ("act_fn.beta", "act_fn.eps")  # parameters of Apertus' xIELU activation
# buffers that MiniMax 01 checkpoints contain, although they follow from config.json
COMPUTED = (".slope_rate", ".query_decay", ".key_decay", ".diagonal_decay")
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.0, 1.5, 4.0, 9.0], "original_max_position_embeddings": 16,
}  # fmt: skip
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW}
GRANITE = {
    "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
GPT_OSS = {
    "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW, "num_hidden_layers": 3,
    "rope_parameters": {**YARN, "truncate": True},
}  # fmt: skip
DELTA = {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}  # fmt: skip
CONV = ["conv", "full_attention", "conv"]
GRANITE_MAMBA = {
    "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 4, "mamba_d_head": 16,
    "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_expand": 2,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 10, "v_head_dim": 12,
    "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
GEMMA4 = {
    "head_dim": 16, "global_head_dim": 32, "sliding_window": WINDOW, "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}  # fmt: skip
NEMOTRON3 = {
    "layers_block_type": ["mamba", "moe", "attention", "moe", "mamba"], "head_dim": 8, "mamba_num_heads": 4,
    "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "use_mamba_kernels": False, "n_routed_experts": 4,
    "n_shared_experts": 1, "moe_intermediate_size": 40, "moe_shared_expert_intermediate_size": 48,
    "num_experts_per_tok": 2, "routed_scaling_factor": 2.5,
}  # fmt: skip
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0], "fullatt_block_indexes": [0],
}  # fmt: skip
# settings of config.json outside `text_config` and `vision_config`
PARTS = {"MuseGlimmerConfig": {"out_hidden_size": 64, "projector_hidden_size": 16}}
STEP = {
    **EXPERTS, "num_hidden_layers": 4, "head_dim": 16, "sliding_window": WINDOW, "num_sliding_attention_heads": 6,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "moe_layers_enum": "1,2,3", "n_routed_experts": 4, "share_expert_dim": 40, "moe_router_scaling_factor": 3.0,
    "swiglu_limits": [0.0, 0.0, 0.25, 0.0], "swiglu_limits_shared": [0.0, 0.5, 0.0, 0.25],
    "rope_parameters": {
        "full_attention": {**LLAMA3, "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    },
}  # fmt: skip
MINISTRAL = {
    **YARN, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1, "max_position_embeddings": CONTEXT,
}  # fmt: skip

"""The tiny models of `hf_table` that have sparse-attention indexers or hyper-connections."""

from __future__ import annotations

from typing import Any

from tests.localllm.convert.hf_settings import DEFAULT, EXPERTS, LATENT, WINDOW, YARN

_INDEXER = {
    "index_topk": 6,
    "index_head_dim": 64,
    "index_n_heads": 16,
}  # top-k is below the prompt length of 24; no two scores tie
_MOE = {**LATENT, **EXPERTS, **_INDEXER, "n_routed_experts": 4, "n_shared_experts": 1}

SPARSE: dict[str, tuple[str, dict[str, Any], str]] = {
    "deepseek4": (
        "DeepseekV4Config",
        {"num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 32, "partial_rotary_factor": 0.25,
         "intermediate_size": 48, "moe_intermediate_size": 48, "num_experts_per_tok": 2, "n_routed_experts": 4,
         "routed_scaling_factor": 1.5, "q_lora_rank": 24, "sliding_window": WINDOW, "o_groups": 2, "o_lora_rank": 8,
         "index_n_heads": 16, "index_head_dim": 16, "index_topk": 3, "swiglu_limit": 1.0, "hc_mult": 4,
         "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
                         "compressed_sparse_attention"],
         "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"], "compress_rope_theta": 40000.0,
         "rope_parameters": {**YARN}},
        "deepseek-v3",
    ),
    "deepseek32": (
        "DeepseekV32Config",
        {**_MOE, "n_group": 2, "topk_group": 1, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
        "deepseek-v3",
    ),
    "glm-dsa": (
        "GlmMoeDsaConfig",
        {**_MOE, "num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]},
        "llama3",
    ),
    "dots3note": (
        "Dots3NoteTextConfig",
        {**_MOE, "num_hidden_layers": 4, "head_dim": 18, "sliding_window": WINDOW, "swa_num_attention_heads": 2,
         "swa_num_key_value_heads": 2, "swa_q_lora_rank": 24, "swa_kv_lora_rank": 20, "swa_head_dim": 22,
         "swa_qk_nope_head_dim": 14, "swa_v_head_dim": 10, "shared_experts_intermediate_size": 32},
        "qwen2",
    ),
    "hy_v4": (
        "HYV4Config",
        {**_MOE, "num_hidden_layers": 4, "indexer_types": ["full", "full", "shared", "full"], "hc_mult": 4,
         "swiglu_limit": 0.5},
        "qwen2",
    ),
    "glm5-next": (
        "Glm5NextConfig",
        {**_MOE, "qk_rope_head_dim": 0, "num_hidden_layers": 5, "index_topk": 8, "index_kpool": 4, "hc_mult": 4,
         "hc_sinkhorn_iters": 5, "linear_head_dim": 16, "linear_num_heads": 4, "swiglu_limit": 1.0,
         "layer_types": ["linear_attention", "indexed_attention", "linear_attention", "indexed_attention",
                         "indexed_attention"],
         "mlp_layer_types": ["dense"] + ["sparse"] * 4,
         "indexer_types": ["full", "full", "shared", "full", "shared"]},
        "llama3",
    ),
    "minimax-m3": (
        "MiniMaxM3VLConfig",
        {"num_experts_per_tok": 2, "head_dim": 16, "num_hidden_layers": 3, "num_local_experts": 4, "rotary_dim": 8,
         "dense_intermediate_size": 40, "intermediate_size": 24, "shared_intermediate_size": 24,
         "mlp_layer_types": ["dense", "sparse", "sparse"],
         "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
         "index_n_heads": 2, "index_head_dim": 16, "index_block_size": 4, "index_topk_blocks": 3,
         "index_local_blocks": 1, "rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}},
        "gpt-4o",
    ),
}  # fmt: skip

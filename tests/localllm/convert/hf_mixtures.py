"""Settings of tiny mixtures of experts, which `hf_make` builds with transformers."""

from __future__ import annotations

from tests.localllm.convert.hf_settings import (
    CONTEXT,
    DEFAULT,
    EXPERTS,
    GEMMA4,
    GRANITE,
    LATENT,
    LOCAL,
    LONG,
    ROUTED,
    WINDOW,
    YARN,
    Tiny,
    seeing,
    tiny,
)

GPT_OSS = {
    "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW, "num_hidden_layers": 3,
    "rope_parameters": {**YARN, "truncate": True},
}  # fmt: skip

MIXTURES: dict[str, Tiny] = {
    "afmoe": tiny(
        "AfmoeConfig", "llama3", EXPERTS, head_dim=16, num_experts=4, num_hidden_layers=5, num_dense_layers=1,
        num_shared_experts=1, route_scale=1.5, mup_enabled=True, sliding_window=WINDOW,
    ),
    "cohere2moe": tiny(
        "Cohere2MoeConfig", "qwen2", head_dim=8, num_hidden_layers=5, sliding_window=WINDOW, num_experts=4,
        num_experts_per_tok=2, num_shared_experts=2, expert_selection_fn="sigmoid", first_k_dense_replace=1,
        prefix_dense_intermediate_size=48, logit_scale=0.25,
    ),
    "cohere2moe-softmax": tiny(
        "Cohere2MoeConfig", "qwen2", head_dim=8, num_hidden_layers=4, sliding_window=WINDOW, num_experts=4,
        num_experts_per_tok=2, rms_norm_eps=1e-6, logit_scale=0.25, norm_topk_prob=False,
    ),
    "dbrx": tiny(
        "DbrxConfig", "llama3", d_model=32, attn_config={"kv_n_heads": 2, "clip_qkv": 0.8, "rope_theta": 5000.0},
        ffn_config={"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
        rope_parameters={**DEFAULT, "rope_theta": 5000.0},
    ),
    "deepseek2": tiny(
        "DeepseekV2Config", "deepseek-llm", LATENT, EXPERTS, n_routed_experts=4, n_shared_experts=2, q_lora_rank=None,
        topk_method="greedy", rope_parameters={**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    # matrix sizes that are not multiples of the FP8 block size
    "deepseek2-fp8": tiny(
        "DeepseekV3Config", "deepseek-v3", LATENT, EXPERTS, ROUTED, hidden_size=160, intermediate_size=200,
        kv_lora_rank=80, q_lora_rank=104, qk_nope_head_dim=40, v_head_dim=36, moe_intermediate_size=72, n_group=2,
        topk_group=1, num_experts_per_tok=2,
    ),
    "deepseek2-glm": tiny("Glm4MoeLiteConfig", "llama3", LATENT, EXPERTS, ROUTED),
    "deepseek2-groups": tiny(
        "DeepseekV2Config", "qwen2", LATENT, EXPERTS, n_routed_experts=8, n_shared_experts=1,
        topk_method="group_limited_greedy", n_group=4, topk_group=2, routed_scaling_factor=2.0,
    ),
    "deepseek2-v3": tiny(
        "DeepseekV3Config", "deepseek-v3", LATENT, EXPERTS, n_routed_experts=8, n_shared_experts=1, n_group=4,
        topk_group=2, rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "dots1": tiny(
        "Dots1Config", "qwen2", EXPERTS, ROUTED, head_dim=8, first_k_dense_replace=1, norm_topk_prob=True,
        routed_scaling_factor=2.5, layer_types=["full_attention"] * 2,
    ),
    "ernie4_5-moe": tiny(
        "Ernie4_5_MoeConfig", "spm", moe_num_experts=4, moe_k=2, moe_intermediate_size=32, moe_num_shared_experts=1,
        moe_layer_start_index=1, num_hidden_layers=3,
    ),
    "exaone-moe": tiny(
        "ExaoneMoeConfig", "exaone-moe", EXPERTS, num_experts=4, num_shared_experts=1, first_k_dense_replace=1,
        num_hidden_layers=5, sliding_window=WINDOW, routed_scaling_factor=2.5, norm_topk_prob=True,
    ),
    "gemma4-moe": tiny(
        "Gemma4TextConfig", "gemma4", GEMMA4, hidden_size_per_layer_input=0, num_kv_shared_layers=0,
        enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=32, attention_k_eq_v=True,
        num_global_key_value_heads=1,
    ),
    "glm4moe": tiny(
        "Glm4MoeConfig", "llama3", EXPERTS, head_dim=16, n_routed_experts=4, first_k_dense_replace=1,
        use_qk_norm=True, attention_bias=True, routed_scaling_factor=2.5, norm_topk_prob=True,
    ),
    "gpt-oss": tiny("GptOssConfig", "gpt-4o", GPT_OSS),
    "gpt-oss-mxfp4": tiny("GptOssConfig", "gpt-4o", GPT_OSS, num_hidden_layers=2),
    "granite_swa-moe": tiny(
        "GraniteMoeSWAConfig", "starcoder", GRANITE, LOCAL, num_hidden_layers=3, sliding_window=WINDOW,
        shared_intermediate_size=24,
    ),
    "granitemoe": tiny("GraniteMoeConfig", "starcoder", GRANITE, LOCAL),
    "granitemoe-shared": tiny("GraniteMoeSharedConfig", "starcoder", GRANITE, LOCAL, shared_intermediate_size=32),
    "hunyuan-moe": tiny("HunYuanMoEV1Config", "qwen2", head_dim=8, num_experts=4, moe_topk=2),
    "hy_v3": tiny(
        "HYV3Config", "qwen2", EXPERTS, head_dim=16, num_experts=4, num_local_experts=4, num_hidden_layers=3,
        mlp_layer_types=["dense", "sparse", "sparse"],
    ),
    "laguna": tiny(
        "LagunaConfig", "qwen2", EXPERTS, head_dim=16, num_experts=4, num_hidden_layers=4, sliding_window=WINDOW,
        shared_expert_intermediate_size=24, moe_routed_scaling_factor=2.5,
        layer_types=["full_attention"] + ["sliding_attention"] * 3, mlp_layer_types=["dense"] + ["sparse"] * 3,
        num_attention_heads_per_layer=[4, 8, 8, 8],
        rope_parameters={"full_attention": {**YARN, "partial_rotary_factor": 0.5}, "sliding_attention": DEFAULT},
    ),
    "llama4": tiny(
        "Llama4TextConfig", "gpt-4o", head_dim=16, intermediate_size_mlp=48, num_local_experts=4,
        num_experts_per_tok=1, num_hidden_layers=4, interleave_moe_layer_step=2,
    ),
    "mellum": tiny(
        "MellumConfig", "qwen2", EXPERTS, head_dim=16, num_experts=4, num_hidden_layers=4, sliding_window=WINDOW,
        layer_types=["sliding_attention"] * 3 + ["full_attention"], mlp_layer_types=["sparse"] * 4,
        norm_topk_prob=True, rope_parameters={"full_attention": YARN, "sliding_attention": DEFAULT},
    ),
    "mimo2": tiny(
        "MiMoV2FlashConfig", "qwen2", EXPERTS, head_dim=24, v_head_dim=16, num_hidden_layers=4, n_routed_experts=4,
        sliding_window=WINDOW, num_key_value_heads=1, norm_topk_prob=True,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    ),
    "minimax-m2": tiny("MiniMaxM2Config", "gpt-4o", LOCAL, head_dim=16),
    "mixtral": tiny("MixtralConfig", "spm", num_local_experts=4),
    "olmoe": tiny("OlmoeConfig", "qwen2", num_experts=4, num_experts_per_tok=2),
    "phimoe": tiny(
        "PhimoeConfig", "spm", num_local_experts=16, attention_bias=True, lm_head_bias=True, head_dim=12,
        rope_parameters={**LONG, "short_factor": [1.0, 1.1, 1.3, 1.6, 1.7, 2.0], "long_factor": [1.0, 1.5, 4.0, 9.0,
            9.5, 10.0], "original_max_position_embeddings": CONTEXT, "short_mscale": 1.2, "long_mscale": 1.2},
        max_position_embeddings=512, original_max_position_embeddings=CONTEXT,
    ),
    "qwen2moe": tiny("Qwen2MoeConfig", "qwen2", EXPERTS, num_experts=4, shared_expert_intermediate_size=48),
    "qwen3moe": tiny("Qwen3MoeConfig", "qwen2", EXPERTS, head_dim=16, num_experts=4, norm_topk_prob=True),
}  # fmt: skip

_INDEXER = {"index_topk": 6, "index_head_dim": 64, "index_n_heads": 16}  # fewer than 24 prompt tokens; no scores tie
_MOE = {**LATENT, **EXPERTS, **_INDEXER, **ROUTED}

# models with sparse-attention indexers or hyper-connections
SPARSE: dict[str, Tiny] = {
    "deepseek32": tiny(
        "DeepseekV32Config", "deepseek-v3", _MOE, n_group=2, topk_group=1,
        rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "deepseek4": tiny(
        "DeepseekV4Config", "deepseek-v3", num_hidden_layers=4, num_key_value_heads=1, head_dim=32,
        partial_rotary_factor=0.25, intermediate_size=48, moe_intermediate_size=48, num_experts_per_tok=2,
        n_routed_experts=4, routed_scaling_factor=1.5, q_lora_rank=24, sliding_window=WINDOW, o_groups=2,
        o_lora_rank=8, index_n_heads=16, index_head_dim=16, index_topk=3, swiglu_limit=1.0, hc_mult=4,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
            "compressed_sparse_attention"], mlp_layer_types=["hash_moe", "moe", "moe", "moe"],
        compress_rope_theta=40000.0, rope_parameters=YARN,
    ),
    "dots3note": tiny(
        "Dots3NoteTextConfig", "qwen2", _MOE, num_hidden_layers=4, head_dim=18, sliding_window=WINDOW,
        swa_num_attention_heads=2, swa_num_key_value_heads=2, swa_q_lora_rank=24, swa_kv_lora_rank=20,
        swa_head_dim=22, swa_qk_nope_head_dim=14, swa_v_head_dim=10, shared_experts_intermediate_size=32,
    ),
    "glm-dsa": tiny(
        "GlmMoeDsaConfig", "llama3", _MOE, num_hidden_layers=4, indexer_types=["full", "shared", "full", "shared"],
    ),
    "glm5-next": seeing(
        "Glm5NextConfig", "llama3", _MOE, qk_rope_head_dim=0, num_hidden_layers=5, index_topk=8, index_kpool=4,
        hc_mult=4, hc_sinkhorn_iters=5, linear_head_dim=16, linear_num_heads=4, swiglu_limit=1.0,
        layer_types=["linear_attention", "indexed_attention", "linear_attention", "indexed_attention",
            "indexed_attention"], mlp_layer_types=["dense"] + ["sparse"] * 4,
        indexer_types=["full", "full", "shared", "full", "shared"],
    ),
    "hy_v4": tiny(
        "HYV4Config", "qwen2", _MOE, num_hidden_layers=4, indexer_types=["full", "full", "shared", "full"], hc_mult=4,
        swiglu_limit=0.5,
    ),
    "minimax-m3": seeing(
        "MiniMaxM3VLConfig", "gpt-4o", LOCAL, head_dim=16, num_hidden_layers=3, rotary_dim=8,
        dense_intermediate_size=40, intermediate_size=24, shared_intermediate_size=24,
        mlp_layer_types=["dense", "sparse", "sparse"],
        layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"], index_n_heads=2, index_head_dim=16,
        index_block_size=4, index_topk_blocks=3, index_local_blocks=1,
        rope_parameters={**DEFAULT, "partial_rotary_factor": 0.5},
    ),
}  # fmt: skip

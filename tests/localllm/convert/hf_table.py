"""The tiny models that `hf_models` makes: one for each architecture that converts, and each odd corner of one."""

from __future__ import annotations

from typing import Any

from tests.localllm.convert.hf_tokenizers import VOCABULARY

WINDOW = 8
CONTEXT = 256
XIELU = ("act_fn.beta", "act_fn.eps")  # numbers that models of Apertus do not learn
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.0, 1.5, 4.0, 9.0], "original_max_position_embeddings": 16,
}  # fmt: skip
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW}
_GRANITE = {
    "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GPT_OSS = {
    "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW, "num_hidden_layers": 3,
    "rope_parameters": {**_YARN, "truncate": True},
}  # fmt: skip
_DELTA = {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}  # fmt: skip
_CONV = ["conv", "full_attention", "conv"]
_GRANITE_MAMBA = {
    "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 4, "mamba_d_head": 16,
    "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_expand": 2,
}  # fmt: skip
_LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 10, "v_head_dim": 12,
    "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
_GEMMA4 = {
    "head_dim": 16, "global_head_dim": 32, "sliding_window": WINDOW, "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}  # fmt: skip
_NEMOTRON3 = {
    "layers_block_type": ["mamba", "moe", "attention", "moe", "mamba"], "head_dim": 8, "mamba_num_heads": 4,
    "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "use_mamba_kernels": False, "n_routed_experts": 4,
    "n_shared_experts": 1, "moe_intermediate_size": 40, "moe_shared_expert_intermediate_size": 48,
    "num_experts_per_tok": 2, "routed_scaling_factor": 2.5,
}  # fmt: skip
_DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0], "fullatt_block_indexes": [0],
}  # fmt: skip
_MINISTRAL = {
    **_YARN, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1, "max_position_embeddings": CONTEXT,
}  # fmt: skip


def sees(name: str) -> bool:
    """Return whether the model of that name has a part for pictures."""
    return "VL" in MODELS[name][0] or MODELS[name][0] == "Mistral3Config"


# Name: class of the configuration, its further settings, and the tokenizer ("spm", "llama3", ...).
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("LlamaConfig", {"rope_parameters": _LLAMA3}, "llama3"),
    "llama-linear": ("LlamaConfig", {"rope_parameters": {**_DEFAULT, "rope_type": "linear", "factor": 4.0}}, "spm"),
    "llama-bias": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}, "llama3"),
    "afmoe": (
        "AfmoeConfig",
        {**_EXPERTS, "head_dim": 16, "num_experts": 4, "num_hidden_layers": 5, "num_dense_layers": 1,
         "num_shared_experts": 1, "route_scale": 1.5, "mup_enabled": True, "sliding_window": WINDOW},
        "llama3",
    ),
    "apertus": ("ApertusConfig", {"attention_bias": True, "rope_parameters": _LLAMA3}, "tekken"),
    "arcee": ("ArceeConfig", {"head_dim": 8, "rope_parameters": _YARN}, "llama3"),
    "bitnet": ("BitNetConfig", {"hidden_act": "silu", "tie_word_embeddings": True}, "llama3"),
    "cohere2": ("Cohere2Config", {"head_dim": 8, "num_hidden_layers": 5, "sliding_window": WINDOW}, "qwen2"),
    "cohere2moe": (
        "Cohere2MoeConfig",
        {"head_dim": 8, "num_hidden_layers": 5, "sliding_window": WINDOW, "num_experts": 4, "num_experts_per_tok": 2,
         "num_shared_experts": 2, "expert_selection_fn": "sigmoid", "first_k_dense_replace": 1,
         "prefix_dense_intermediate_size": 48, "logit_scale": 0.25},
        "qwen2",
    ),
    "cohere2moe-softmax": (
        "Cohere2MoeConfig",
        {"head_dim": 8, "num_hidden_layers": 4, "sliding_window": WINDOW, "num_experts": 4, "num_experts_per_tok": 2,
         "rms_norm_eps": 1e-6, "logit_scale": 0.25, "norm_topk_prob": False},
        "qwen2",
    ),
    "command-r": ("CohereConfig", {"use_qk_norm": True}, "qwen2"),
    "deepseek2": (
        "DeepseekV2Config",
        {**_LATENT, **_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 2, "q_lora_rank": None,
         "topk_method": "greedy", "rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
        "deepseek-llm",
    ),
    "deepseek2-groups": (
        "DeepseekV2Config",
        {**_LATENT, **_EXPERTS, "n_routed_experts": 8, "n_shared_experts": 1, "topk_method": "group_limited_greedy",
         "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.0},
        "qwen2",
    ),
    "deepseek2-v3": (
        "DeepseekV3Config",
        {**_LATENT, **_EXPERTS, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
         "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
        "deepseek-v3",
    ),
    "deepseek2-fp8": (  # sizes that are no multiple of a block
        "DeepseekV3Config",
        {**_LATENT, **_EXPERTS, "hidden_size": 160, "intermediate_size": 200, "kv_lora_rank": 80, "q_lora_rank": 104,
         "qk_nope_head_dim": 40, "v_head_dim": 36, "moe_intermediate_size": 72, "n_routed_experts": 4,
         "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
        "deepseek-v3",
    ),
    "deepseek2-glm": (
        "Glm4MoeLiteConfig", {**_LATENT, **_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1}, "llama3"),
    "dots1": (
        "Dots1Config",
        {**_EXPERTS, "head_dim": 8, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_shared_experts": 1,
         "norm_topk_prob": True, "routed_scaling_factor": 2.5, "layer_types": ["full_attention"] * 2},
        "qwen2",
    ),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 8}, "spm"),
    "ernie4_5-moe": (
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1,
         "moe_layer_start_index": 1, "num_hidden_layers": 3},
        "spm",
    ),
    "exaone4": ("Exaone4Config", {"sliding_window": None, "layer_types": ["full_attention"] * 2}, "qwen2"),
    "exaone-moe": (
        "ExaoneMoeConfig",
        {**_EXPERTS, "num_experts": 4, "num_shared_experts": 1, "first_k_dense_replace": 1, "num_hidden_layers": 5,
         "sliding_window": WINDOW, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
        "exaone-moe",
    ),
    "hunyuan-dense": ("HunYuanDenseV1Config", {"head_dim": 8}, "deepseek-v3"),
    "hunyuan-moe": ("HunYuanMoEV1Config", {"head_dim": 8, "num_experts": 4, "moe_topk": 2}, "qwen2"),
    "jais2": ("Jais2Config", {}, "jais-2"),
    "llama4": (
        "Llama4TextConfig",
        {"head_dim": 16, "intermediate_size_mlp": 48, "num_local_experts": 4, "num_experts_per_tok": 1,
         "num_hidden_layers": 4, "interleave_moe_layer_step": 2},
        "gpt-4o",
    ),
    "minimax-m2": ("MiniMaxM2Config", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}, "gpt-4o"),
    "nemotron": ("NemotronConfig", {"head_dim": 8}, "llama3"),
    "olmo": ("OlmoConfig", {"clip_qkv": 0.8}, "qwen2"),
    "olmoe": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}, "qwen2"),
    "phi2": ("PhiConfig", {}, "gpt-2"),
    "seed_oss": ("SeedOssConfig", {"head_dim": 8}, "seed-coder"),
    "mistral": ("MistralConfig", {"sliding_window": None, "tie_word_embeddings": True}, "tekken"),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}, "spm"),
    "mistral4": (
        "Mistral3Config",
        {"model_type": "mistral4", **_LATENT, **_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 2,
         "routed_scaling_factor": 1.5, "rope_parameters": {**_MINISTRAL}},  # a copy: transformers adds to it
        "tekken",
    ),
    "mistral3": ("Ministral3Config", {"head_dim": 16, "rope_parameters": _MINISTRAL}, "tekken"),
    "gemma": ("GemmaConfig", {"head_dim": 16}, "spm"),
    "gemma2": ("Gemma2Config", {**_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}, "spm"),
    "gemma3": (
        "Gemma3TextConfig",
        {**_GEMMA, "num_hidden_layers": 7, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0}}},
        "spm",
    ),
    "falcon-h1": (
        "FalconH1Config",
        {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16,
         "head_dim": 8, "attention_in_multiplier": 1.5, "attention_out_multiplier": 0.7, "key_multiplier": 0.6,
         "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.8, "ssm_multipliers": [0.9, 1.1, 0.7, 1.3, 0.5],
         "mlp_multipliers": [0.8, 1.4], "embedding_multiplier": 2.5, "lm_head_multiplier": 0.4},
        "llama3",
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        {"head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "laurel_rank": 8,
         "num_hidden_layers": 7, "num_kv_shared_layers": 2, "sliding_window": WINDOW, "intermediate_size": 64,
         "layer_types": ["sliding_attention", "full_attention"] * 3 + ["sliding_attention"],
         "activation_sparsity_pattern": [0.0] * 7},
        "spm",
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {**_GEMMA4, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY,
         "num_kv_shared_layers": 3, "use_double_wide_mlp": True, "final_logit_softcapping": 3.0},
        "gemma4",
    ),
    "gemma4-moe": (
        "Gemma4TextConfig",
        {**_GEMMA4, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "enable_moe_block": True,
         "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32, "attention_k_eq_v": True,
         "num_global_key_value_heads": 1},
        "gemma4",
    ),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": CONTEXT}, "gpt-2"),
    "glm4": ("Glm4Config", {"head_dim": 16}, "llama3"),
    "glm4moe": (
        "Glm4MoeConfig",
        {**_EXPERTS, "head_dim": 16, "n_routed_experts": 4, "first_k_dense_replace": 1, "use_qk_norm": True,
         "attention_bias": True, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
        "llama3",
    ),
    "gpt-oss": ("GptOssConfig", _GPT_OSS, "gpt-4o"),
    "gpt-oss-mxfp4": ("GptOssConfig", {**_GPT_OSS, "num_hidden_layers": 2}, "gpt-4o"),
    "granite": ("GraniteConfig", _GRANITE, "starcoder"),
    "granitemoe": ("GraniteMoeConfig", {**_GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2}, "starcoder"),
    "granitemoe-shared": (
        "GraniteMoeSharedConfig",
        {**_GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32},
        "starcoder",
    ),
    "granite_swa": (
        "GraniteSWAConfig",
        {**_GRANITE, "num_hidden_layers": 5, "sliding_window": WINDOW, "layer_rope_theta": [0, 5e3, 5e3, 0, 5e3],
         "tie_word_embeddings": False},
        "starcoder",
    ),
    "granite_swa-moe": (
        "GraniteMoeSWAConfig",
        {**_GRANITE, "num_hidden_layers": 3, "sliding_window": WINDOW, "num_local_experts": 4,
         "num_experts_per_tok": 2, "shared_intermediate_size": 24},
        "starcoder",
    ),
    "olmo2": ("Olmo2Config", {}, "llama3"),
    "olmo3": (
        "Olmo3Config",
        {"num_hidden_layers": 5, "sliding_window": WINDOW,
         "rope_parameters": {"full_attention": _YARN, "sliding_attention": _DEFAULT}},
        "llama3",
    ),
    "phi3": ("Phi3Config", {"rope_parameters": {**_DEFAULT, "partial_rotary_factor": 0.5}}, "spm"),
    "phi3-long": ("Phi3Config", {"rope_parameters": _LONG, "original_max_position_embeddings": 16}, "gpt-2"),
    "phi3-short": (
        "Phi3Config",
        {"rope_parameters": {**_LONG, "original_max_position_embeddings": CONTEXT}, "max_position_embeddings": 512,
         "original_max_position_embeddings": CONTEXT},
        "gpt-2",
    ),
    "phimoe": (
        "PhimoeConfig",
        {"num_local_experts": 16, "attention_bias": True, "lm_head_bias": True, "head_dim": 12,
         "rope_parameters": {
             **_LONG, "short_factor": [1.0, 1.1, 1.3, 1.6, 1.7, 2.0], "long_factor": [1.0, 1.5, 4.0, 9.0, 9.5, 10.0],
             "original_max_position_embeddings": CONTEXT, "short_mscale": 1.2, "long_mscale": 1.2},
         "max_position_embeddings": 512, "original_max_position_embeddings": CONTEXT},
        "spm",
    ),
    "qwen2": ("Qwen2Config", {"rope_parameters": {**_YARN, "attention_factor": 1.2}}, "qwen2"),
    "qwen2moe": ("Qwen2MoeConfig", {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 48}, "qwen2"),
    "qwen3": ("Qwen3Config", {"head_dim": 24, "tie_word_embeddings": True}, "qwen2"),
    "qwen3moe": ("Qwen3MoeConfig", {**_EXPERTS, "head_dim": 16, "num_experts": 4, "norm_topk_prob": True}, "qwen2"),
    "qwen35": ("Qwen3_5TextConfig", {**_DELTA, "num_hidden_layers": 4}, "qwen35"),
    "qwen35moe": (
        "Qwen3_5MoeTextConfig",
        {**_DELTA, **_EXPERTS, "num_hidden_layers": 3, "num_experts": 4, "shared_expert_intermediate_size": 48,
         "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        "qwen35",
    ),
    "qwen3next": (
        "Qwen3NextConfig",
        {**_DELTA, **_EXPERTS, "num_hidden_layers": 4, "num_experts": 4, "shared_expert_intermediate_size": 48},
        "qwen2",
    ),
    "lfm2": (
        "Lfm2Config", {"num_hidden_layers": 3, "layer_types": _CONV, "block_multiple_of": 16, "intermediate_size": 90},
        "qwen2",
    ),
    "lfm2moe": (
        "Lfm2MoeConfig", {**_EXPERTS, "num_hidden_layers": 3, "layer_types": _CONV, "num_dense_layers": 1,
                          "num_experts": 4}, "qwen2",
    ),
    "granitehybrid": (
        "GraniteMoeHybridConfig",
        {**_GRANITE, **_GRANITE_MAMBA, "num_local_experts": 4, "num_experts_per_tok": 2,
         "shared_intermediate_size": 48},
        "starcoder",
    ),
    "granitehybrid-dense": (
        "GraniteMoeHybridConfig",
        {**_GRANITE, **_GRANITE_MAMBA, "num_local_experts": 0, "shared_intermediate_size": 48,
         "position_embedding_type": "rope"},
        "starcoder",
    ),
    "granite-hybrid": (
        "GraniteMoeHybridConfig",
        {**_GRANITE, **_GRANITE_MAMBA, "layer_types": ["attention"] * 3, "num_local_experts": 0,
         "shared_intermediate_size": 48, "position_embedding_type": "rope"},
        "starcoder",
    ),
    "granitemoe-hybrid": (
        "GraniteMoeHybridConfig",
        {**_GRANITE, **_GRANITE_MAMBA, "layer_types": ["attention"] * 3, "num_local_experts": 4,
         "num_experts_per_tok": 2, "shared_intermediate_size": 48, "position_embedding_type": "rope"},
        "starcoder",
    ),
    "mamba": ("MambaConfig", {"state_size": 8}, "gpt-2"),
    "mamba-falcon": ("FalconMambaConfig", {"state_size": 8, "mixer_rms_eps": 1e-5}, "gpt-2"),
    "mamba2": ("Mamba2Config", {"state_size": 16, "num_heads": 4, "head_dim": 16, "n_groups": 1}, "gpt-2"),
    "jamba": (
        "JambaConfig",
        {"num_hidden_layers": 3, "num_experts": 4, "attn_layer_period": 3, "attn_layer_offset": 1,
         "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 8, "use_mamba_kernels": False,
         "mamba_dt_rank": 4},
        "spm",
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {"layers_block_type": ["mamba", "mlp", "attention", "mamba", "mlp"], "head_dim": 8, "mamba_num_heads": 4,
         "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "use_mamba_kernels": False},
        "llama3",
    ),
    "nemotron_h_moe": ("NemotronHConfig", {**_NEMOTRON3, "norm_topk_prob": True}, "tekken"),
    "nemotron_h_moe-latent": ("NemotronHConfig", {**_NEMOTRON3, "moe_latent_size": 24, "mlp_bias": False}, "tekken"),
    "bloom": ("BloomConfig", {}, "bloom"),
    "falcon": ("FalconConfig", {"activation": "gelu_new"}, "falcon"),
    "falcon-groups": (
        "FalconConfig", {"activation": "gelu_new", "new_decoder_architecture": True, "num_kv_heads": 2}, "gpt-2",
    ),
    "gptneox": ("GPTNeoXConfig", {"hidden_act": "gelu_new"}, "gpt-2"),
    "gptneox-serial": ("GPTNeoXConfig", {"hidden_act": "gelu_new", "use_parallel_residual": False}, "gpt-2"),
    "dbrx": (
        "DbrxConfig",
        {"d_model": 32, "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.8, "rope_theta": 5000.0},
         "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
         "rope_parameters": {**_DEFAULT, "rope_theta": 5000.0}},
        "llama3",
    ),
    "minicpm3": ("MiniCPM3Config", {**_LATENT, "qk_head_dim": 18}, "spm"),
    "mpt": (
        "MptConfig",
        {"hidden_size": 48, "num_attention_heads": 6, "max_seq_len": CONTEXT,
         "attn_config": {"clip_qkv": 0.8}},
        "gpt-2",
    ),
    "starcoder": ("GPTBigCodeConfig", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": CONTEXT}, "starcoder"),
    "hy_v3": (
        "HYV3Config",
        {**_EXPERTS, "head_dim": 16, "num_experts": 4, "num_local_experts": 4, "num_hidden_layers": 3,
         "mlp_layer_types": ["dense", "sparse", "sparse"]},
        "qwen2",
    ),
    "hrm_text": (
        "HrmTextConfig", {"head_dim": 16, "H_cycles": 2, "L_cycles": 3, "embedding_scale": 2.0}, "qwen2",
    ),
    "laguna": (
        "LagunaConfig",
        {**_EXPERTS, "head_dim": 16, "num_experts": 4, "num_hidden_layers": 4, "sliding_window": WINDOW,
         "shared_expert_intermediate_size": 24, "moe_routed_scaling_factor": 2.5,
         "layer_types": ["full_attention"] + ["sliding_attention"] * 3,
         "mlp_layer_types": ["dense"] + ["sparse"] * 3, "num_attention_heads_per_layer": [4, 8, 8, 8],
         "rope_parameters": {
             "full_attention": {**_YARN, "partial_rotary_factor": 0.5}, "sliding_attention": _DEFAULT}},
        "qwen2",
    ),
    "mimo2": (
        "MiMoV2FlashConfig",
        {**_EXPERTS, "head_dim": 24, "v_head_dim": 16, "num_hidden_layers": 4, "n_routed_experts": 4,
         "sliding_window": WINDOW, "num_key_value_heads": 1, "norm_topk_prob": True,
         "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]},
        "qwen2",
    ),
    "mellum": (
        "MellumConfig",
        {**_EXPERTS, "head_dim": 16, "num_experts": 4, "num_hidden_layers": 4, "sliding_window": WINDOW,
         "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "mlp_layer_types": ["sparse"] * 4,
         "norm_topk_prob": True, "rope_parameters": {"full_attention": _YARN, "sliding_attention": _DEFAULT}},
        "qwen2",
    ),
    "paddleocr-vl": (
        "PaddleOCRVLConfig",
        {"head_dim": 16, "rope_parameters": {**_DEFAULT, "rope_theta": 5e5, "mrope_section": [2, 3, 3]}},
        "spm",
    ),
    "qwen2vl": ("Qwen2_5_VLConfig", {"rope_parameters": {**_DEFAULT, "mrope_section": [1, 1, 2]}}, "qwen2"),
    "qwen3vl": (
        "Qwen3VLConfig", {"head_dim": 16, "rope_parameters": {**_DEFAULT, "mrope_section": [2, 3, 3]}}, "qwen2",
    ),
    "qwen3vlmoe": (
        "Qwen3VLMoeConfig",
        {**_EXPERTS, "head_dim": 16, "num_experts": 4, "moe_intermediate_size": 24, "norm_topk_prob": True,
         "rope_parameters": {**_DEFAULT, "mrope_section": [2, 3, 3]}},
        "qwen2",
    ),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 4}, "llama3"),
    "stablelm": ("StableLmConfig", {"use_qkv_bias": True}, "qwen2"),
    "stablelm-norms": ("StableLmConfig", {"qk_layernorm": True}, "qwen2"),
    "starcoder2": ("Starcoder2Config", {"sliding_window": None}, "starcoder"),
}  # fmt: skip

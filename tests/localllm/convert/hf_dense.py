"""Settings of tiny models without experts, and of all with Mamba, linear attention or convolutions, which `hf_make`
builds with transformers.
"""

from __future__ import annotations

from tests.localllm.convert.hf_settings import (
    CONTEXT,
    CONV,
    DEFAULT,
    DELTA,
    EXPERTS,
    GEMMA4,
    GRANITE,
    LATENT,
    LLAMA3,
    LOCAL,
    LONG,
    MINISTRAL,
    WINDOW,
    YARN,
    Tiny,
    tiny,
)
from tests.localllm.convert.hf_tokenizers import VOCABULARY

GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW}

DENSE: dict[str, Tiny] = {
    "apertus": tiny("ApertusConfig", "tekken", attention_bias=True, rope_parameters=LLAMA3),
    "arcee": tiny("ArceeConfig", "llama3", head_dim=8, rope_parameters=YARN),
    "bitnet": tiny("BitNetConfig", "llama3", hidden_act="silu", tie_word_embeddings=True),
    "bloom": tiny("BloomConfig", "bloom"),
    "chatglm-glm": tiny("GlmConfig", "llama3", head_dim=8, partial_rotary_factor=0.5, attention_bias=True),
    "cohere2": tiny("Cohere2Config", "qwen2", head_dim=8, num_hidden_layers=5, sliding_window=WINDOW),
    "command-r": tiny("CohereConfig", "qwen2", use_qk_norm=True),
    "ernie4_5": tiny("Ernie4_5Config", "spm", head_dim=8),
    "exaone4": tiny("Exaone4Config", "qwen2", sliding_window=None, layer_types=["full_attention"] * 2),
    "falcon": tiny("FalconConfig", "falcon", activation="gelu_new"),
    "falcon-groups": tiny(
        "FalconConfig", "gpt-2", activation="gelu_new", new_decoder_architecture=True, num_kv_heads=2,
    ),
    "gemma": tiny("GemmaConfig", "spm", head_dim=16),
    "gemma2": tiny("Gemma2Config", "spm", GEMMA, attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
    "gemma3": tiny(
        "Gemma3TextConfig", "spm", GEMMA, num_hidden_layers=7,
        rope_parameters={"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0}},
    ),
    "gemma3n": tiny(
        "Gemma3nTextConfig", "spm", head_dim=16, hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCABULARY,
        laurel_rank=8, num_hidden_layers=7, num_kv_shared_layers=2, sliding_window=WINDOW, intermediate_size=64,
        layer_types=["sliding_attention", "full_attention"] * 3 + ["sliding_attention"],
        activation_sparsity_pattern=[0.0] * 7,
    ),
    "gemma4": tiny(
        "Gemma4TextConfig", "gemma4", GEMMA4, hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCABULARY,
        num_kv_shared_layers=3, use_double_wide_mlp=True, final_logit_softcapping=3.0,
    ),
    "glm4": tiny("Glm4Config", "llama3", head_dim=16),
    "gpt2": tiny("GPT2Config", "gpt-2", n_embd=32, n_head=4, n_layer=2, n_positions=CONTEXT),
    "gptneox": tiny("GPTNeoXConfig", "gpt-2", hidden_act="gelu_new"),
    "gptneox-serial": tiny("GPTNeoXConfig", "gpt-2", hidden_act="gelu_new", use_parallel_residual=False),
    "granite": tiny("GraniteConfig", "starcoder", GRANITE),
    "granite_swa": tiny(
        "GraniteSWAConfig", "starcoder", GRANITE, num_hidden_layers=5, sliding_window=WINDOW,
        layer_rope_theta=[0, 5e3, 5e3, 0, 5e3], tie_word_embeddings=False,
    ),
    "hrm_text": tiny("HrmTextConfig", "qwen2", head_dim=16, H_cycles=2, L_cycles=3, embedding_scale=2.0),
    "hunyuan-dense": tiny("HunYuanDenseV1Config", "deepseek-v3", head_dim=8),
    "hunyuan-dense-alpha": tiny(
        "HunYuanDenseV1Config", "qwen2", head_dim=16,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0},
    ),
    "jais2": tiny("Jais2Config", "jais-2"),
    "llama": tiny("LlamaConfig", "llama3", rope_parameters=LLAMA3),
    "llama-bias": tiny("LlamaConfig", "llama3", attention_bias=True, mlp_bias=True, head_dim=24),
    "llama-linear": tiny("LlamaConfig", "spm", rope_parameters={**DEFAULT, "rope_type": "linear", "factor": 4.0}),
    "minicpm3": tiny("MiniCPM3Config", "spm", LATENT, qk_head_dim=18),
    "mistral": tiny("MistralConfig", "tekken", sliding_window=None, tie_word_embeddings=True),
    "mistral3": tiny("Ministral3Config", "tekken", head_dim=16, rope_parameters=MINISTRAL),
    "mpt": tiny(
        "MptConfig", "gpt-2", hidden_size=48, num_attention_heads=6, max_seq_len=CONTEXT,
        attn_config={"clip_qkv": 0.8},
    ),
    "nemotron": tiny("NemotronConfig", "llama3", head_dim=8),
    "olmo": tiny("OlmoConfig", "qwen2", clip_qkv=0.8),
    "olmo2": tiny("Olmo2Config", "llama3"),
    "olmo3": tiny(
        "Olmo3Config", "llama3", num_hidden_layers=5, sliding_window=WINDOW,
        rope_parameters={"full_attention": YARN, "sliding_attention": DEFAULT},
    ),
    "phi2": tiny("PhiConfig", "gpt-2"),
    "phi3": tiny("Phi3Config", "spm", rope_parameters={**DEFAULT, "partial_rotary_factor": 0.5}),
    "phi3-long": tiny("Phi3Config", "gpt-2", rope_parameters=LONG, original_max_position_embeddings=16),
    "phi3-short": tiny(
        "Phi3Config", "gpt-2", rope_parameters={**LONG, "original_max_position_embeddings": CONTEXT},
        max_position_embeddings=512, original_max_position_embeddings=CONTEXT,
    ),
    "qwen2": tiny("Qwen2Config", "qwen2", rope_parameters={**YARN, "attention_factor": 1.2}),
    "qwen3": tiny("Qwen3Config", "qwen2", head_dim=24, tie_word_embeddings=True),
    "seed_oss": tiny("SeedOssConfig", "seed-coder", head_dim=8),
    "smollm3": tiny("SmolLM3Config", "llama3", num_hidden_layers=4),
    "stablelm": tiny("StableLmConfig", "qwen2", use_qkv_bias=True),
    "stablelm-norms": tiny("StableLmConfig", "qwen2", qk_layernorm=True),
    "starcoder": tiny("GPTBigCodeConfig", "starcoder", n_embd=32, n_head=4, n_layer=2, n_positions=CONTEXT),
    "starcoder2": tiny("Starcoder2Config", "starcoder", sliding_window=None),
}  # fmt: skip

GRANITE_MAMBA = {
    "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 4, "mamba_d_head": 16,
    "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_expand": 2,
}  # fmt: skip
NEMOTRON3 = {
    "layers_block_type": ["mamba", "moe", "attention", "moe", "mamba"], "head_dim": 8, "mamba_num_heads": 4,
    "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "use_mamba_kernels": False, "n_routed_experts": 4,
    "n_shared_experts": 1, "moe_intermediate_size": 40, "moe_shared_expert_intermediate_size": 48,
    "num_experts_per_tok": 2, "routed_scaling_factor": 2.5,
}  # fmt: skip

RECURRENT: dict[str, Tiny] = {
    "bailingmoe3": tiny(
        "BailingHybridConfig", "qwen2", LATENT, q_lora_rank=None, head_dim=8, num_hidden_layers=3, layer_group_size=3,
        num_local_experts=8, num_experts_per_tok=2, n_group=4, topk_group=2, moe_intermediate_size=24,
    ),
    "falcon-h1": tiny(
        "FalconH1Config", "llama3", mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=2,
        mamba_d_state=16, head_dim=8, attention_in_multiplier=1.5, attention_out_multiplier=0.7, key_multiplier=0.6,
        ssm_in_multiplier=1.2, ssm_out_multiplier=0.8, ssm_multipliers=[0.9, 1.1, 0.7, 1.3, 0.5],
        mlp_multipliers=[0.8, 1.4], embedding_multiplier=2.5, lm_head_multiplier=0.4,
    ),
    "granite-hybrid": tiny(
        "GraniteMoeHybridConfig", "starcoder", GRANITE, GRANITE_MAMBA, layer_types=["attention"] * 3,
        num_local_experts=0, shared_intermediate_size=48, position_embedding_type="rope",
    ),
    "granitehybrid": tiny(
        "GraniteMoeHybridConfig", "starcoder", GRANITE, GRANITE_MAMBA, LOCAL, shared_intermediate_size=48,
    ),
    "granitehybrid-dense": tiny(
        "GraniteMoeHybridConfig", "starcoder", GRANITE, GRANITE_MAMBA, num_local_experts=0,
        shared_intermediate_size=48, position_embedding_type="rope",
    ),
    "granitemoe-hybrid": tiny(
        "GraniteMoeHybridConfig", "starcoder", GRANITE, GRANITE_MAMBA, LOCAL, layer_types=["attention"] * 3,
        shared_intermediate_size=48, position_embedding_type="rope",
    ),
    "jamba": tiny(
        "JambaConfig", "spm", num_hidden_layers=3, num_experts=4, attn_layer_period=3, attn_layer_offset=1,
        expert_layer_period=2, expert_layer_offset=1, mamba_d_state=8, use_mamba_kernels=False, mamba_dt_rank=4,
    ),
    "kimi-linear": tiny(
        "KimiLinearConfig", "qwen2", LATENT, q_lora_rank=None, num_hidden_layers=5, linear_head_dim=16,
        linear_num_heads=4, num_local_experts=8, num_experts_per_tok=2, n_group=4, topk_group=2,
        moe_intermediate_size=24,
    ),
    "lfm2": tiny(
        "Lfm2Config", "qwen2", num_hidden_layers=3, layer_types=CONV, block_multiple_of=16, intermediate_size=90,
    ),
    "lfm2moe": tiny(
        "Lfm2MoeConfig", "qwen2", EXPERTS, num_hidden_layers=3, layer_types=CONV, num_dense_layers=1, num_experts=4,
    ),
    "mamba": tiny("MambaConfig", "gpt-2", state_size=8),
    "mamba-falcon": tiny("FalconMambaConfig", "gpt-2", state_size=8, mixer_rms_eps=1e-5),
    "mamba2": tiny("Mamba2Config", "gpt-2", state_size=16, num_heads=4, head_dim=16, n_groups=1),
    "minimax-01": tiny(
        "MiniMaxConfig", "qwen2", num_local_experts=4, num_hidden_layers=4, rms_norm_eps=1e-6,
        full_attn_alpha_factor=3.5, linear_attn_alpha_factor=3.5, mlp_alpha_factor=3.5,
    ),
    "nemotron_h": tiny(
        "NemotronHConfig", "llama3", layers_block_type=["mamba", "mlp", "attention", "mamba", "mlp"], head_dim=8,
        mamba_num_heads=4, mamba_head_dim=16, n_groups=2, ssm_state_size=16, use_mamba_kernels=False,
    ),
    "nemotron_h_moe": tiny("NemotronHConfig", "tekken", NEMOTRON3, norm_topk_prob=True),
    "nemotron_h_moe-latent": tiny("NemotronHConfig", "tekken", NEMOTRON3, moe_latent_size=24, mlp_bias=False),
    "qwen35": tiny("Qwen3_5TextConfig", "qwen35", DELTA, num_hidden_layers=4),
    "qwen35moe": tiny(
        "Qwen3_5MoeTextConfig", "qwen35", DELTA, EXPERTS, num_hidden_layers=3, num_experts=4,
        shared_expert_intermediate_size=48, layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "qwen3next": tiny(
        "Qwen3NextConfig", "qwen2", DELTA, EXPERTS, num_hidden_layers=4, num_experts=4,
        shared_expert_intermediate_size=48,
    ),
    # an EOS within the prompt ends its n-grams; sparse attention selects two of twelve pooled blocks
    "qwen4exp": tiny(
        "Qwen4ExpTextConfig", "qwen35", DELTA, EXPERTS, num_hidden_layers=4, num_experts=4,
        shared_expert_intermediate_size=48, hc_count=3, hc_lowrank=6, output_gate_type="sigmoid",
        eos_token_id=[199, 2], ple_layer_ids=[2], heads_per_ngram=2, ngram_vocab_size_base=50,
        make_ngram_vocab_size_divisible_by=8, split_ngram_parts=3, indexer_n_heads=4, indexer_kv_heads=1,
        indexer_head_dim=12, indexer_budget=4, indexer_compress_ratio=2,
        rope_parameters={**DEFAULT, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
    ),
}  # fmt: skip

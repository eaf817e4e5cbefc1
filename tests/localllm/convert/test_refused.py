"""Settings in config.json that a GGUF file cannot express are refused, in one line that begins with the folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.localllm.convert.checkpoints import write
from tests.localllm.convert.support import check_refused

_PACKED = {"quant_method": "bitnet", "linear_class": "bitlinear", "quantization_mode": "offline"}
_ONLINE = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
_MISTRAL = ("num_attention_heads", "num_key_value_heads", "hidden_size", "num_hidden_layers")  # Pixtral 12B omits these
_WINDOWS = {
    "per_layer_config": None, "swa_num_attention_heads": 2, "swa_qk_nope_head_dim": 14, "swa_v_head_dim": 10,
}  # fmt: skip


def _block(heads: int | None, width: float | None) -> dict[str, Any]:
    return {"attention": {"n_heads_in_group": heads}, "ffn": {"ffn_mult": width}}


# Settings of single models whose value is refused: the message says `KEY is VALUE`, or that it is missing if None.
PLAIN: dict[str, dict[str, Any]] = {
    "bert": {"position_embedding_type": "relative_key"},
    "gemma-embedding": {"use_bidirectional_attention": False},
    "nomic-bert": {"moe_every_n_layers": 2},
    "BambaForCausalLM": {"attn_layer_indices": [3], "time_step_limit": [0.1, 1.0]},
    "YoutuForCausalLM": {"n_routed_experts": 4, "rope_interleave": False},
    "apertus": {"hidden_act": "silu"},
    "arctic": {"parallel_attn_mlp_res": None},
    "arwkv7": {"wkv_version": 6},
    "baichuan": {"num_hidden_layers": 30},
    "bailingmoe": {"first_k_dense_replace": 1},
    "bailingmoe2": {"use_rmsnorm": False, "score_function": "tanh"},
    "bailingmoe3": {"kda_safe_gate": False, "expert_swiglu_limit_list": 4},
    "bitnet": {"hidden_act": "relu2", "tie_word_embeddings": None},
    "chatglm": {
        "rmsnorm": False, "add_bias_linear": True, "apply_residual_connection_post_layernorm": True,
    },
    "codeshell": {"position_embedding_type": "alibi"},
    "cogvlm": {"num_multi_query_heads": 2},
    "cohere2moe": {
        "expert_selection_fn": "relu", "layer_types": ["full_attention"], "shared_expert_combination_strategy": "sum",
        "attention_bias": True,
    },
    "deci": {"num_key_value_heads_per_layer": [2]},
    "deepseek": {"norm_topk_prob": True},
    "deepseek32": {"scoring_func": "softmax", "topk_method": "greedy", "index_topk": None},
    "deepseek4": {
        "scoring_func": "sigmoid", "compress_rates.compressed_sparse_attention": 8,
        "layer_types": ["full_attention"] * 4, "mlp_layer_types": ["moe", "hash_moe", "moe", "moe"],
        "n_shared_experts": 2, "num_key_value_heads": 2,
    },
    "dots3note": {
        "apply_mla_qkv_lora_rescale": False, "attention_gate_type": "elementwise", "per_layer_config": {"1": {}},
        "use_dsa": False, "shared_experts_intermediate_size": 24,
    },
    "ernie4_5-fused": {"use_bias": True},
    "falcon-rw": {"alibi": True},
    "gemma2": {"query_pre_attn_scalar": 8},
    "glm-dsa": {"attention_bias": True, "indexer_types": ["full", "half", "full", "full"]},
    "glm5-next": {"qk_rope_head_dim": 8, "mhc": False, "linear_attn_config.safe_gate": False},
    "granite_swa": {"layer_rope_theta": [5000.0]},
    "grok": {"embedding_multiplier_scale": None, "num_experts_per_tok": None, "hidden_act": "silu"},
    "grok-2": {
        "sliding_window_size": 64, "global_attn_every_n": 2, "rope_rotate_half_dims": True,
        "attn_logit_softcapping_method": "x", "rope_type": "yarn_log", "scaling_factor": None,
        "original_max_position_embeddings": None, "attn_temperature_len": "long",
    },
    "grovemoe": {"norm_topk_prob": False},
    "hrm_text": {"num_layers_per_stack": 1000000},
    "hy_v4": {"indexer_types": ["full"], "n_group": 2},
    "jais": {"position_embedding_type": "learned", "mup_scale_qk_dot_by_d": False},
    "jina-bert-v2": {"feed_forward_type": "reglu"},
    "kimi-k3": {"activation_situ_beta": None, "hidden_act": "silu", "mla_use_nope": False},
    "kimi-linear": {"moe_renormalize": False},
    "lfm2": {"conv_bias": True},
    "lfm2moe": {"conv_bias": True},
    "llama": {"num_hidden_layers": None, "hidden_size": "32", "hidden_act": "relu", "rms_norm_eps": None},
    "llada": {
        "block_type": "sequential", "layer_norm_type": "default", "alibi": True, "rope": False,
        "attention_layer_norm": True, "d_model": "32",
    },
    "llada-moe": {"norm_topk_prob": True, "num_shared_experts": 1},
    "mamba-lm": {"rms_norm": None},
    "mamba2": {"time_step_limit": [0.1, 0.2]},
    "maple": {"nope_on_global_attention": None},
    "mimo2": {"hybrid_layer_pattern": [0, 1], "routed_scaling_factor": 2.5, "norm_topk_prob": False},
    "minicpm": {"num_experts": 8},
    "minimax-01": {"postnorm": False},
    "minimax-m3": {"swiglu_limit": 5.0, "swiglu_alpha": 1.5, "hidden_act": "gelu", "shared_intermediate_size": 48},
    "mistral4": {"n_group": 2, "rope_interleave": False},
    "mpt": {
        "attn_config.softmax_scale": 0.5, "attn_config.alibi": False, "attn_config.qk_ln": True,
        "attn_config.attn_type": "multiquery_attention", "logit_scale": "inv_sqrt_d_model",
    },
    "muse-glimmer": {"post_norm_eps": 1e-06},
    "neo-bert": {"hidden_act": "gelu", "rope": False, "rms_norm": False, "ngpt": True, "intermediate_size": None},
    "openelm": {"num_query_heads": [4], "ffn_multipliers": 0.5},
    "paddleocr-vl": {"use_bias": True},
    "plamo": {"n_shared_head": 7, "rope_theta": 1000000.0},
    "plamo2": {"mamba_enabled": False},
    "plamo3": {"rope_scaling_factor": 4},
    "plm": {"q_lora_rank": 8},
    "qwen": {"rotary_pct": 0.5},
    "qwen3tts": {"codec_eos_token_id": None, "hidden_act": "gelu"},
    "refact": {"multi_query": False},
    "rnd1": {"norm_topk_prob": False, "mlp_only_layers": [0]},
    "smallthinker": {"rope_layout": [2] * 5},
    "spark2_5": {"headwise_attn_output_gate": False},
    "step35-program": {
        "layer_types": ["full_attention"], "swiglu_limits": [7.0], "moe_layers_enum": "1,x",
        "use_head_wise_attn_gate": False, "query_pre_attn_scalar": 4,
    },
    **{key: {"num_key_value_heads": 2} for key in ("talkie", "xverse")},
    "t5": {"feed_forward_proj": "gated-silu", "relative_attention_max_distance": 256},
}  # fmt: skip

# Model, changes to config.json, and the message.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("Glm4vForConditionalGeneration", {"rope_parameters.mrope_section": [1]}, r"mrope_section is \[1\]; expected th"),
    ("InternVLForConditionalGeneration", {"text_config": {"model_type": "internlm2"}}, "model_type of the text mod"),
    ("LlavaForConditionalGeneration", {"text_config": {"model_type": "qwen2"}}, "model_type of the text model is q"),
    ("LlavaForConditionalGeneration", {"text_config": dict.fromkeys(_MISTRAL)}, r"expected shape \(320, 4096\)"),
    ("Qwen3OmniMoeForConditionalGeneration", {"thinker_config": [1]}, "thinker_config is not an object"),
    ("bailingmoe3", {"layer_types": None, "layer_group_size": 0}, "layer_group_size is 0; expected"),
    ("bailingmoe3", {"layer_types": None, "layer_group_size": 2}, r"blk.1.attn_q.weight: expected shape \(72"),
    ("bailingmoe3", {"layer_types": None, "layer_group_size": 4}, r"blk.0.attn_q.weight: expected shape \(72"),
    ("bailingmoe3-vl", {"mrope_section": [1, 2, 2]}, "mrope_section is .*expected three numbers whose sum is 4"),
    ("bailingmoe3-vl", {"mrope_section": "x"}, "mrope_section is .*expected three numbers of pairs"),
    *[
        ("gpt-oss", {"layer_types": x}, r"layer_types .*sliding_attention or full_attention, \d+ times")
        for x in (0.5, "full_attention", [["full_attention"]] * 3, ["full_attention"])
    ],
    ("modern-bert", {"layer_types": ["sliding_attention"] * 5}, "full attention in layers 0, n, 2n"),
    ("xlm-roberta", {"lora_adaptations": ["x"]}, "task adapters"),
    ("bitnet", {"quantization_config": _PACKED}, "rounds what every matrix reads to 8 bits"),
    ("bitnet", {"quantization_config": _ONLINE}, "rounds what every matrix reads to 8 bits"),
    ("chatglm", {"seq_length": None}, "max_position_embeddings is missing; expected a whole number"),
    ("llada", {"d_model": None}, "hidden_size is missing; expected a whole number"),
    ("t5", {"d_model": None}, "hidden_size is missing; expected a whole number"),
    ("chatglm", {"kv_channels": 16}, "4 heads of 16 are not 32 together, which the GGUF architecture"),
    ("cohere2moe", {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse", "sparse"]}, "dense layers first, then"),
    ("cohere2moe", {"sliding_window": ...}, "no layer has a window; the GGUF architecture rotates all layers then, "),
    ("cohere2moe", {"layer_types": ["full_attention"] * 5}, "no layer has a window; the GGUF architecture rotates"),
    ("cohere2moe", {"prefix_dense_sliding_window_pattern": 2}, "prefix_dense_sliding_window_pattern is not 1; the"),
    ("dbrx", {"rope_parameters.rope_theta": 10000.0}, "rope_theta is 10000 in rope_parameters and 5000 in attn_con"),
    ("dbrx", {"ffn_config.moe_normalize_expert_weights": ...}, "moe_normalize_expert_weights is None; the GGUF"),
    ("dbrx", {"ffn_config.ffn_act_fn": {"name": "gelu"}}, "ffn_act_fn.* is gelu; the GGUF"),
    ("dbrx", {"ffn_config.ffn_hidden_size": 25}, "96 rows or columns are not 4 groups of 25"),
    ("deci-blocks", {"block_configs": [_block(2, 2.0), _block(None, 2.0)]}, "block_configs is a layer without"),
    ("deci-blocks", {"block_configs": [_block(2, 2.0), _block(2, None)]}, "block_configs is ffn_mult None"),
    ("deci-blocks", {"block_configs": [{}]}, "block_configs is something else; expected attention of 2"),
    ("deepseek2", {"rope_parameters.mscale_all_dim": 0.7}, r"mscale is 0\.707 and mscale_all_dim 0\.7; the GGUF arc"),
    ("deepseek4", {"layer_types": None, "compress_ratios": [0, 4, 8, 4]}, "expected 0, 4, 128 for each"),
    ("deepseek4", {"layer_types": [["x"]] * 4}, "layer_types is .*expected"),
    ("granite_swa", {"layer_rope_theta": [10**400] * 4}, "layer_rope_theta is .*expected"),
    ("modern-bert-rank", {"classifier_pooling": ["x"]}, "classifier_pooling is .*expected cls or mean"),
    ("deepseek4", {"layer_types": None, "compress_ratios": [0, 4, 4]}, "for each of the 4 layers"),
    ("deepseek4", {"rope_parameters.main": {"rope_type": "yarn"}}, "rope_type of main is yarn"),
    (
        "deepseek4", {"rope_parameters.compress": {"rope_type": "yarn", "factor": 4, "attention_factor": 1.2}},
        "attention_factor is 1.2; the GGUF architecture",
    ),
    ("deepseek4", {"rope_parameters.main": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5 in rope_"),
    ("dots3note", _WINDOWS, "q_lora_rank differs between layers"),
    (
        "dots3note", {"per_layer_config.2": {"head_dim": 22}, "per_layer_config.3": {"head_dim": 20}},
        "the same sizes for all",
    ),
    ("dots3note", {**_WINDOWS, "swa_q_lora_rank": 24}, r"blk\.2\.attn_kv_a_mqa.*expected shape \(1032, 32\)"),
    ("dots3note", {**_WINDOWS, "swa_num_attention_heads": 3}, "48 rows or columns are not 3 groups"),
    ("exaone", {"activation_function": "gelu"}, "hidden_act is gelu; expected silu"),
    ("exaone-moe", {"layer_types": None, "sliding_window_pattern": "LLX"}, "pattern is LLX; expected a number, or"),
    ("falcon-h1", {"tie_word_embeddings": True}, "embedding_multiplier and lm_head_multiplier differ, but the matr"),
    ("falcon-h1", {"mamba_rms_norm": True}, "mamba_norm_before_gate is true; the GGUF architecture requires "),
    ("glm-dsa", {"indexer_types": None, "index_topk_pattern": "FXFF"}, "indexer_types is .*4 times"),
    ("glm-dsa", {"indexer_types": ["shared", "full", "full", "full"]}, "expected 1 for layer 0, which none comes"),
    ("glm-dsa", {"indexer_types": None, "index_topk_freq": 4}, r"blk\.1\.indexer\.\S+: this tensor is missing"),
    ("glm-dsa", {"indexer_types": None}, r"blk\.1\.indexer\.\S+: this tensor is missing"),
    ("glm5-next", {"linear_num_heads": 2}, "linear attention has 2 heads"),
    ("glm5-next", {"index_kpool": 3}, "expected a divisor of attention.indexer.top_k 8"),
    ("glm5-next", {"index_kpool_always_select_tail": False}, "only true is supported, found false"),
    ("gpt-oss", {"rope_parameters.truncate": False}, "truncate is False; expected True: angles would"),
    ("granite_swa", {"layer_rope_theta": [0, 5000.0, 10000.0, 0, 5000.0]}, "layer_rope_theta is 5000, 10000; expec"),
    ("granite_swa", {"layer_rope_theta": [-1] * 5}, "layer_rope_theta is .*expected 5 numbers"),
    ("grok", {"output_multiplier_scale": 0}, "output_multiplier_scale is 0.0; expected a number other"),
    ("hrm_text", {"L_cycles": 1000000000}, "hrm_text.block_count: expected an integer from 1"),
    ("hrm_text", {"num_layers_per_stack": 3}, r"made of model\.L_module\.layers\.2\."),
    ("hunyuan-dense-alpha", {"rope_parameters.alpha": 0.5}, "alpha is 0.5; expected a"),
    ("hunyuan_vl", {"rope_parameters.mrope_section": [1]}, "three or four numbers of pairs"),
    ("hy_v4", {"index_n_heads": 3}, "1024 rows or columns are not 3 groups of 341"),
    ("jais", {"mup_width_scale": None}, "width_scale is missing; expected a number"),
    ("jina-bert-v2", {"position_embedding_type": None}, "position_embedding_type is absolute; the"),
    (
        "kimi-linear",
        {"layer_types": None, "linear_attn_config": {"full_attn_layers": [5], "kda_layers": [1, 2, 3, 5]}},
        "full_attn_layers is .*each of the 5",
    ),
    ("kimi-linear", {"layer_types": None, "linear_attn_config.full_attn_layers": [6]}, "expected layers from 1 to"),
    ("kimi-linear", {"linear_num_heads": 2}, "linear attention has 2 heads; the GGUF architecture"),
    ("kimi-linear", {"linear_conv_kernel_dim": None}, "short_conv_kernel_size is missing"),
    ("kimi-linear", {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse", "sparse"]}, "dense layers first"),
    ("llada", {"activation_type": "gelu"}, "hidden_act is gelu; expected silu"),
    ("llama", {"quantization_config": _PACKED}, "rounds what every matrix reads to 8 bits"),
    ("llama", {"num_hidden_layers": 1 << 20}, "num_hidden_layers is 1048576; supported: at most 1024"),
    ("llama", {"num_hidden_layers": 1 << 40}, "num_hidden_layers is 1099511627776; expected"),
    ("llama", {"architectures": ["T5Model"]}, r"class 'T5Model' cannot be converted; .*T5ForConditionalGen.*; docs"),
    ("llama", {"architectures": ["DeepseekV5ForCausalLM"]}, "similar supported classes: DeepseekV4For"),
    ("llama", {"architectures": ["XForCausalLM"]}, "class 'XForCausalLM' cannot be converted; use a GGUF file"),
    ("llama", {"architectures": None}, "architectures is missing; expected the name of one model class"),
    ("llama", {"rope_parameters": {"rope_type": "ntk"}}, "rope_type is ntk; expected one of default"),
    *[
        (name, {f"{key}partial_rotary_factor": x}, "partial_rotary_factor is .*; expected a share of the")
        for name, key in (("llama", ""), ("step35", "rope_parameters.full_attention."))
        for x in (-0.5, 1e-9, 1e9)
    ],
    ("llama", {"rope_parameters": 5}, "rope_parameters is 5; expected an object"),
    ("llama", {"rope_parameters": {"rope_type": "linear"}}, "factor is missing; expected a number from 1 up"),
    (
        "llama", {"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}},
        "long_factor is a list of 1; expected a list of 4 numbers",
    ),
    (
        "llama", {"quantization_config": {"quant_method": "compressed-tensors", "format": "int-quantized"}},
        r"already quantized \(compressed-tensors int-quantized\)",
    ),
    ("llama", {"quantization_config": {"quant_method": "gptq"}}, r"already quantized \(gptq\); convert the model"),
    (
        "llama", {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
        r"weight_block_size is \[128\]; expected rows and columns of a block",
    ),
    ("llama", {"num_hidden_layers": 3}, "blk.2.attn_norm.weight: this tensor is missing.*layers.2.input_layernorm"),
    ("llama", {"num_key_value_heads": 4}, r"blk.0.attn_k.weight: expected shape .*, found \(16, 32\) .*k_proj"),
    ("llama", {"intermediate_size": 48}, r"blk.0.ffn_gate.weight: expected shape \(48, 32\).*, found \(64, 32\)"),
    ("llama4", {"moe_layers": [0, 3]}, "moe_layers does not select every layer of 2"),
    ("mamba-lm", {"ssm_cfg": {"layer": "Mamba2"}}, "ssm_cfg.layer is Mamba2; the GGUF"),
    ("mimo2", {"swa_head_dim": 32}, "swa_head_dim is not head_dim; the GGUF architecture has one for both"),
    ("mimo2", {"rope_parameters.sliding_attention": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor is no"),
    ("minicpm", {"dim_model_base": 0}, "dim_model_base is 0.0; expected a number other than 0"),
    ("minimax-01", {"mlp_alpha_factor": 2}, "mlp_alpha_factor 2.0; .*one factor for all"),
    ("minimax-01", {"mlp_beta_factor": 2}, "mlp_beta_factor 2.0; the GGUF architecture"),
    ("minimax-01", {"layer_types": None}, "attn_type_list is missing; expected 0 or 1 for each of the 4"),
    ("minimax-m3", {"layer_types": ["full_attention"] * 3}, "layer_types has an indexer in layers without"),
    ("minimax-m3", {"layer_types": None}, "layer_types has an indexer in layers without experts"),
    ("minimax-m3", {"mlp_layer_types": None, "moe_layer_freq": [1, 0, 1]}, "moe_layer_freq is .*before all with"),
    ("minimax-m3", {"index_block_size": None}, "sparse_block_size is missing"),
    ("mistral4", {"rope_parameters.mscale_all_dim": 0.5}, r"mscale is 1\.0 and mscale_all_dim 0\.5; the GGUF archit"),
    ("muse-glimmer", {"layer_rope_theta": [10000.0] * 5}, "layer_rope_theta is not 0 in layers with full attention"),
    ("muse-glimmer", {"layer_rope_theta": [0, 10000.0, 100000.0, 10000.0, 0]}, "layer_rope_theta is not 0 in layer"),
    ("nemotron_h_moe", {"layers_block_type": None, "hybrid_override_pattern": "M*E-"}, "layers_block_type has mlp,"),
    (
        "nemotron_h_moe", {"layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"]},
        "layers_block_type has mlp, which is not supported",
    ),
    ("neo-bert", {"max_length": None}, "max_position_embeddings is missing; expected a whole"),
    ("neo-bert", {"num_attention_heads": 3}, "96 rows or columns are not 3 groups of 30"),
    ("neo-bert", {"intermediate_size": 80}, r"blk.0.ffn_up.weight: expected shape \(112, 32\).*, found \(96, 32\)"),
    ("paddleocr-vl", {"rope_parameters.mrope_section": [1, 2]}, "expected three"),
    ("plamo", {"rope_scaling.type": "linear", "rope_scaling.factor": 2.0}, "rope_scaling is .*; the GGUF"),
    ("plamo", {"hidden_size": 80}, "160 rows or columns are not 40 groups of 2; config.json does not"),
    ("qwen4exp", {"ple_layer_ids": [1, 3]}, "ple_layer_ids lists 2 layers; the GGUF architecture has one"),
    ("qwen4exp", {"output_gate_type": None, "hidden_act": "silu"}, "output_gate_type is silu; the GGUF architectur"),
    ("rwkv6", {"head_size": 60}, "wkv.head_size: expected an even number that divides"),
    ("rwkv7", {"attn.layers": [1]}, "attn names layers with attention"),
    ("smallthinker", {"sliding_window_layout": [1] * 5}, "sliding_window_layout does not select all"),
    ("smallthinker", {"rope_layout": [1] * 5}, "rope_layout is not sliding_window_layout"),
    ("smollm3", {"no_rope_layers": [1] * 5}, "no_rope_layers does not select every fourth layer, as"),
    ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 3}, "no_rope_layers does not select every fourth"),
    ("spark2_5", {"gate_attn_act_mode": None}, "gate_attn_act_mode is ; the GGUF architecture"),
    ("step35-program", {"partial_rotary_factors": [0.5] * 3}, "rotated share of heads is not 1 with slid"),
    ("step35-program", {"rope_theta": [5000000.0, 10000.0, 100000.0]}, r"rope_theta is \[10000.0, 100000.0\]; expec"),
    ("step35-program", {"moe_layers_enum": "0,2"}, r"moe_layers_enum is \[0, 2\]; expected all layers from"),
    ("t5", {"num_decoder_layers": 4}, r"dec\.blk\.3\..*this tensor is missing"),
    ("t5", {"decoder_start_token_id": 320}, "decoder_start_token_id: expected an integer"),
    ("talkie", {"head_dim": 16}, "32 rows or columns are not 4 groups of 16; config.json does not"),
    ("talkie", {"rope_scaling.type": "linear", "rope_scaling.factor": 2.0}, "rope_scaling is .*; the GGUF"),
]  # fmt: skip


def _plain() -> list[tuple[str, dict[str, Any], str]]:
    found = []
    for name, settings in PLAIN.items():
        for key, value in settings.items():
            shown = "(missing|False)" if value is None else re.escape(str(value))
            found.append((name, {key: value}, rf"{re.escape(key)} is {shown}; (the GGUF|expected)"))
    return found


@pytest.mark.parametrize(
    ("name", "config", "message"), [*_plain(), *REFUSED], ids=lambda x: x[:40] if isinstance(x, str) else " ".join(x)
)
def test_what_gguf_cannot_say_is_one_line(name: str, config: dict[str, Any], message: str, tmp_path: Path) -> None:
    check_refused(write(name, tmp_path, **config), message)

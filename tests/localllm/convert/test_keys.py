"""The metadata of models whose config.json leaves settings out, or has others than transformers saves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.localllm.convert import hf_settings
from tests.localllm.convert.checkpoints import metadata_of
from tests.localllm.convert.weights import numbers

_PATTERN = "attention.sliding_window_pattern"
_YARN = {**hf_settings.YARN, "truncate": False}
_OLD_YARN = {
    "type": "yarn", "factor": 4.0, "attention_factor": 1.0, "original_max_position_embeddings": 64, "beta_fast": 16,
}  # fmt: skip
_OLD_LONG = {"type": "su", "short_factor": [1] * 4, "long_factor": [2] * 4}
_NOMIC = {
    "n_layer": 2, "n_embd": 32, "n_head": 4, "n_inner": 48, "n_positions": 256, "layer_norm_epsilon": 1e-12,
    "activation_function": "swiglu", "rotary_emb_base": 500, "max_trained_positions": 100,
}  # fmt: skip
_NO_EXPERTS = dict.fromkeys(("expert_used_count", "expert_group_count", "expert_group_used_count"))
_NONE = dict.fromkeys
# Model, changes to config.json, and keys of the GGUF below the architecture; None: the file has no such key.
KEYS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("YoutuForCausalLM", {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1},
     {**_NO_EXPERTS, "leading_dense_block_count": 2}),
    ("afmoe", {}, {"expert_shared_count": 1}),
    ("apertus", {}, {"xielu.beta": [0.75] * 2, "xielu.eps": [-0.25] * 2, "xielu.alpha_n": [
        float(numbers(f"model.layers.{i}.mlp.act_fn.alpha_n", [1], 0.0)[0]) for i in range(2)]}),
    ("bailingmoe3", {"expert_swiglu_limit_list": [None, 4, 5.5, 9]},
     {"swiglu_clamp_exp": [0, 4, 5.5], "swiglu_clamp_shexp": None}),
    ("bert-rank", {}, {
        "attention.causal": False, "pooling_type": 4, "tokenizer.ggml.token_type_count": 2,
        "classifier.output_labels": ["LABEL_0", "LABEL_1", "LABEL_2"]}),
    ("cohere2moe", {"layer_types": None, "mlp_layer_types": None, "first_k_dense_replace": 1},
     {_PATTERN: [False, True, True, True, False], "leading_dense_block_count": 1}),
    ("cohere2moe-softmax", {"shared_expert_combination_strategy": "sum"}, {"expert_shared_count": None}),
    # DBRX folders of 2024 have the base in `attn_config`; transformers 5 ignores it there and uses 10000
    ("dbrx", {"attn_config": {"clip_qkv": 8, "kv_n_heads": 2, "rope_theta": 5e5}, "rope_parameters": None},
     {"rope.freq_base": 5e5, "attention.clamp_kqv": 8.0}),
    ("dbrx", {"ffn_config.moe_normalize_expert_weights": 1.0}, {"expert_used_count": 2}),
    # Readers would scale attention scores as for 1 without the key
    ("deepseek32", {"rope_parameters.mscale": 0.7, "rope_parameters.mscale_all_dim": 0.7},
     {"rope.scaling.yarn_log_multiplier": 0.07}),
    ("deepseek32", {"rope_parameters.mscale": None, "rope_parameters.mscale_all_dim": None},
     {"rope.scaling.yarn_log_multiplier": 0.0}),
    ("dots3note", {"layer_types": None}, {_PATTERN: [False, False, True, True], "attention.head_count": [4, 4, 2, 2]}),
    ("ernie4_5-moe", {}, {"interleave_moe_layer_step": 1, "expert_shared_feed_forward_length": 32}),
    ("falcon-h1", {"tie_word_embeddings": True, "lm_head_multiplier": 2.5}, {"block_count": 2}),
    ("gemma2", {"query_pre_attn_scalar": None}, {"attention.key_length": 16}),
    ("gemma3n", {"activation_sparsity_pattern": [0.95, 0.5] + [0.0] * 5},
     {"activation_sparsity_scale": [1.6448536, 0.0, *[-math.inf] * 5]}),  # in standard deviations
    # GLM 5.3 Flash clamps routed and shared experts, Hunyuan 4 only routed ones
    ("glm5-next", {}, {"swiglu_clamp_exp": [1.0] * 5, "swiglu_clamp_shexp": [1.0] * 5}),
    ("granite_swa", {"layer_rope_theta": None}, {"rope.freq_base": 1e4, "attention.rope_pattern": [True] * 5}),
    ("granite_swa", {"layer_types": None}, {_PATTERN: [i % 4 != 0 for i in range(5)]}),
    ("granitehybrid-dense", {}, _NO_EXPERTS),
    ("grok", {}, {"final_logit_softcapping": None}),
    ("grok", {"final_logit_softcap": 40}, {"final_logit_softcapping": 40.0}),
    ("grok", {"max_attn_value": 20.0}, {"attn_logit_softcapping": 20.0}),
    # SGLang's YaRN does not scale attention; GGUF readers do, so the factor cancels it
    ("grok-2", {}, {"final_logit_softcapping": 50.0, "rope.scaling.attn_factor": 1 / (1 + 0.1 * math.log(4.0))}),
    ("grok-2", {"attn_temperature_len": -1}, {"attention.temperature_length": None}),
    ("grok-2", {"rope_type": "original"},
     {"rope.freq_base": 50000.0, **_NONE(f"rope.scaling.{x}" for x in ("type", "factor", "attn_factor"))}),
    ("hunyuan-moe", {}, {"expert_feed_forward_length": 64, "expert_shared_feed_forward_length": 64}),
    ("hunyuan_vl", {}, {"rope.freq_base": 1e4 * 1000 ** (16 / 14)}),
    ("hy_v4", {}, {"swiglu_clamp_exp": [0.5] * 4, "swiglu_clamp_shexp": None}),
    ("hy_v4", {"swiglu_limit": -1}, {"swiglu_clamp_exp": None}),
    ("kimi-linear", {"layer_types": None}, {"attention.head_count_kv": [0, 0, 0, 0, 1]}),
    ("llama", {"rope_parameters": _YARN}, {"rope.scaling.type": "none", "rope.scaling.attn_factor": 1.1386294}),
    ("llama", {"rope_parameters": {**_YARN, "truncate": True}}, {"rope.scaling.type": "yarn"}),
    # config.json as transformers 4 writes it
    ("llama", {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
     {"rope.freq_base": 5e5, "rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    ("llama", {"rope_parameters": None, "rope_scaling": _OLD_YARN}, {
        "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64,
        "rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.attn_factor": 1 / (0.1 * math.log(4.0) + 1)}),
    ("phi3-long", {"rope_parameters": None, "rope_scaling": _OLD_LONG}, {
        "rope.scaling.original_context_length": 16, "rope.scaling.type": "longrope",
        "rope.scaling.attn_factor": math.sqrt(1 + math.log(16) / math.log(16))}),
    ("llama4", {}, {"interleave_moe_layer_step": 2}),
    ("mimo2", {}, {"attention.value_scale": 0.707}),
    ("mimo2", {"attention_value_scale": ..., "routed_scaling_factor": ..., "n_group": 1, "topk_method": "noaux_tc"},
     {"attention.value_scale": None, "expert_weights_scale": None}),
    ("minimax-m2", {}, {"expert_feed_forward_length": 64, "expert_gating_func": 2}),
    ("mistral3", {}, {"general.architecture": "mistral3"}),
    ("mistral4", {"n_group": 1, "rope_interleave": True},
     {"attention.temperature_scale": 0.1, "attention.temperature_length": 16}),  # llama.cpp requires both or none
    ("modern-bert-rank", {}, {"classifier.pooling_type": 1}),
    # MPT StoryWriter: the publisher's code uses the steepness, transformers ignores it and uses 8
    ("mpt", {"attn_config.alibi_bias_max": 16, "attn_config.clip_qkv": ...},
     {"attention.max_alibi_bias": 16.0, "attention.clamp_kqv": None}),
    ("mpt", {"attn_config.softmax_scale": 0.35355339}, {"attention.max_alibi_bias": 8.0}),
    ("nemotron_h", {}, {**_NO_EXPERTS, "attention.layer_norm_epsilon": 1e-5}),
    ("neo-bert", {"intermediate_size": 64}, {"feed_forward_length": 48}),  # two thirds, rounded up to a multiple of 8
    ("nomic-bert", {**_NONE(("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size",
                             "max_position_embeddings", "layer_norm_eps", "hidden_act", "rope_parameters", "head_dim")),
                    **_NOMIC},
     {"block_count": 2, "embedding_length": 32, "attention.head_count": 4, "feed_forward_length": 48,
      "context_length": 100, "attention.layer_norm_epsilon": 1e-12, "rope.freq_base": 500.0}),
    # GGUF cannot express the window of PLaMo 2's layers, so the context ends with it
    ("plamo2", {"attention_window_size": 100, "full_attention_idx": []}, {"context_length": 100}),
    ("plamo2", {"attention_window_size": 100, "full_attention_idx": [1]}, {"context_length": 256}),
    ("Qwen3ASRForConditionalGeneration", {}, {"n_deepstack_layers": 0, "rope.dimension_sections": [2, 3, 3, 0]}),
    ("roberta", {}, {"context_length": 255}),  # positions begin behind the padding's
    ("rwkv7", _NONE(f"{x}_low_rank_dim" for x in ("decay", "a", "v", "gate")),
     {f"attention.{x}_lora_rank": 32 for x in ("decay", "iclr", "value_residual_mix", "gate")}),
    ("smallthinker", {"sliding_window_layout": [0] * 5, "rope_layout": [1] * 5}, {_PATTERN: None}),
    ("smallthinker", {}, {_PATTERN: [False, True, True, True, False]}),
    ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 4}, {"block_count": 4}),
    ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": None}, {"block_count": 4}),
    # transformers' default for layer norms
    ("starcoder2", {"norm_epsilon": None}, {"attention.layer_norm_epsilon": 1e-5}),
    ("cohere2moe", {"layer_norm_eps": None}, {"attention.layer_norm_epsilon": 1e-5}),
    ("t5", {}, {
        "context_length": 512, "block_count": 2, "decoder_block_count": 3, "attention.key_length": 12,
        "attention.relative_buckets_count": 32, "attention.layer_norm_rms_epsilon": 1e-6, "decoder_start_token_id": 0,
        "tokenizer.ggml.model": "t5", "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.unknown_token_id": 2,
        "tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True, "rope.freq_base": None}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "config", "expected"), KEYS, ids=lambda x: x if isinstance(x, str) else "")
def test_keys(name: str, config: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    keys = metadata_of(name, tmp_path, **config)
    of = f"{keys['general.architecture']}."
    found = {key: np.asarray(x).tolist() for key, x in keys.items()}
    for key, value in expected.items():
        ours = found.get(of + key, found.get(key))
        assert ours == (pytest.approx(value) if isinstance(value, float | list) and value else value), key

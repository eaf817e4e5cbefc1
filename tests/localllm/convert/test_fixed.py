"""Settings that the GGUF architecture fixes: any other value in config.json is refused, with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from localllm.convert.hf_config import HfConfig
from localllm.convert.recipes.table import RECIPES

_COHERE = {
    "num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "sparse"], "sliding_window": 8,
}  # fmt: skip
FIXED: dict[str, tuple[str, dict[str, Any], bool]] = {
    "every fourth by count": ("smollm3", {"num_hidden_layers": 5, "no_rope_layer_interval": 4}, True),
    "every fourth by default": ("smollm3", {"num_hidden_layers": 5}, True),
    "every fourth by name": ("smollm3", {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1]}, True),
    "every third": ("smollm3", {"num_hidden_layers": 5, "no_rope_layer_interval": 3}, False),
    "every layer rotated": ("smollm3", {"num_hidden_layers": 5, "no_rope_layers": [1] * 5}, False),
    "as the head": ("gemma2", {"num_hidden_layers": 2, "head_dim": 16, "query_pre_attn_scalar": 16}, True),
    "no word of it": ("gemma2", {"num_hidden_layers": 2, "head_dim": 16}, True),
    "not as the head": ("gemma2", {"num_hidden_layers": 2, "head_dim": 16, "query_pre_attn_scalar": 8}, False),
    "one mscale": ("deepseek2", {"rope_parameters": {"mscale": 0.7, "mscale_all_dim": 0.7}}, True),
    "two mscales": ("deepseek2", {"rope_parameters": {"mscale": 1.0, "mscale_all_dim": 0.7}}, False),
    "any steps": ("mamba2", {"time_step_limit": [0.0, float("inf")]}, True),
    "bounded steps": ("mamba2", {"time_step_limit": [0.1, 0.2]}, False),
    "no experts": ("nemotron_h", {"hybrid_override_pattern": "M*-M"}, True),
    "experts": ("nemotron_h_moe", {"hybrid_override_pattern": "M*EM"}, True),
    "experts beside dense layers": ("nemotron_h_moe", {"hybrid_override_pattern": "M*E-"}, False),
    "one matrix, one number": ("falcon-h1", {"tie_word_embeddings": True}, True),
    "one matrix, two numbers": ("falcon-h1", {"tie_word_embeddings": True, "lm_head_multiplier": 2.0}, False),
    "gate after norm": ("falcon-h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": True}, False),
    "MPT's own scale": ("mpt", {"attn_config": {"softmax_scale": 0.35355339, "clip_qkv": None}}, True),
    "another scale": ("mpt", {"attn_config": {"softmax_scale": 0.5}}, False),
    "learned positions": ("mpt", {"attn_config": {"alibi": False}}, False),
    "norms of queries": ("mpt", {"attn_config": {"qk_ln": True}}, False),
    "shared keys": ("mpt", {"attn_config": {"attn_type": "multiquery_attention"}}, False),
    "scaled logits": ("mpt", {"logit_scale": "inv_sqrt_d_model"}, False),
    "weights of one": ("dbrx", {"ffn_config": {"moe_normalize_expert_weights": 1.0}}, True),
    "weights as they are": ("dbrx", {"ffn_config": {"moe_normalize_expert_weights": None}}, False),
    "experts with GELU": ("dbrx", {"ffn_config": {"ffn_act_fn": {"name": "gelu"}}}, False),
    "base of old folders": ("dbrx", {"attn_config": {"rope_theta": 5e5}}, True),
    "two bases": ("dbrx", {"attn_config": {"rope_theta": 5e5}, "rope_parameters": {"rope_theta": 1e4}}, False),
    "layers with experts after a dense one": ("cohere2moe", _COHERE, True),
    "a sum of experts": (
        "cohere2moe",
        {**_COHERE, "num_shared_experts": 1, "shared_expert_combination_strategy": "sum"},
        False,
    ),
    "a sum without a shared expert": ("cohere2moe", {**_COHERE, "shared_expert_combination_strategy": "sum"}, True),
    "biases": ("cohere2moe", {**_COHERE, "attention_bias": True}, False),
    "no windows": ("cohere2moe", {**_COHERE, "layer_types": ["full_attention"] * 2}, False),
    "a window of null": ("cohere2moe", {**_COHERE, "sliding_window": None}, False),
    "a dense layer without rotation": ("cohere2moe", {**_COHERE, "prefix_dense_sliding_window_pattern": 2}, False),
    "gates by sigmoid": ("qwen4exp", {"num_hidden_layers": 4, "output_gate_type": "sigmoid"}, True),
    "gates by SiLU": ("qwen4exp", {"num_hidden_layers": 4, "hidden_act": "silu"}, False),
    "n-grams in two layers": (
        "qwen4exp",
        {"num_hidden_layers": 4, "output_gate_type": "sigmoid", "ple_layer_ids": [1, 3]},
        False,
    ),
    "an output of its own": ("bitnet", {"tie_word_embeddings": False}, False),
    "the embedding as output": ("bitnet", {"tie_word_embeddings": True}, True),
    "groups of experts": ("mistral4", {"n_group": 2}, False),
    "halves rotated": ("mistral4", {"rope_interleave": False}, False),
    "one group": ("mistral4", {"n_group": 1, "rope_interleave": True}, True),
    "two mscales of Mistral": ("mistral4", {"rope_parameters": {"mscale": 1.0, "mscale_all_dim": 0.5}}, False),
    "as MiMo is": ("mimo2", {"n_group": 1, "routed_scaling_factor": None, "topk_method": "noaux_tc"}, True),
    "scaled experts": ("mimo2", {"routed_scaling_factor": 2.5}, False),
    "weights not divided": ("mimo2", {"norm_topk_prob": False}, False),
    "wider heads with a window": ("mimo2", {"head_dim": 24, "swa_head_dim": 32}, False),
    "another share with a window": (
        "mimo2",
        {
            "rope_parameters": {
                "full_attention": {"partial_rotary_factor": 0.5},
                "sliding_attention": {"partial_rotary_factor": 0.25},
            }
        },
        False,
    ),
    "biases of PaddleOCR": ("paddleocr", {"use_bias": True}, False),
    "27B": ("gemma2", {"num_hidden_layers": 46, "head_dim": 16, "query_pre_attn_scalar": 8}, True),
}


@pytest.mark.parametrize("case", FIXED)
def test_what_the_gguf_architecture_has_fixed(case: str) -> None:
    name, config, fits = FIXED[case]
    values = {"hidden_size": 32, "num_attention_heads": 4} | config
    told = HfConfig(Path("config.json"), {"architectures": [RECIPES[name].classes[0]], **values}, {})
    assert (not list(RECIPES[name].problems(told))) == fits

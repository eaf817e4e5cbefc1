"""Tiny checkpoints of mixtures of experts with custom code, for `hf_own`, with the tensor names of that code."""

from __future__ import annotations

from tests.localllm.convert.hf_own_shapes import (
    ATTENTION,
    COMMON,
    EXPERTS,
    HEAD_NORMS,
    LLAMA,
    LLAMA3,
    MLP,
    NORMS,
    SMALL_MLP,
    TOP,
    Case,
    below,
    experts,
    own,
)

_WIDE_MLP = "mlp.shared_experts.(gate|up)_proj 48x32 mlp.shared_experts.down_proj 32x48 "
_ROUTED = "mlp.gate 4x32 " + experts("mlp.experts", SMALL_MLP)
_LING = {
    **COMMON, **EXPERTS, "head_dim": 8, "moe_intermediate_size": 24, "num_shared_experts": 2, "norm_topk_prob": True,
    "first_k_dense_replace": 1, "use_bias": False, "use_qkv_bias": False, "use_rmsnorm": True, "norm_head": False,
    "norm_softmax": False, "multi_gate": False,
}  # fmt: skip
_LING2 = {
    **_LING, "num_shared_experts": 1, "use_qk_norm": True, "score_function": "sigmoid", "n_group": 2, "topk_group": 1,
    "routed_scaling_factor": 2.5, "moe_router_enable_expert_bias": True,
}  # fmt: skip
_LING_TOP = TOP.replace("embed_tokens", "word_embeddings")
_LING_ATTENTION = NORMS + "attention.query_key_value 64x32 attention.dense 32x32 "
_LING2_ATTENTION = _LING_ATTENTION + "attention.(query|key)_layernorm 8 "
_LING2_LAYER = _LING2_ATTENTION + _ROUTED + below("mlp.shared_experts.", SMALL_MLP) + "mlp.gate.expert_bias. 4"
_LING2_DENSE = {0: _LING2_ATTENTION + below("mlp.", MLP)}
_GROK = {**COMMON, "rms_norm_eps": 1e-5, "tie_word_embeddings": None, "num_local_experts": 4, "num_experts_per_tok": 2,
         "output_multiplier_scale": 0.5773502691896257, "embedding_multiplier_scale": 5.65}  # fmt: skip
_QWEN = {**COMMON, **EXPERTS, "head_dim": 8, "rope_theta": 1e6, "mask_token_id": 9}
_QWEN_LAYER = NORMS + ATTENTION + HEAD_NORMS + "mlp.gate 4x32 " + experts("mlp.experts", MLP)
_STEP = NORMS + HEAD_NORMS + ATTENTION + "self_attn.g_proj 4x32 "

MIXTURES: dict[str, Case] = {
    "arctic": own(
        "ArcticForCausalLM",
        NORMS + ATTENTION + "residual_layernorm 32 block_sparse_moe.gate 4x32 residual_mlp.(w1|w2|w3) 32x32 "
        + experts("block_sparse_moe.experts", "(w1|w2|w3) 32x32"),
        TOP, "spm", intermediate_size=32, num_local_experts=4, num_experts_per_tok=2, parallel_attn_mlp_res=True,
        use_residual=True,
    ),
    "bailingmoe": own(
        "BailingMoeForCausalLM", _LING_ATTENTION + _ROUTED + _WIDE_MLP, _LING_TOP, base=_LING, first_k_dense_replace=0,
    ),
    "bailingmoe2": own(
        "BailingMoeV2ForCausalLM", _LING2_LAYER, _LING_TOP, base=_LING2, others=_LING2_DENSE,
        partial_rotary_factor=0.5,
    ),
    "bailingmoe2-sarvam": own("SarvamMoEForCausalLM", _LING2_LAYER, _LING_TOP, base=_LING2, others=_LING2_DENSE),
    "deepseek": own(
        "DeepseekForCausalLM", NORMS + ATTENTION + _ROUTED + _WIDE_MLP, TOP, "deepseek-llm", others={0: LLAMA},
        moe_intermediate_size=24, n_routed_experts=4, n_shared_experts=2, num_experts_per_tok=2,
        first_k_dense_replace=1, norm_topk_prob=False, scoring_func="softmax", moe_layer_freq=1, attention_bias=False,
    ),
    # Experts come first: llama.cpp's converter stacks them when it reaches another tensor of the layer.
    "grok": own(
        "GrokForCausalLM",
        experts("moe", "(linear|linear_v) 48x32 linear_1 32x48") + "(rms_norm|rms_norm_1|rms_norm_2|rms_norm_3) 32 "
        "router 4x32 multi_head_attention.(query|linear) 32x32 multi_head_attention.(key|value) 16x32",
        "transformer.in_out_embed Vx32 transformer.rms_norm 32", "spm", prefix="transformer.decoder_layer.{}.",
        base=_GROK, attn_output_multiplier=0.35, hidden_act="gelu", rope_theta=10000.0,
    ),
    "grok-2": own(
        "Grok1ForCausalLM",
        experts("block_sparse_moe.experts", "(w1|w3) 24x32 w2 32x24") + "(pre|post)_(attn|moe)_norm 32 "
        "block_sparse_moe.gate 4x32 " + ATTENTION + below("mlp.", MLP),
        base=_GROK, hidden_act=None, head_dim=8, moe_intermediate_size=24, residual_moe=True, rope_theta=50000.0,
        final_logit_softcapping=50, attn_logit_softcapping=20.0, router_logit_softcapping=25.0,
        attn_temperature_len=1024, sliding_window_size=-1, global_attn_every_n=1, rope_type="yarn",
        original_max_position_embeddings=64, scaling_factor=4.0, extrapolation_factor=0.75, attn_factor=1.0,
        beta_fast=8, beta_slow=2,
    ),
    "grovemoe": own(
        "GroveMoeForCausalLM",
        "(input|post_attention)_layernorm 64 self_attn.(q|o)_proj 64x64 self_attn.(k|v)_proj 32x64 "
        "self_attn.(q|k)_norm 16 mlp.gate 4x64 mlp.expert_bias. 4 "
        + experts("mlp.experts", "(gate|up)_proj 48x64 down_proj 64x48")
        + "mlp.chunk_experts.(0|1).(gate|up)_proj 16x64 mlp.chunk_experts.(0|1).down_proj 64x16",
        TOP.replace("32", "64"), model_type="grove_moe", **EXPERTS, hidden_size=64, head_dim=16, intermediate_size=96,
        moe_intermediate_size=48, norm_topk_prob=True, rope_theta=1e6, decoder_sparse_step=1, mlp_only_layers=[],
        attention_bias=False,
    ),
    "llada-moe": own(
        "LLaDAMoEModelLM", _QWEN_LAYER, base=_QWEN, model_type="llada", rope_theta=50000.0,
        expert_intermediate_size=48,
    ),
    "maple": own(
        "MapleForCausalLM", NORMS + ATTENTION + HEAD_NORMS + _ROUTED, **EXPERTS, head_dim=8, moe_intermediate_size=24,
        norm_topk_prob=True, nope_on_global_attention=True, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "rnd1": own("RND1", _QWEN_LAYER, base=_QWEN, moe_intermediate_size=48, norm_topk_prob=True),
    "smallthinker": own(
        "SmallThinkerForCausalLM",
        NORMS + ATTENTION + "block_sparse_moe.primary_router 4x32 "
        + experts("block_sparse_moe.experts", SMALL_MLP.replace("_proj", "")),
        intermediate_size=None, head_dim=8, num_hidden_layers=5, moe_ffn_hidden_size=24, moe_num_primary_experts=4,
        moe_num_active_primary_experts=2, moe_primary_router_apply_softmax=False, moe_enable_early_router=True,
        norm_topk_prob=True, sliding_window_size=8, sliding_window_layout=[0, 1, 1, 1, 0], rope_layout=[0, 1, 1, 1, 0],
    ),
    "step35-program": own(
        "Step3p5ForCausalLM",
        NORMS + HEAD_NORMS + "self_attn.q_proj 48x32 self_attn.(k|v)_proj 16x32 self_attn.o_proj 32x48 "
        "self_attn.g_proj 6x32 moe.gate 4x32 moe.router_bias. 4 moe.(gate|up)_proj 4x24x32 moe.down_proj 4x32x24 "
        + below("share_expert.", SMALL_MLP),
        others={0: _STEP + below("mlp.", MLP)},
        hidden_act=None, head_dim=8, num_key_value_heads=None, num_attention_groups=2,
        attention_other_setting={"num_attention_heads": 6, "num_attention_groups": 2},
        layer_types=["full_attention", "sliding_attention", "sliding_attention"], sliding_window=8,
        rope_theta=[5e6, 1e4, 1e4], partial_rotary_factors=[0.5, 1.0, 1.0], num_nextn_predict_layers=0,
        rope_scaling={**LLAMA3, "factor": 2.0, "high_freq_factor": 32.0, "original_max_position_embeddings": 64},
        num_hidden_layers=3, moe_layers_enum="1,2", moe_num_experts=4, moe_top_k=2, moe_intermediate_size=24,
        share_expert_dim=24, moe_router_scaling_factor=3.0, norm_expert_weight=True, moe_router_activation="sigmoid",
        use_head_wise_attn_gate=True, zero_centered=True, swiglu_limits=[0.0, 0.0, 7.0],
        swiglu_limits_shared=[0.0, 0.0, 16.0],
    ),
}  # fmt: skip

"""Tiny checkpoints of models with custom code and non-uniform layers: Jina 2, DeciLM, PLaMo 2 and 3, Spark, Step."""

from __future__ import annotations

from tests.localllm.convert.hf_programs import (
    ATTENTION,
    COMMON,
    FFN,
    FUSED,
    HEAD,
    HEAD_NORMS,
    HEADS,
    KV,
    LAYERS,
    MLP,
    NORMS,
    QUERIES,
    SMALL_MLP,
    TOKENS,
    TOP,
    WIDTH,
    Case,
    Shapes,
    below,
    case,
)  # fmt: skip
from tests.localllm.convert.hf_tokenizers import VOCABULARY

_STEP_ATTENTION: Shapes = {
    **NORMS, **HEAD_NORMS, **ATTENTION, "self_attn.g_proj": [HEADS, WIDTH],
}  # fmt: skip
_STEP_WIDE: Shapes = {
    **_STEP_ATTENTION, "self_attn.q_proj": [6 * HEAD, WIDTH], "self_attn.o_proj": [WIDTH, 6 * HEAD],
    "self_attn.g_proj": [6, WIDTH], "moe.gate": [4, WIDTH], "moe.router_bias.": [4],
    **{f"moe.{x}": [4, *shape] for x, shape in SMALL_MLP.items()}, **below("share_expert.", SMALL_MLP),
}  # fmt: skip
_PLAMO_NORMS: Shapes = {
    x: [WIDTH] for x in ("pre_mixer_norm", "post_mixer_norm", "pre_mlp_norm", "post_mlp_norm")
}  # fmt: skip
_PLAMO_MLP: Shapes = {"mlp.gate_up_proj": [2 * FFN, WIDTH], "mlp.down_proj": [WIDTH, FFN]}
_PLAMO_MIXER: Shapes = {"mixer.qkv_proj": [FUSED, WIDTH], "mixer.o_proj": [WIDTH, WIDTH]}
_MAMBA: Shapes = {  # 2 heads
    "mixer.in_proj": [4 * HEAD, WIDTH], "mixer.conv1d": [2 * HEAD, 1, 4], "mixer.bcdt_proj": [64 + 2 * 16, 2 * HEAD],
    "mixer.dt_proj": [2, 64], "mixer.dt_bias.": [2], "mixer.A_log.": [2], "mixer.D.": [2],
    "mixer.dt_norm_weight.": [64], "mixer.B_norm_weight.": [16], "mixer.C_norm_weight.": [16],
    "mixer.out_proj": [WIDTH, 2 * HEAD],
}  # fmt: skip
_DECI_BLOCKS = [
    {"attention": {"n_heads_in_group": n, "replace_with_linear": False}, "ffn": {"ffn_mult": x}}
    for n, x in ((2, 2.0), (4, 13.0))
]  # fmt: skip

_JINA = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": FFN, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "max_position_embeddings": 256, "layer_norm_eps": 1e-12, "hidden_act": "gelu",
    "position_embedding_type": "alibi", "feed_forward_type": "geglu", "type_vocab_size": 2, "pad_token_id": 0,
}  # fmt: skip
_JINA_TOP: Shapes = {
    "embeddings.word_embeddings": [VOCABULARY, WIDTH], "embeddings.token_type_embeddings": [2, WIDTH],
    "embeddings.LayerNorm": [WIDTH], "pooler.dense": [WIDTH, WIDTH],
}  # fmt: skip
_JINA_BIASES = (
    *(f"attention.self.{x}" for x in ("query", "key", "value")), "attention.output.dense", "attention.output.LayerNorm",
)  # fmt: skip
_JINA_LAYER: Shapes = {x: [WIDTH] if "Norm" in x else [WIDTH, WIDTH] for x in _JINA_BIASES}


def _deci(keys: int, ffn: int) -> Shapes:
    kv: Shapes = {f"self_attn.{x}_proj": [keys * HEAD, WIDTH] for x in "kv"}
    return {
        **NORMS, **QUERIES, **kv, "mlp.gate_proj": [ffn, WIDTH], "mlp.up_proj": [ffn, WIDTH],
        "mlp.down_proj": [WIDTH, ffn],
    }  # fmt: skip


NEWER: dict[str, Case] = {
    "jina-bert-v2": case(
        "JinaBertForMaskedLM", _JINA, below("bert.", _JINA_TOP), {**_JINA_LAYER, "mlp.gated_layers": [2 * FFN, WIDTH],
                                                                  "mlp.wo": [WIDTH, FFN], "mlp.layernorm": [WIDTH]},
        ("bert.embeddings.LayerNorm", *_JINA_BIASES, "mlp.wo", "mlp.layernorm"), "bert.encoder.layer.{}.", "wordpiece",
    ),
    "jina-bert-v2-code": case(
        "JinaBertModel", _JINA, _JINA_TOP,
        {**_JINA_LAYER, "mlp.up_gated_layer": [2 * FFN, WIDTH], "mlp.down_layer": [WIDTH, FFN],
         "layer_norm_1": [WIDTH], "layer_norm_2": [WIDTH], "attention.self.layer_norm_q": [WIDTH],
         "attention.self.layer_norm_k": [WIDTH]},
        ("embeddings.LayerNorm", *_JINA_BIASES, "mlp.up_gated_layer", "mlp.down_layer", "layer_norm_1", "layer_norm_2",
         "attention.self.layer_norm_q", "attention.self.layer_norm_k"), "encoder.layer.{}.", "wordpiece",
    ),
    "deci": case(
        "DeciLMForCausalLM", {**COMMON, **TOKENS, "num_key_value_heads_per_layer": [1, 2]}, TOP, _deci(2, FFN),
        first=_deci(1, FFN),
    ),
    "deci-blocks": case(
        "DeciLMForCausalLM",
        {**COMMON, **TOKENS, "intermediate_size": None, "block_configs": _DECI_BLOCKS, "num_key_value_heads": None,
         "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 32}},
        TOP, _deci(1, 512), first=_deci(2, 256),
    ),
    "nanbeige": case(
        "NanbeigeForCausalLM", {**COMMON, **TOKENS, "num_loops": 2, "skip_loop_final_norm": True}, TOP,
        {**NORMS, **ATTENTION, **below("mlp.", MLP)},
    ),
    "plamo2": case(
        "Plamo2ForCausalLM",
        {**COMMON, **TOKENS, "num_hidden_layers": 3, "hidden_size_per_head": HEAD, "mamba_num_heads": 2,
         "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_step": 3, "attention_window_size": 256,
         "full_attention_idx": []},
        TOP, {**_PLAMO_NORMS, **_PLAMO_MLP, **_MAMBA}, prefix="model.layers.layers.{}.", tokenizer="plamo", layers=3,
        others={1: {**_PLAMO_NORMS, **_PLAMO_MLP, **_PLAMO_MIXER, "mixer.q_weight.": [HEADS, HEAD],
                    "mixer.k_weight.": [KV, HEAD]}},
    ),
    "plamo3": case(
        "Plamo3ForCausalLM",
        {**COMMON, **TOKENS, "head_dim": HEAD, "window_size": 8, "sliding_window_pattern": 2,
         "rope_local_theta": 10000},
        TOP, {**_PLAMO_NORMS, **_PLAMO_MLP, **_PLAMO_MIXER, "mixer.q_norm": [HEAD], "mixer.k_norm": [HEAD]},
        prefix="model.layers.layers.{}.", tokenizer="plamo",
    ),
    "spark2_5": case(
        "Spark2_5ForCausalLM",
        {**COMMON, **TOKENS, "hidden_act": "gelu", "head_dim": HEAD, "sliding_window": 8,
         "layer_types": ["sliding_attention", "full_attention"], "gate_attn_act_mode": "sigmoid",
         "headwise_attn_output_gate": True,
         "rope_parameters": {
             "full_attention": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
             "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}},
        TOP,
        {**NORMS, "self_attn.q_k_v_proj": [FUSED, WIDTH], "self_attn.g_proj": [HEADS, WIDTH],
         "self_attn.o_proj": [WIDTH, WIDTH], **below("mlp.", MLP)},
    ),
    "step35-program": case(
        "Step3p5ForCausalLM",
        {**COMMON, **TOKENS, "hidden_act": None, "head_dim": HEAD, "num_key_value_heads": None,
         "num_attention_groups": KV, "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": KV},
         "layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "sliding_window": 8,
         "rope_theta": [5e6, 1e4, 1e4], "partial_rotary_factors": [0.5, 1.0, 1.0], "num_nextn_predict_layers": 0,
         "rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0,
                          "original_max_position_embeddings": 64},
         "num_hidden_layers": 3, "moe_layers_enum": "1,2", "moe_num_experts": 4, "moe_top_k": 2,
         "moe_intermediate_size": 24, "share_expert_dim": 24, "moe_router_scaling_factor": 3.0,
         "norm_expert_weight": True, "moe_router_activation": "sigmoid", "use_head_wise_attn_gate": True,
         "zero_centered": True, "swiglu_limits": [0.0, 0.0, 7.0], "swiglu_limits_shared": [0.0, 0.0, 16.0]},
        TOP, _STEP_WIDE, layers=3, first={**_STEP_ATTENTION, **below("mlp.", MLP)},
    ),
}  # fmt: skip

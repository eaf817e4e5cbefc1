"""Tiny folders of models with programs of their own, in the words of these programs; `hf_own` writes them."""

from __future__ import annotations

from typing import Any

from tests.localllm.convert.hf_tokenizers import VOCABULARY

Shapes = dict[str, list[int]]
Case = tuple[dict[str, Any], list[Any], str]
WIDTH, HEADS, KV, HEAD, FFN, LAYERS = 32, 4, 2, 8, 48, 2
_COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": FFN, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
    "rope_theta": 50000.0, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_GPT = {
    "vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 256,
    "layer_norm_epsilon": 1e-5, "scale_attn_weights": True,
}  # fmt: skip
_TOP: Shapes = {"model.embed_tokens": [VOCABULARY, WIDTH], "model.norm": [WIDTH], "lm_head": [VOCABULARY, WIDTH]}
_NORMS: Shapes = {"input_layernorm": [WIDTH], "post_attention_layernorm": [WIDTH]}
_Q: Shapes = {"self_attn.q_proj": [HEADS * HEAD, WIDTH], "self_attn.o_proj": [WIDTH, HEADS * HEAD]}
_ATTENTION: Shapes = {
    **_Q, "self_attn.k_proj": [KV * HEAD, WIDTH], "self_attn.v_proj": [KV * HEAD, WIDTH],
}  # fmt: skip
_ALL_HEADS: Shapes = {**_ATTENTION, "self_attn.k_proj": [WIDTH, WIDTH], "self_attn.v_proj": [WIDTH, WIDTH]}
_HEAD_NORMS: Shapes = {"self_attn.q_norm": [HEAD], "self_attn.k_norm": [HEAD]}
_MLP: Shapes = {"gate_proj": [FFN, WIDTH], "up_proj": [FFN, WIDTH], "down_proj": [WIDTH, FFN]}
_W123: Shapes = {"w1": [FFN, WIDTH], "w3": [FFN, WIDTH], "w2": [WIDTH, FFN]}
_GPT_TOP: Shapes = {
    "transformer.wte": [VOCABULARY, WIDTH], "transformer.ln_f": [WIDTH], "lm_head": [VOCABULARY, WIDTH],
}  # fmt: skip
_LN: Shapes = {"ln_1": [WIDTH], "ln_2": [WIDTH]}
_H = "transformer.h.{}."
_FUSED = (HEADS + 2 * KV) * HEAD


def _below(prefix: str, shapes: Shapes) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}


def _experts(prefix: str, shapes: Shapes) -> Shapes:
    return {f"{prefix}.{i}.{name}": shape for i in range(4) for name, shape in shapes.items()}


def _weights(shapes: Shapes, prefix: str = "", suffix: str = ".weight") -> list[Any]:
    """Return tensors with the base of their values; a name with a dot at its end is whole."""
    return [
        (prefix + (name[:-1] if name.endswith(".") else name + suffix), shape, float("norm" in name))
        for name, shape in shapes.items()
    ]


def _case(
    of_class: str, config: dict[str, Any], top: Shapes, layer: Shapes, biases: tuple[str, ...] = (),
    prefix: str = "model.layers.{}.", tokenizer: str = "qwen2", layers: int = LAYERS, first: Shapes | None = None,
    others: dict[int, Shapes] | None = None,
) -> Case:  # fmt: skip
    """Return a case. `first` are tensors of layer 0, `others` of any, if they differ; `biases` name what has one."""
    tensors = _weights(top) + _weights({x: top[x][-1:] for x in biases if x in top}, "", ".bias")
    for n in range(layers):
        own = first if first is not None and n == 0 else (others or {}).get(n, layer)
        tensors += _weights(own, prefix.format(n))
        tensors += _weights({x: own[x][-2:-1] or own[x] for x in biases if x in own}, prefix.format(n), ".bias")
    return {"architectures": [of_class], "model_type": of_class.lower(), **config}, tensors, tokenizer


_LING = {
    **_COMMON, **_TOKENS, "head_dim": HEAD, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2,
    "num_shared_experts": 2, "norm_topk_prob": True, "first_k_dense_replace": 1, "use_bias": False,
    "use_qkv_bias": False, "use_rmsnorm": True, "norm_head": False, "norm_softmax": False, "multi_gate": False,
}  # fmt: skip
_LING_TOP: Shapes = {"model.word_embeddings": [VOCABULARY, WIDTH], **_TOP}
del _LING_TOP["model.embed_tokens"]
_SMALL_MLP: Shapes = {"gate_proj": [24, WIDTH], "up_proj": [24, WIDTH], "down_proj": [WIDTH, 24]}
_LING_ATTENTION: Shapes = {
    **_NORMS, "attention.query_key_value": [_FUSED, WIDTH], "attention.dense": [WIDTH, HEADS * HEAD],
}  # fmt: skip
_LING_DENSE: Shapes = {**_LING_ATTENTION, **_below("mlp.", _MLP)}
_LING_SPARSE: Shapes = {
    **_LING_ATTENTION, "mlp.gate": [4, WIDTH], **_experts("mlp.experts", _SMALL_MLP),
    **{f"mlp.shared_experts.{name}": [2 * n if n == 24 else n for n in shape] for name, shape in _SMALL_MLP.items()},
}  # fmt: skip
_LING2: Shapes = {"attention.query_layernorm": [HEAD], "attention.key_layernorm": [HEAD]}
_LING2_CONFIG = {
    **_LING, "use_qk_norm": True, "score_function": "sigmoid", "n_group": 2, "topk_group": 1,
    "routed_scaling_factor": 2.5, "moe_router_enable_expert_bias": True,
}  # fmt: skip
_LING2_SPARSE: Shapes = {**_LING_SPARSE, **_LING2, "mlp.gate.expert_bias.": [4]}

_STEP_ATTENTION: Shapes = {
    **_NORMS, **_HEAD_NORMS, **_ATTENTION, "self_attn.g_proj": [HEADS, WIDTH],
}  # fmt: skip
_STEP_WIDE: Shapes = {
    **_STEP_ATTENTION, "self_attn.q_proj": [6 * HEAD, WIDTH], "self_attn.o_proj": [WIDTH, 6 * HEAD],
    "self_attn.g_proj": [6, WIDTH], "moe.gate": [4, WIDTH], "moe.router_bias.": [4],
    **{f"moe.{x}": [4, *shape] for x, shape in _SMALL_MLP.items()}, **_below("share_expert.", _SMALL_MLP),
}  # fmt: skip
_PLAMO_NORMS: Shapes = {
    x: [WIDTH] for x in ("pre_mixer_norm", "post_mixer_norm", "pre_mlp_norm", "post_mlp_norm")
}  # fmt: skip
_PLAMO_MLP: Shapes = {"mlp.gate_up_proj": [2 * FFN, WIDTH], "mlp.down_proj": [WIDTH, FFN]}
_PLAMO_MIXER: Shapes = {"mixer.qkv_proj": [_FUSED, WIDTH], "mixer.o_proj": [WIDTH, WIDTH]}
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


def _deci(keys: int, ffn: int) -> Shapes:
    kv: Shapes = {f"self_attn.{x}_proj": [keys * HEAD, WIDTH] for x in "kv"}
    return {
        **_NORMS, **_Q, **kv, "mlp.gate_proj": [ffn, WIDTH], "mlp.up_proj": [ffn, WIDTH], "mlp.down_proj": [WIDTH, ffn],
    }  # fmt: skip


PROGRAMS: dict[str, Case] = {
    "arctic": _case(
        "ArcticForCausalLM",
        {**_COMMON, **_TOKENS, "intermediate_size": WIDTH, "num_local_experts": 4, "num_experts_per_tok": 2,
         "parallel_attn_mlp_res": True, "use_residual": True},
        _TOP,
        {**_NORMS, **_ATTENTION, "residual_layernorm": [WIDTH], "block_sparse_moe.gate": [4, WIDTH],
         **{f"residual_mlp.{x}": [WIDTH, WIDTH] for x in ("w1", "w2", "w3")},
         **_experts("block_sparse_moe.experts", {x: [WIDTH, WIDTH] for x in ("w1", "w2", "w3")})},
        tokenizer="spm",
    ),
    "baichuan": _case(
        "BaichuanForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 32,
         "num_attention_heads": 2, "model_max_length": 256, "rms_norm_eps": 1e-6, "hidden_act": "silu", **_TOKENS},
        {"model.embed_tokens": [VOCABULARY, 16], "model.norm": [16], "lm_head": [VOCABULARY, 16]},
        {"input_layernorm": [16], "post_attention_layernorm": [16], "self_attn.W_pack": [48, 16],
         "self_attn.o_proj": [16, 16], "mlp.gate_proj": [24, 16], "mlp.up_proj": [24, 16], "mlp.down_proj": [16, 24]},
        tokenizer="spm", layers=32,
    ),
    "bailingmoe": _case(
        "BailingMoeForCausalLM", {**_LING, "first_k_dense_replace": 0}, _LING_TOP, _LING_SPARSE,
    ),
    "bailingmoe2": _case(
        "BailingMoeV2ForCausalLM", {**_LING2_CONFIG, "partial_rotary_factor": 0.5}, _LING_TOP, _LING2_SPARSE,
        first={**_LING_DENSE, **_LING2},
    ),
    "bailingmoe2-sarvam": _case(
        "SarvamMoEForCausalLM", _LING2_CONFIG, _LING_TOP, _LING2_SPARSE, first={**_LING_DENSE, **_LING2},
    ),
    "chatglm": _case(
        "ChatGLMModel",
        {"vocab_size": VOCABULARY, "padded_vocab_size": VOCABULARY, "hidden_size": WIDTH, "ffn_hidden_size": FFN,
         "num_layers": LAYERS, "num_attention_heads": HEADS, "kv_channels": HEAD, "multi_query_attention": True,
         "multi_query_group_num": KV, "seq_length": 256, "layernorm_epsilon": 1.5625e-07, "rope_ratio": 500,
         "rmsnorm": True, "post_layer_norm": True, "add_bias_linear": False, "add_qkv_bias": True,
         "apply_residual_connection_post_layernorm": False, "original_rope": True, "eos_token_id": [2, 5],
         "pad_token_id": 0},
        {"transformer.embedding.word_embeddings": [VOCABULARY, WIDTH],
         "transformer.encoder.final_layernorm": [WIDTH], "transformer.output_layer": [VOCABULARY, WIDTH],
         "transformer.rotary_pos_emb.inv_freq.": [2]},
        {**_NORMS, "self_attention.query_key_value": [_FUSED, WIDTH], "self_attention.dense": [WIDTH, WIDTH],
         "mlp.dense_h_to_4h": [2 * FFN, WIDTH], "mlp.dense_4h_to_h": [WIDTH, FFN]},
        ("self_attention.query_key_value",), "transformer.encoder.layers.{}.", "llama3",
    ),
    "codeshell": _case(
        "CodeShellForCausalLM",
        {**_GPT, **_TOKENS, "n_inner": None, "num_query_groups": KV, "position_embedding_type": "rope",
         "activation_function": "gelu_pytorch_tanh", "group_query_attention": True},
        _GPT_TOP,
        {**_LN, "attn.c_attn": [_FUSED, WIDTH], "attn.c_proj": [WIDTH, WIDTH], "mlp.c_fc": [4 * WIDTH, WIDTH],
         "mlp.c_proj": [WIDTH, 4 * WIDTH]},
        ("ln_1", "ln_2", "transformer.ln_f", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"), _H, "starcoder",
    ),
    "deepseek": _case(
        "DeepseekForCausalLM",
        {**_COMMON, **_TOKENS, "moe_intermediate_size": 24, "n_routed_experts": 4, "n_shared_experts": 2,
         "num_experts_per_tok": 2, "first_k_dense_replace": 1, "norm_topk_prob": False, "scoring_func": "softmax",
         "moe_layer_freq": 1, "attention_bias": False},
        _TOP,
        {**_NORMS, **_ATTENTION, **{x: shape for x, shape in _LING_SPARSE.items() if x.startswith("mlp")}},
        first={**_NORMS, **_ATTENTION, **_below("mlp.", _MLP)}, tokenizer="deepseek-llm",
    ),
    "exaone": _case(
        "ExaoneForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": FFN, "num_layers": LAYERS,
         "num_attention_heads": HEADS, "num_key_value_heads": KV, "max_position_embeddings": 256, **_TOKENS,
         "layer_norm_epsilon": 1e-5, "activation_function": "silu", "rope_theta": 50000.0, "head_dim": HEAD,
         "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 32}},
        _GPT_TOP,
        {**_LN, **{x.replace("self_attn.", "attn.attention.").replace("o_proj", "out_proj"): shape
                   for x, shape in _ATTENTION.items()},
         "mlp.c_fc_0": [FFN, WIDTH], "mlp.c_fc_1": [FFN, WIDTH], "mlp.c_proj": [WIDTH, FFN]},
        prefix=_H,
    ),
    "internlm2": _case(
        "InternLM2ForCausalLM", {**_COMMON, **_TOKENS, "bias": False},
        {"model.tok_embeddings": [VOCABULARY, WIDTH], "model.norm": [WIDTH], "output": [VOCABULARY, WIDTH]},
        {"attention_norm": [WIDTH], "ffn_norm": [WIDTH], "attention.wqkv": [_FUSED, WIDTH],
         "attention.wo": [WIDTH, WIDTH], **_below("feed_forward.", _W123)},
        tokenizer="spm",
    ),
    "jais": _case(
        "JAISLMHeadModel",
        {**_GPT, **_TOKENS, "n_inner": FFN, "activation_function": "swiglu", "position_embedding_type": "alibi",
         "mup_embeddings_scale": 14.6, "mup_output_alpha": 2.22, "mup_width_scale": 0.125,
         "mup_scale_qk_dot_by_d": True},
        _GPT_TOP,
        {**_LN, "attn.c_attn": [WIDTH, 3 * WIDTH], "attn.c_proj": [WIDTH, WIDTH], "mlp.c_fc": [WIDTH, FFN],
         "mlp.c_fc2": [WIDTH, FFN], "mlp.c_proj": [FFN, WIDTH]},
        ("ln_1", "ln_2", "transformer.ln_f"), _H,
    ),
    "maincoder": _case(
        "MaincoderForCausalLM", {**_COMMON, **_TOKENS, "head_dim": HEAD}, _TOP,
        {**_NORMS, **_ATTENTION, **_HEAD_NORMS, **_below("mlp.", _MLP)},
    ),
    "maple": _case(
        "MapleForCausalLM",
        {**_COMMON, **_TOKENS, "head_dim": HEAD, "moe_intermediate_size": 24, "num_experts": 4,
         "num_experts_per_tok": 2, "norm_topk_prob": True, "nope_on_global_attention": True, "sliding_window": 8,
         "layer_types": ["sliding_attention", "full_attention"]},
        _TOP,
        {**_NORMS, **_ATTENTION, **_HEAD_NORMS, "mlp.gate": [4, WIDTH], **_experts("mlp.experts", _SMALL_MLP)},
    ),
    "minicpm": _case(
        "MiniCPMForCausalLM",
        {**_COMMON, **_TOKENS, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16, "num_key_value_heads": KV,
         "tie_word_embeddings": True,
         "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.6],
                          "long_factor": [1.0, 1.5, 4.0, 9.0], "original_max_position_embeddings": 256}},
        {x: shape for x, shape in _TOP.items() if x != "lm_head"},
        {**_NORMS, **_ATTENTION, **_below("mlp.", _MLP)}, tokenizer="spm",
    ),
    "openelm": _case(
        "OpenELMForCausalLM",
        {"vocab_size": VOCABULARY, "model_dim": WIDTH, "num_transformer_layers": LAYERS, "head_dim": HEAD,
         "max_context_length": 256, "num_query_heads": [4, 6], "num_kv_heads": [2, 3], "ffn_multipliers": [0.5, 4.0],
         "ffn_dim_divisor": 16, "rope_freq_constant": 10000, "ffn_with_glu": True, "activation_fn_name": "swish",
         "normalization_layer_name": "rms_norm", "normalize_qk_projections": True, "share_input_output_layers": True,
         **_TOKENS},
        {"transformer.token_embeddings": [VOCABULARY, WIDTH], "transformer.norm": [WIDTH]},
        {"attn_norm": [WIDTH], "ffn_norm": [WIDTH], "attn.q_norm": [HEAD], "attn.k_norm": [HEAD],
         "attn.qkv_proj": [12 * HEAD, WIDTH], "attn.out_proj": [WIDTH, 6 * HEAD], "ffn.proj_1": [256, WIDTH],
         "ffn.proj_2": [WIDTH, 128]},
        prefix="transformer.layers.{}.", tokenizer="spm",
        first={"attn_norm": [WIDTH], "ffn_norm": [WIDTH], "attn.q_norm": [HEAD], "attn.k_norm": [HEAD],
               "attn.qkv_proj": [8 * HEAD, WIDTH], "attn.out_proj": [WIDTH, 4 * HEAD], "ffn.proj_1": [32, WIDTH],
               "ffn.proj_2": [WIDTH, 16]},
    ),
    "orion": _case(
        "OrionForCausalLM", {**_COMMON, **_TOKENS}, _TOP, {**_NORMS, **_ATTENTION, **_below("mlp.", _MLP)},
        ("input_layernorm", "post_attention_layernorm", "model.norm"), tokenizer="spm",
    ),
    "pangu-embedded": _case(
        "PanguEmbeddedForCausalLM", {**_COMMON, **_TOKENS, "bias": True}, _TOP,
        {**_NORMS, **_ATTENTION, **_below("mlp.", _MLP)}, tuple(_ATTENTION), tokenizer="spm",
    ),
    "plm": _case(
        "PLMForCausalLM",
        {**_COMMON, **_TOKENS, "hidden_act": "relu2", "num_key_value_heads": HEADS, "q_lora_rank": None,
         "kv_lora_rank": 16, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 12,
         "attention_bias": False, "tie_word_embeddings": True},
        {x: shape for x, shape in _TOP.items() if x != "lm_head"},
        {**_NORMS, "self_attn.q_proj": [HEADS * 18, WIDTH], "self_attn.kv_a_proj_with_mqa": [24, WIDTH],
         "self_attn.kv_a_layernorm": [16], "self_attn.kv_b_proj": [HEADS * 22, 16],
         "self_attn.o_proj": [WIDTH, HEADS * 12], "mlp.up_proj": [FFN, WIDTH], "mlp.down_proj": [WIDTH, FFN]},
    ),
    "qwen": _case(
        "QWenLMHeadModel",
        {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 2 * FFN, "num_hidden_layers": LAYERS,
         "num_attention_heads": HEADS, "kv_channels": HEAD, "layer_norm_epsilon": 1e-6, "rotary_emb_base": 10000,
         "rotary_pct": 1.0, "max_position_embeddings": 512, "seq_length": 256, "use_dynamic_ntk": True,
         "use_logn_attn": True, "no_bias": True, "scale_attn_weights": True, **_TOKENS},
        _GPT_TOP,
        {**_LN, "attn.c_attn": [3 * WIDTH, WIDTH], "attn.c_proj": [WIDTH, WIDTH], "mlp.w1": [FFN, WIDTH],
         "mlp.w2": [FFN, WIDTH], "mlp.c_proj": [WIDTH, FFN]},
        ("attn.c_attn",), _H,
    ),
    "refact": _case(
        "GPTRefactForCausalLM", {**_GPT, **_TOKENS, "multi_query": True}, _GPT_TOP,
        {**_LN, "attn.q": [WIDTH, WIDTH], "attn.kv": [2 * HEAD, WIDTH], "attn.c_proj": [WIDTH, WIDTH],
         "mlp.gate_up_proj": [512, WIDTH], "mlp.c_proj": [WIDTH, 256]},
        prefix=_H, tokenizer="starcoder",
    ),
    "smallthinker": _case(
        "SmallThinkerForCausalLM",
        {**_COMMON, **_TOKENS, "intermediate_size": None, "head_dim": HEAD, "num_hidden_layers": 5,
         "moe_ffn_hidden_size": 24, "moe_num_primary_experts": 4, "moe_num_active_primary_experts": 2,
         "moe_primary_router_apply_softmax": False, "moe_enable_early_router": True, "norm_topk_prob": True,
         "sliding_window_size": 8, "sliding_window_layout": [0, 1, 1, 1, 0], "rope_layout": [0, 1, 1, 1, 0]},
        _TOP,
        {**_NORMS, **_ATTENTION, "block_sparse_moe.primary_router": [4, WIDTH],
         **_experts("block_sparse_moe.experts", {x[:-5]: shape for x, shape in _SMALL_MLP.items()})},
        layers=5,
    ),
    "xverse": _case(
        "XverseForCausalLM", {**_COMMON, **_TOKENS, "num_key_value_heads": None}, _TOP,
        {**_NORMS, **_ALL_HEADS, **_below("mlp.", _MLP)}, tokenizer="spm",
    ),
    "deci": _case(
        "DeciLMForCausalLM", {**_COMMON, **_TOKENS, "num_key_value_heads_per_layer": [1, 2]}, _TOP, _deci(2, FFN),
        first=_deci(1, FFN),
    ),
    "deci-blocks": _case(
        "DeciLMForCausalLM",
        {**_COMMON, **_TOKENS, "intermediate_size": None, "block_configs": _DECI_BLOCKS, "num_key_value_heads": None,
         "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 32}},
        _TOP, _deci(1, 512), first=_deci(2, 256),
    ),
    "plamo2": _case(
        "Plamo2ForCausalLM",
        {**_COMMON, **_TOKENS, "num_hidden_layers": 3, "hidden_size_per_head": HEAD, "mamba_num_heads": 2,
         "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_step": 3, "attention_window_size": 256,
         "full_attention_idx": []},
        _TOP, {**_PLAMO_NORMS, **_PLAMO_MLP, **_MAMBA}, prefix="model.layers.layers.{}.", tokenizer="plamo", layers=3,
        others={1: {**_PLAMO_NORMS, **_PLAMO_MLP, **_PLAMO_MIXER, "mixer.q_weight.": [HEADS, HEAD],
                    "mixer.k_weight.": [KV, HEAD]}},
    ),
    "plamo3": _case(
        "Plamo3ForCausalLM",
        {**_COMMON, **_TOKENS, "head_dim": HEAD, "window_size": 8, "sliding_window_pattern": 2,
         "rope_local_theta": 10000},
        _TOP, {**_PLAMO_NORMS, **_PLAMO_MLP, **_PLAMO_MIXER, "mixer.q_norm": [HEAD], "mixer.k_norm": [HEAD]},
        prefix="model.layers.layers.{}.", tokenizer="plamo",
    ),
    "spark2_5": _case(
        "Spark2_5ForCausalLM",
        {**_COMMON, **_TOKENS, "hidden_act": "gelu", "head_dim": HEAD, "sliding_window": 8,
         "layer_types": ["sliding_attention", "full_attention"], "gate_attn_act_mode": "sigmoid",
         "headwise_attn_output_gate": True,
         "rope_parameters": {
             "full_attention": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
             "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}},
        _TOP,
        {**_NORMS, "self_attn.q_k_v_proj": [_FUSED, WIDTH], "self_attn.g_proj": [HEADS, WIDTH],
         "self_attn.o_proj": [WIDTH, WIDTH], **_below("mlp.", _MLP)},
    ),
    "step35-program": _case(
        "Step3p5ForCausalLM",
        {**_COMMON, **_TOKENS, "hidden_act": None, "head_dim": HEAD, "num_key_value_heads": None,
         "num_attention_groups": KV, "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": KV},
         "layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "sliding_window": 8,
         "rope_theta": [5e6, 1e4, 1e4], "partial_rotary_factors": [0.5, 1.0, 1.0], "num_nextn_predict_layers": 0,
         "rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0,
                          "original_max_position_embeddings": 64},
         "num_hidden_layers": 3, "moe_layers_enum": "1,2", "moe_num_experts": 4, "moe_top_k": 2,
         "moe_intermediate_size": 24, "share_expert_dim": 24, "moe_router_scaling_factor": 3.0,
         "norm_expert_weight": True, "moe_router_activation": "sigmoid", "use_head_wise_attn_gate": True,
         "zero_centered": True, "swiglu_limits": [0.0, 0.0, 7.0], "swiglu_limits_shared": [0.0, 0.0, 16.0]},
        _TOP, _STEP_WIDE, layers=3, first={**_STEP_ATTENTION, **_below("mlp.", _MLP)},
    ),
}  # fmt: skip

"""Tiny checkpoints of models with custom code, for `hf_own`, with the tensor names of that code.

`hf_programs_newer` holds the models whose layers differ.
"""

from __future__ import annotations

from typing import Any

from tests.localllm.convert.hf_tokenizers import VOCABULARY

Shapes = dict[str, list[int]]
Case = tuple[dict[str, Any], list[Any], str]
WIDTH, HEADS, KV, HEAD, FFN, LAYERS = 32, 4, 2, 8, 48, 2
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": FFN, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
    "rope_theta": 50000.0, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_GPT = {
    "vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 256,
    "layer_norm_epsilon": 1e-5, "scale_attn_weights": True,
}  # fmt: skip
TOP: Shapes = {"model.embed_tokens": [VOCABULARY, WIDTH], "model.norm": [WIDTH], "lm_head": [VOCABULARY, WIDTH]}
NORMS: Shapes = {"input_layernorm": [WIDTH], "post_attention_layernorm": [WIDTH]}
QUERIES: Shapes = {"self_attn.q_proj": [HEADS * HEAD, WIDTH], "self_attn.o_proj": [WIDTH, HEADS * HEAD]}
ATTENTION: Shapes = {
    **QUERIES, "self_attn.k_proj": [KV * HEAD, WIDTH], "self_attn.v_proj": [KV * HEAD, WIDTH],
}  # fmt: skip
_ALL_HEADS: Shapes = {**ATTENTION, "self_attn.k_proj": [WIDTH, WIDTH], "self_attn.v_proj": [WIDTH, WIDTH]}
HEAD_NORMS: Shapes = {"self_attn.q_norm": [HEAD], "self_attn.k_norm": [HEAD]}
MLP: Shapes = {"gate_proj": [FFN, WIDTH], "up_proj": [FFN, WIDTH], "down_proj": [WIDTH, FFN]}
_W123: Shapes = {"w1": [FFN, WIDTH], "w3": [FFN, WIDTH], "w2": [WIDTH, FFN]}
_GPT_TOP: Shapes = {
    "transformer.wte": [VOCABULARY, WIDTH], "transformer.ln_f": [WIDTH], "lm_head": [VOCABULARY, WIDTH],
}  # fmt: skip
_LN: Shapes = {"ln_1": [WIDTH], "ln_2": [WIDTH]}
_H = "transformer.h.{}."
FUSED = (HEADS + 2 * KV) * HEAD


def below(prefix: str, shapes: Shapes) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}


def _experts(prefix: str, shapes: Shapes) -> Shapes:
    return {f"{prefix}.{i}.{name}": shape for i in range(4) for name, shape in shapes.items()}


def _weights(shapes: Shapes, prefix: str = "", suffix: str = ".weight") -> list[Any]:
    """Return (name, shape, mean of the random values) of each tensor. A name that ends with a dot gets no suffix."""
    return [
        (prefix + (name[:-1] if name.endswith(".") else name + suffix), shape, float("norm" in name))
        for name, shape in shapes.items()
    ]


def case(
    of_class: str, config: dict[str, Any], top: Shapes, layer: Shapes, biases: tuple[str, ...] = (),
    prefix: str = "model.layers.{}.", tokenizer: str = "qwen2", layers: int = LAYERS, first: Shapes | None = None,
    others: dict[int, Shapes] | None = None,
) -> Case:  # fmt: skip
    """Return config.json, the tensors, and the tokenizer.

    `first` replaces the tensors of layer 0, and `others` replaces them for other layers. `biases` names the matrices
    with a bias.
    """
    tensors = _weights(top) + _weights({x: top[x][-1:] for x in biases if x in top}, "", ".bias")
    for n in range(layers):
        own = first if first is not None and n == 0 else (others or {}).get(n, layer)
        tensors += _weights(own, prefix.format(n))
        tensors += _weights({x: own[x][-2:-1] or own[x] for x in biases if x in own}, prefix.format(n), ".bias")
    return {"architectures": [of_class], "model_type": of_class.lower(), **config}, tensors, tokenizer


_LING = {
    **COMMON, **TOKENS, "head_dim": HEAD, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2,
    "num_shared_experts": 2, "norm_topk_prob": True, "first_k_dense_replace": 1, "use_bias": False,
    "use_qkv_bias": False, "use_rmsnorm": True, "norm_head": False, "norm_softmax": False, "multi_gate": False,
}  # fmt: skip
_LING_TOP: Shapes = {"model.word_embeddings": [VOCABULARY, WIDTH], **TOP}
del _LING_TOP["model.embed_tokens"]
SMALL_MLP: Shapes = {"gate_proj": [24, WIDTH], "up_proj": [24, WIDTH], "down_proj": [WIDTH, 24]}
_LING_ATTENTION: Shapes = {
    **NORMS, "attention.query_key_value": [FUSED, WIDTH], "attention.dense": [WIDTH, HEADS * HEAD],
}  # fmt: skip
_LING_DENSE: Shapes = {**_LING_ATTENTION, **below("mlp.", MLP)}
_LING_SPARSE: Shapes = {
    **_LING_ATTENTION, "mlp.gate": [4, WIDTH], **_experts("mlp.experts", SMALL_MLP),
    **{f"mlp.shared_experts.{name}": [2 * n if n == 24 else n for n in shape] for name, shape in SMALL_MLP.items()},
}  # fmt: skip
_LING2: Shapes = {"attention.query_layernorm": [HEAD], "attention.key_layernorm": [HEAD]}
_LING2_CONFIG = {
    **_LING, "num_shared_experts": 1, "use_qk_norm": True, "score_function": "sigmoid", "n_group": 2, "topk_group": 1,
    "routed_scaling_factor": 2.5, "moe_router_enable_expert_bias": True,
}  # fmt: skip
_LING2_SPARSE: Shapes = {
    **_LING_SPARSE,
    **_LING2,
    **below("mlp.shared_experts.", SMALL_MLP),
    "mlp.gate.expert_bias.": [4],
}

PROGRAMS: dict[str, Case] = {
    "arctic": case(
        "ArcticForCausalLM",
        {**COMMON, **TOKENS, "intermediate_size": WIDTH, "num_local_experts": 4, "num_experts_per_tok": 2,
         "parallel_attn_mlp_res": True, "use_residual": True},
        TOP,
        {**NORMS, **ATTENTION, "residual_layernorm": [WIDTH], "block_sparse_moe.gate": [4, WIDTH],
         **{f"residual_mlp.{x}": [WIDTH, WIDTH] for x in ("w1", "w2", "w3")},
         **_experts("block_sparse_moe.experts", {x: [WIDTH, WIDTH] for x in ("w1", "w2", "w3")})},
        tokenizer="spm",
    ),
    "baichuan": case(
        "BaichuanForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 32,
         "num_attention_heads": 2, "model_max_length": 256, "rms_norm_eps": 1e-6, "hidden_act": "silu", **TOKENS},
        {"model.embed_tokens": [VOCABULARY, 16], "model.norm": [16], "lm_head": [VOCABULARY, 16]},
        {"input_layernorm": [16], "post_attention_layernorm": [16], "self_attn.W_pack": [48, 16],
         "self_attn.o_proj": [16, 16], "mlp.gate_proj": [24, 16], "mlp.up_proj": [24, 16], "mlp.down_proj": [16, 24]},
        tokenizer="spm", layers=32,
    ),
    "bailingmoe": case(
        "BailingMoeForCausalLM", {**_LING, "first_k_dense_replace": 0}, _LING_TOP, _LING_SPARSE,
    ),
    "bailingmoe2": case(
        "BailingMoeV2ForCausalLM", {**_LING2_CONFIG, "partial_rotary_factor": 0.5}, _LING_TOP, _LING2_SPARSE,
        first={**_LING_DENSE, **_LING2},
    ),
    "bailingmoe2-sarvam": case(
        "SarvamMoEForCausalLM", _LING2_CONFIG, _LING_TOP, _LING2_SPARSE, first={**_LING_DENSE, **_LING2},
    ),
    "chatglm": case(
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
        {**NORMS, "self_attention.query_key_value": [FUSED, WIDTH], "self_attention.dense": [WIDTH, WIDTH],
         "mlp.dense_h_to_4h": [2 * FFN, WIDTH], "mlp.dense_4h_to_h": [WIDTH, FFN]},
        ("self_attention.query_key_value",), "transformer.encoder.layers.{}.", "llama3",
    ),
    "codeshell": case(
        "CodeShellForCausalLM",
        {**_GPT, **TOKENS, "n_inner": None, "num_query_groups": KV, "position_embedding_type": "rope",
         "activation_function": "gelu_pytorch_tanh", "group_query_attention": True},
        _GPT_TOP,
        {**_LN, "attn.c_attn": [FUSED, WIDTH], "attn.c_proj": [WIDTH, WIDTH], "mlp.c_fc": [4 * WIDTH, WIDTH],
         "mlp.c_proj": [WIDTH, 4 * WIDTH]},
        ("ln_1", "ln_2", "transformer.ln_f", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"), _H, "starcoder",
    ),
    "deepseek": case(
        "DeepseekForCausalLM",
        {**COMMON, **TOKENS, "moe_intermediate_size": 24, "n_routed_experts": 4, "n_shared_experts": 2,
         "num_experts_per_tok": 2, "first_k_dense_replace": 1, "norm_topk_prob": False, "scoring_func": "softmax",
         "moe_layer_freq": 1, "attention_bias": False},
        TOP,
        {**NORMS, **ATTENTION, **{x: shape for x, shape in _LING_SPARSE.items() if x.startswith("mlp")}},
        first={**NORMS, **ATTENTION, **below("mlp.", MLP)}, tokenizer="deepseek-llm",
    ),
    "exaone": case(
        "ExaoneForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": FFN, "num_layers": LAYERS,
         "num_attention_heads": HEADS, "num_key_value_heads": KV, "max_position_embeddings": 256, **TOKENS,
         "layer_norm_epsilon": 1e-5, "activation_function": "silu", "rope_theta": 50000.0, "head_dim": HEAD,
         "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 32}},
        _GPT_TOP,
        {**_LN, **{x.replace("self_attn.", "attn.attention.").replace("o_proj", "out_proj"): shape
                   for x, shape in ATTENTION.items()},
         "mlp.c_fc_0": [FFN, WIDTH], "mlp.c_fc_1": [FFN, WIDTH], "mlp.c_proj": [WIDTH, FFN]},
        prefix=_H,
    ),
    "internlm2": case(
        "InternLM2ForCausalLM", {**COMMON, **TOKENS, "bias": False},
        {"model.tok_embeddings": [VOCABULARY, WIDTH], "model.norm": [WIDTH], "output": [VOCABULARY, WIDTH]},
        {"attention_norm": [WIDTH], "ffn_norm": [WIDTH], "attention.wqkv": [FUSED, WIDTH],
         "attention.wo": [WIDTH, WIDTH], **below("feed_forward.", _W123)},
        tokenizer="spm",
    ),
    "jais": case(
        "JAISLMHeadModel",
        {**_GPT, **TOKENS, "n_inner": FFN, "activation_function": "swiglu", "position_embedding_type": "alibi",
         "mup_embeddings_scale": 14.6, "mup_output_alpha": 2.22, "mup_width_scale": 0.125,
         "mup_scale_qk_dot_by_d": True},
        _GPT_TOP,
        {**_LN, "attn.c_attn.bias.": [3 * WIDTH], "attn.c_proj.bias.": [WIDTH], "mlp.c_fc.bias.": [FFN],
         "mlp.c_fc2.bias.": [FFN], "mlp.c_proj.bias.": [WIDTH],
         "attn.c_attn": [WIDTH, 3 * WIDTH], "attn.c_proj": [WIDTH, WIDTH], "mlp.c_fc": [WIDTH, FFN],
         "mlp.c_fc2": [WIDTH, FFN], "mlp.c_proj": [FFN, WIDTH]},
        ("ln_1", "ln_2", "transformer.ln_f"), _H,
    ),
    "maincoder": case(
        "MaincoderForCausalLM", {**COMMON, **TOKENS, "head_dim": HEAD}, TOP,
        {**NORMS, **ATTENTION, **HEAD_NORMS, **below("mlp.", MLP)},
    ),
    "maple": case(
        "MapleForCausalLM",
        {**COMMON, **TOKENS, "head_dim": HEAD, "moe_intermediate_size": 24, "num_experts": 4,
         "num_experts_per_tok": 2, "norm_topk_prob": True, "nope_on_global_attention": True, "sliding_window": 8,
         "layer_types": ["sliding_attention", "full_attention"]},
        TOP,
        {**NORMS, **ATTENTION, **HEAD_NORMS, "mlp.gate": [4, WIDTH], **_experts("mlp.experts", SMALL_MLP)},
    ),
    "minicpm": case(
        "MiniCPMForCausalLM",
        {**COMMON, **TOKENS, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16, "num_key_value_heads": KV,
         "tie_word_embeddings": True,
         "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.6],
                          "long_factor": [1.0, 1.5, 4.0, 9.0], "original_max_position_embeddings": 256}},
        {x: shape for x, shape in TOP.items() if x != "lm_head"},
        {**NORMS, **ATTENTION, **below("mlp.", MLP)}, tokenizer="spm",
    ),
    "openelm": case(
        "OpenELMForCausalLM",
        {"vocab_size": VOCABULARY, "model_dim": WIDTH, "num_transformer_layers": LAYERS, "head_dim": HEAD,
         "max_context_length": 256, "num_query_heads": [4, 6], "num_kv_heads": [2, 3], "ffn_multipliers": [0.5, 4.0],
         "ffn_dim_divisor": 16, "rope_freq_constant": 10000, "ffn_with_glu": True, "activation_fn_name": "swish",
         "normalization_layer_name": "rms_norm", "normalize_qk_projections": True, "share_input_output_layers": True,
         **TOKENS},
        {"transformer.token_embeddings": [VOCABULARY, WIDTH], "transformer.norm": [WIDTH]},
        {"attn_norm": [WIDTH], "ffn_norm": [WIDTH], "attn.q_norm": [HEAD], "attn.k_norm": [HEAD],
         "attn.qkv_proj": [12 * HEAD, WIDTH], "attn.out_proj": [WIDTH, 6 * HEAD], "ffn.proj_1": [256, WIDTH],
         "ffn.proj_2": [WIDTH, 128]},
        prefix="transformer.layers.{}.", tokenizer="spm",
        first={"attn_norm": [WIDTH], "ffn_norm": [WIDTH], "attn.q_norm": [HEAD], "attn.k_norm": [HEAD],
               "attn.qkv_proj": [8 * HEAD, WIDTH], "attn.out_proj": [WIDTH, 4 * HEAD], "ffn.proj_1": [32, WIDTH],
               "ffn.proj_2": [WIDTH, 16]},
    ),
    "orion": case(
        "OrionForCausalLM", {**COMMON, **TOKENS}, TOP, {**NORMS, **ATTENTION, **below("mlp.", MLP)},
        ("input_layernorm", "post_attention_layernorm", "model.norm"), tokenizer="spm",
    ),
    "pangu-embedded": case(
        "PanguEmbeddedForCausalLM", {**COMMON, **TOKENS, "bias": True}, TOP,
        {**NORMS, **ATTENTION, **below("mlp.", MLP)}, tuple(ATTENTION), tokenizer="spm",
    ),
    "plm": case(
        "PLMForCausalLM",
        {**COMMON, **TOKENS, "hidden_act": "relu2", "num_key_value_heads": HEADS, "q_lora_rank": None,
         "kv_lora_rank": 16, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 12,
         "attention_bias": False, "tie_word_embeddings": True},
        {x: shape for x, shape in TOP.items() if x != "lm_head"},
        {**NORMS, "self_attn.q_proj": [HEADS * 18, WIDTH], "self_attn.kv_a_proj_with_mqa": [24, WIDTH],
         "self_attn.kv_a_layernorm": [16], "self_attn.kv_b_proj": [HEADS * 22, 16],
         "self_attn.o_proj": [WIDTH, HEADS * 12], "mlp.up_proj": [FFN, WIDTH], "mlp.down_proj": [WIDTH, FFN]},
    ),
    "qwen": case(
        "QWenLMHeadModel",
        {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 2 * FFN, "num_hidden_layers": LAYERS,
         "num_attention_heads": HEADS, "kv_channels": HEAD, "layer_norm_epsilon": 1e-6, "rotary_emb_base": 10000,
         "rotary_pct": 1.0, "max_position_embeddings": 512, "seq_length": 256, "use_dynamic_ntk": True,
         "use_logn_attn": True, "no_bias": True, "scale_attn_weights": True, **TOKENS},
        _GPT_TOP,
        {**_LN, "attn.c_attn": [3 * WIDTH, WIDTH], "attn.c_proj": [WIDTH, WIDTH], "mlp.w1": [FFN, WIDTH],
         "mlp.w2": [FFN, WIDTH], "mlp.c_proj": [WIDTH, FFN]},
        ("attn.c_attn",), _H,
    ),
    "refact": case(
        "GPTRefactForCausalLM", {**_GPT, **TOKENS, "multi_query": True}, _GPT_TOP,
        {**_LN, "attn.q": [WIDTH, WIDTH], "attn.kv": [2 * HEAD, WIDTH], "attn.c_proj": [WIDTH, WIDTH],
         "mlp.gate_up_proj": [512, WIDTH], "mlp.c_proj": [WIDTH, 256]},
        prefix=_H, tokenizer="starcoder",
    ),
    "smallthinker": case(
        "SmallThinkerForCausalLM",
        {**COMMON, **TOKENS, "intermediate_size": None, "head_dim": HEAD, "num_hidden_layers": 5,
         "moe_ffn_hidden_size": 24, "moe_num_primary_experts": 4, "moe_num_active_primary_experts": 2,
         "moe_primary_router_apply_softmax": False, "moe_enable_early_router": True, "norm_topk_prob": True,
         "sliding_window_size": 8, "sliding_window_layout": [0, 1, 1, 1, 0], "rope_layout": [0, 1, 1, 1, 0]},
        TOP,
        {**NORMS, **ATTENTION, "block_sparse_moe.primary_router": [4, WIDTH],
         **_experts("block_sparse_moe.experts", {x[:-5]: shape for x, shape in SMALL_MLP.items()})},
        layers=5,
    ),
    "xverse": case(
        "XverseForCausalLM", {**COMMON, **TOKENS, "num_key_value_heads": None}, TOP,
        {**NORMS, **_ALL_HEADS, **below("mlp.", MLP)}, tokenizer="spm",
    ),
}  # fmt: skip

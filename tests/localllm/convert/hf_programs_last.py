"""Tiny checkpoints of Grok 1 and 2, PLaMo 1, Talkie and NeoBERT, with the tensor names of the publishers' code."""

from __future__ import annotations

from tests.localllm.convert.hf_programs import (
    ATTENTION,
    COMMON,
    FFN,
    HEAD,
    HEADS,
    KV,
    LAYERS,
    MLP,
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

EXPERTS = 4
_GROK = {
    **TOKENS, "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": FFN, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "output_multiplier_scale": 0.5773502691896257,
}  # fmt: skip
_W123: Shapes = {"w1": SMALL_MLP["gate_proj"], "w3": SMALL_MLP["up_proj"], "w2": SMALL_MLP["down_proj"]}
_GROK1_EXPERT: Shapes = {"linear": MLP["gate_proj"], "linear_v": MLP["up_proj"], "linear_1": MLP["down_proj"]}
# Experts come first: llama.cpp's converter stacks them when it reaches another tensor of the layer.
_GROK1: Shapes = {
    **{f"moe.{i}.{x}": shape for i in range(EXPERTS) for x, shape in _GROK1_EXPERT.items()},
    **{f"rms_norm{x}": [WIDTH] for x in ("", "_1", "_2", "_3")}, "router": [EXPERTS, WIDTH],
    "multi_head_attention.query": [WIDTH, WIDTH], "multi_head_attention.linear": [WIDTH, WIDTH],
    **{f"multi_head_attention.{x}": [KV * HEAD, WIDTH] for x in ("key", "value")},
}  # fmt: skip
_GROK2: Shapes = {
    **{f"block_sparse_moe.experts.{i}.{x}": shape for i in range(EXPERTS) for x, shape in _W123.items()},
    **{f"{x}_norm": [WIDTH] for x in ("pre_attn", "post_attn", "pre_moe", "post_moe")},
    "block_sparse_moe.gate": [EXPERTS, WIDTH], **ATTENTION, **below("mlp.", MLP),
}  # fmt: skip

# llama.cpp's converter accepts only PLaMo 13B's 40 query heads and 5 KV heads, so the head size here is 4.
_PLAMO_WIDTH, _PLAMO_KEYS = 160, 20
_PLAMO: Shapes = {
    "norm": [_PLAMO_WIDTH], **{f"self_attn.{x}_proj": [_PLAMO_WIDTH, _PLAMO_WIDTH] for x in "qo"},
    **{f"self_attn.{x}_proj": [_PLAMO_KEYS, _PLAMO_WIDTH] for x in "kv"}, "mlp.gate_proj": [FFN, _PLAMO_WIDTH],
    "mlp.up_proj": [FFN, _PLAMO_WIDTH], "mlp.down_proj": [_PLAMO_WIDTH, FFN], "self_attn.rotary_emb.inv_freq.": [2],
}  # fmt: skip

_TALKIE: Shapes = {
    **{f"attn.attn_{x}": [WIDTH, WIDTH] for x in ("query", "key", "value", "resid")},
    "attn.head_gain.head_g.": [HEADS], "attn_gain.a_g.": [1], "mlp.mlp_gate": [FFN, WIDTH],
    "mlp.mlp_linear": [FFN, WIDTH], "mlp.mlp_resid": [WIDTH, FFN], "mlp_gain.a_g.": [1], "embed_skip.a_g.": [1],
}  # fmt: skip

_NEO = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 72, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "dim_head": HEAD, "max_length": 256, "norm_eps": 1e-5, "hidden_act": "SwiGLU",
    "pad_token_id": 0,
}  # fmt: skip
_NEO_TOP: Shapes = {"encoder": [VOCABULARY, WIDTH], "layer_norm": [WIDTH]}
_NEO_LAYER: Shapes = {
    "qkv": [3 * WIDTH, WIDTH], "wo": [WIDTH, WIDTH], "ffn.w12": [96, WIDTH], "ffn.w3": [WIDTH, 48],
    "attention_norm": [WIDTH], "ffn_norm": [WIDTH],
}  # fmt: skip

LAST: dict[str, Case] = {
    "grok": case(
        "GrokForCausalLM",
        {**_GROK, "embedding_multiplier_scale": 5.65, "attn_output_multiplier": 0.35, "hidden_act": "gelu",
         "rope_theta": 10000.0},
        {"transformer.in_out_embed": [VOCABULARY, WIDTH], "transformer.rms_norm": [WIDTH]}, _GROK1,
        prefix="transformer.decoder_layer.{}.", tokenizer="spm",
    ),
    "grok-2": case(
        "Grok1ForCausalLM",
        {**_GROK, "head_dim": HEAD, "moe_intermediate_size": 24, "residual_moe": True, "rope_theta": 50000.0,
         "embedding_multiplier_scale": 5.65, "final_logit_softcapping": 50, "attn_logit_softcapping": 20.0,
         "router_logit_softcapping": 25.0, "attn_temperature_len": 1024, "sliding_window_size": -1,
         "global_attn_every_n": 1, "rope_type": "yarn", "original_max_position_embeddings": 64, "scaling_factor": 4.0,
         "extrapolation_factor": 0.75, "attn_factor": 1.0, "beta_fast": 8, "beta_slow": 2},
        TOP, _GROK2,
    ),
    "plamo": case(
        "PlamoForCausalLM",
        {**COMMON, **TOKENS, "hidden_size": _PLAMO_WIDTH, "num_attention_heads": 40, "num_key_value_heads": None,
         "max_position_embeddings": None, "rope_theta": None, "hidden_act": None, "n_shared_head": 8},
        {"model.embed_tokens": [VOCABULARY, _PLAMO_WIDTH], "model.norm": [_PLAMO_WIDTH],
         "lm_head": [VOCABULARY, _PLAMO_WIDTH]},
        _PLAMO, prefix="model.layers.layers.{}.", tokenizer="spm",
    ),
    "talkie": case(
        "TalkieForCausalLM",
        {**COMMON, **TOKENS, "num_key_value_heads": HEADS, "head_dim": HEAD, "hidden_act": None, "rope_theta": 1e6,
         "rms_norm_eps": 1e-5},
        {"model.embed": [VOCABULARY, WIDTH], "lm_head.": [VOCABULARY, WIDTH], "lm_head_gain.w_g.": [1]}, _TALKIE,
        prefix="model.blocks.{}.", tokenizer="gpt-4o",
    ),
    "neo-bert": case(
        "NeoBERTLMHead", _NEO,
        {**below("model.", _NEO_TOP), "decoder": [VOCABULARY, WIDTH], "decoder.bias.": [VOCABULARY]}, _NEO_LAYER,
        prefix="model.transformer_encoder.{}.", tokenizer="wordpiece",
    ),
    "neo-bert-rank": case(
        "NeoBERTForSequenceClassification", {**_NEO, "id2label": {"0": "no", "1": "maybe", "2": "yes"}},
        {**below("model.", _NEO_TOP), "dense": [WIDTH, WIDTH], "dense.bias.": [WIDTH], "classifier": [3, WIDTH],
         "classifier.bias.": [3]}, _NEO_LAYER,
        prefix="model.transformer_encoder.{}.", tokenizer="wordpiece",
    ),
}  # fmt: skip

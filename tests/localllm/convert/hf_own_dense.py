"""Tiny checkpoints of dense models and encoders with custom code, for `hf_own`, with the tensor names of that code."""

from __future__ import annotations

from tests.localllm.convert.hf_own_shapes import (
    ATTENTION,
    BIASED,
    HEAD_NORMS,
    LLAMA,
    LLAMA3,
    MLP,
    NORMS,
    QUERIES,
    SIZES,
    TOKENS,
    TOP,
    W123,
    Case,
    below,
    own,
)

_TIED = "model.embed_tokens Vx32 model.norm 32"
_GPT = {**TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True}  # fmt: skip
_GPT_TOP = "transformer.wte Vx32 transformer.ln_f 32 lm_head Vx32"
_LN_F = "transformer.wte Vx32 transformer.ln_f+ 32 lm_head Vx32"
_H = "transformer.h.{}."
_RW = {
    **TOKENS, "model_type": "RefinedWebModel", "alibi": False, "bias": False, "hidden_size": 32, "n_head": 4,
    "n_layer": 2, "layer_norm_epsilon": 1e-5, "multi_query": True, "parallel_attn": True, "pad_token_id": None,
    "apply_residual_connection_post_layernorm": False,
}  # fmt: skip
_RW_TOP = "transformer.word_embeddings Vx32 transformer.ln_f+ 32 lm_head Vx32"
_RW_LAYER = "self_attention.dense 32x32 mlp.dense_h_to_4h 128x32 mlp.dense_4h_to_h 32x128 "
_BASE = TOP.replace("model.", "").replace("lm_head Vx32", "")
_DECI = NORMS + QUERIES
_ELM = "(attn|ffn)_norm 32 attn.(q|k)_norm 8 "
_PLAMO = (
    "(pre|post)_(mixer|mlp)_norm 32 mlp.gate_up_proj 96x32 mlp.down_proj 32x48 mixer.qkv_proj 64x32 mixer.o_proj 32x32 "
)

_JINA = {
    **SIZES, "bos_token_id": None, "eos_token_id": None, "max_position_embeddings": 256, "layer_norm_eps": 1e-12,
    "hidden_act": "gelu", "position_embedding_type": "alibi", "feed_forward_type": "geglu", "type_vocab_size": 2,
}  # fmt: skip
_JINA_TOP = (
    "embeddings.word_embeddings Vx32 embeddings.token_type_embeddings 2x32 embeddings.LayerNorm+ 32 pooler.dense 32x32"
)
_JINA_LAYER = "attention.self.(query|key|value)+ 32x32 attention.output.dense+ 32x32 attention.output.LayerNorm+ 32 "
_NEO = {
    **SIZES, "bos_token_id": None, "eos_token_id": None, "intermediate_size": 72, "dim_head": 8, "max_length": 256,
    "norm_eps": 1e-5, "hidden_act": "SwiGLU",
}  # fmt: skip
_NEO_LAYER = "qkv 96x32 wo 32x32 ffn.w12 96x32 ffn.w3 32x48 (attention|ffn)_norm 32"
_NEO_TOP = "model.encoder Vx32 model.layer_norm 32 "
_NEO_PREFIX = "model.transformer_encoder.{}."

DENSE: dict[str, Case] = {
    "baichuan": own(
        "BaichuanForCausalLM",
        NORMS.replace("32", "16") + "self_attn.W_pack 48x16 self_attn.o_proj 16x16 mlp.(gate|up)_proj 24x16 "
        "mlp.down_proj 16x24",
        TOP.replace("32", "16"), "spm", base=SIZES, hidden_size=16, intermediate_size=24, num_hidden_layers=32,
        num_attention_heads=2, model_max_length=256, rms_norm_eps=1e-6, hidden_act="silu",
    ),
    "chatglm": own(
        "ChatGLMModel",
        NORMS + "self_attention.query_key_value+ 64x32 self_attention.dense 32x32 mlp.dense_h_to_4h 96x32 "
        "mlp.dense_4h_to_h 32x48",
        "transformer.embedding.word_embeddings Vx32 transformer.encoder.final_layernorm 32 transformer.output_layer "
        "Vx32 transformer.rotary_pos_emb.inv_freq. 2",
        "llama3", prefix="transformer.encoder.layers.{}.", base=SIZES, num_hidden_layers=None, intermediate_size=None,
        bos_token_id=None, padded_vocab_size=320, ffn_hidden_size=48, num_layers=2, kv_channels=8,
        multi_query_attention=True, multi_query_group_num=2, seq_length=256, layernorm_epsilon=1.5625e-07,
        rope_ratio=500, rmsnorm=True, post_layer_norm=True, add_bias_linear=False, add_qkv_bias=True,
        apply_residual_connection_post_layernorm=False, original_rope=True, eos_token_id=[2, 5],
    ),
    "codeshell": own(
        "CodeShellForCausalLM",
        "ln_(1|2)+ 32 attn.c_attn+ 64x32 attn.c_proj+ 32x32 mlp.c_fc+ 128x32 mlp.c_proj+ 32x128", _LN_F, "starcoder",
        prefix=_H, base=_GPT, num_query_groups=2, position_embedding_type="rope",
        activation_function="gelu_pytorch_tanh", group_query_attention=True,
    ),
    "deci": own(
        "DeciLMForCausalLM", _DECI + "self_attn.(k|v)_proj 16x32 " + below("mlp.", MLP),
        others={0: _DECI + "self_attn.(k|v)_proj 8x32 " + below("mlp.", MLP)}, num_key_value_heads_per_layer=[1, 2],
    ),
    "deci-blocks": own(
        "DeciLMForCausalLM", _DECI + "self_attn.(k|v)_proj 8x32 mlp.(gate|up)_proj 512x32 mlp.down_proj 32x512",
        others={0: _DECI + "self_attn.(k|v)_proj 16x32 mlp.(gate|up)_proj 256x32 mlp.down_proj 32x256"},
        intermediate_size=None, num_key_value_heads=None, rope_scaling=LLAMA3,
        block_configs=[{"attention": {"n_heads_in_group": n, "replace_with_linear": False},
            "ffn": {"ffn_mult": x}} for n, x in ((2, 2.0), (4, 13.0))],
    ),
    "ernie4_5-fused": own(
        "Ernie4_5_ForCausalLM",
        NORMS + "self_attn.qkv_proj 64x32 self_attn.o_proj 32x32 mlp.up_gate_proj 96x32 mlp.down_proj 32x48",
        TOP.replace("model.", "ernie."), "spm", prefix="ernie.layers.{}.", model_type="ernie4_5", head_dim=8,
        use_bias=False,
    ),
    "exaone": own(
        "ExaoneForCausalLM",
        "ln_(1|2) 32 " + ATTENTION.replace("self_attn.", "attn.attention.").replace("(q|o)_", "(q|out)_")
        + "mlp.c_fc_(0|1) 48x32 mlp.c_proj 32x48",
        _GPT_TOP, prefix=_H, base=SIZES, num_hidden_layers=None, num_layers=2, num_key_value_heads=2,
        max_position_embeddings=256, layer_norm_epsilon=1e-5, activation_function="silu", rope_theta=50000.0,
        head_dim=8, rope_scaling=LLAMA3,
    ),
    "falcon-rw": own(
        "RWForCausalLM", "input_layernorm+ 32 self_attention.query_key_value 48x32 " + _RW_LAYER, _RW_TOP, "falcon",
        prefix=_H, base=_RW,
    ),
    "falcon-rw-groups": own(
        "RWForCausalLM", "ln_(attn|mlp)+ 32 self_attention.query_key_value 64x32 " + _RW_LAYER, _RW_TOP, "falcon",
        prefix=_H, base=_RW, model_type="RefinedWeb", n_head_kv=2, multi_query=None,
    ),
    "internlm2": own(
        "InternLM2ForCausalLM",
        "(attention|ffn)_norm 32 attention.wqkv 64x32 attention.wo 32x32 " + below("feed_forward.", W123),
        "model.tok_embeddings Vx32 model.norm 32 output Vx32", "spm", bias=False,
    ),
    "jais": own(
        "JAISLMHeadModel",
        "ln_(1|2)+ 32 attn.c_attn 32x96 attn.c_proj 32x32 mlp.(c_fc|c_fc2) 32x48 mlp.c_proj 48x32 "
        "attn.c_attn.bias. 96 attn.c_proj.bias. 32 mlp.(c_fc|c_fc2).bias. 48 mlp.c_proj.bias. 32",
        _LN_F, prefix=_H, base=_GPT, n_inner=48, activation_function="swiglu", position_embedding_type="alibi",
        mup_embeddings_scale=14.6, mup_output_alpha=2.22, mup_width_scale=0.125, mup_scale_qk_dot_by_d=True,
    ),
    "llama-base": own("LlamaModel", LLAMA, _BASE, "llama3", prefix="layers.{}.", model_type="llama", head_dim=8),
    "llama-embed": own(
        "LlamaBidirectionalModel", LLAMA, _BASE, "llama3", prefix="layers.{}.", model_type="llama_bidirec", head_dim=8,
        pooling="avg",
    ),
    "maincoder": own("MaincoderForCausalLM", LLAMA + HEAD_NORMS, head_dim=8),
    "minicpm": own(
        "MiniCPMForCausalLM", LLAMA, _TIED, "spm", scale_emb=12, scale_depth=1.4, dim_model_base=16,
        tie_word_embeddings=True,
        rope_scaling={"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.6],
                      "long_factor": [1.0, 1.5, 4.0, 9.0], "original_max_position_embeddings": 256},
    ),
    "nanbeige": own("NanbeigeForCausalLM", LLAMA, num_loops=2, skip_loop_final_norm=True),
    "openelm": own(
        "OpenELMForCausalLM", _ELM + "attn.qkv_proj 96x32 attn.out_proj 32x48 ffn.proj_1 256x32 ffn.proj_2 32x128",
        "transformer.token_embeddings Vx32 transformer.norm 32", "spm", prefix="transformer.layers.{}.", base=TOKENS,
        others={0: _ELM + "attn.qkv_proj 64x32 attn.out_proj 32x32 ffn.proj_1 32x32 ffn.proj_2 32x16"},
        model_dim=32, num_transformer_layers=2, head_dim=8, max_context_length=256, num_query_heads=[4, 6],
        num_kv_heads=[2, 3], ffn_multipliers=[0.5, 4.0], ffn_dim_divisor=16, rope_freq_constant=10000,
        ffn_with_glu=True, activation_fn_name="swish", normalization_layer_name="rms_norm",
        normalize_qk_projections=True, share_input_output_layers=True,
    ),
    "orion": own("OrionForCausalLM", LLAMA.replace("layernorm", "layernorm+"), TOP.replace("norm", "norm+"), "spm"),
    "pangu-embedded": own(
        "PanguEmbeddedForCausalLM", NORMS + ATTENTION.replace("_proj", "_proj+") + below("mlp.", MLP), TOP, "spm",
        bias=True,
    ),
    # llama.cpp's converter accepts only PLaMo 13B's 40 query heads and 5 KV heads, so the head size here is 4.
    "plamo": own(
        "PlamoForCausalLM",
        "norm 160 self_attn.(q|o)_proj 160x160 self_attn.(k|v)_proj 20x160 mlp.(gate|up)_proj 48x160 "
        "mlp.down_proj 160x48 self_attn.rotary_emb.inv_freq. 2",
        TOP.replace("32", "160"), "spm", prefix="model.layers.layers.{}.", hidden_size=160, num_attention_heads=40,
        num_key_value_heads=None, max_position_embeddings=None, rope_theta=None, hidden_act=None, n_shared_head=8,
    ),
    "plamo3": own(
        "Plamo3ForCausalLM", _PLAMO + "mixer.(q|k)_norm 8", TOP, "plamo", prefix="model.layers.layers.{}.", head_dim=8,
        window_size=8, sliding_window_pattern=2, rope_local_theta=10000,
    ),
    "plm": own(
        "PLMForCausalLM",
        NORMS + "self_attn.q_proj 72x32 self_attn.kv_a_proj_with_mqa 24x32 self_attn.kv_a_layernorm 16 "
        "self_attn.kv_b_proj 88x16 self_attn.o_proj 32x48 mlp.up_proj 48x32 mlp.down_proj 32x48",
        _TIED, hidden_act="relu2", num_key_value_heads=4, kv_lora_rank=16, qk_nope_head_dim=10, qk_rope_head_dim=8,
        v_head_dim=12, attention_bias=False, tie_word_embeddings=True,
    ),
    "qwen": own(
        "QWenLMHeadModel", "ln_(1|2) 32 attn.c_attn+ 96x32 attn.c_proj 32x32 mlp.(w1|w2) 48x32 mlp.c_proj 32x48",
        _GPT_TOP, prefix=_H, base=SIZES, intermediate_size=96, kv_channels=8, layer_norm_epsilon=1e-6,
        rotary_emb_base=10000, rotary_pct=1.0, max_position_embeddings=512, seq_length=256, use_dynamic_ntk=True,
        use_logn_attn=True, no_bias=True, scale_attn_weights=True,
    ),
    "qwen2-base": own("Qwen2Model", NORMS + BIASED + below("mlp.", MLP), _BASE, "spm", prefix="layers.{}.",
                      model_type="qwen2"),
    "qwen2-kormo": own("KORMoForCausalLM", "pre_(attention|mlp)_layernorm 32 " + LLAMA.removeprefix(NORMS), TOP,
                       "llama3", model_type="kormo"),
    "qwen3-base": own("Qwen3Model", LLAMA + HEAD_NORMS, _BASE, "spm", prefix="layers.{}.", model_type="qwen3",
                      head_dim=8),
    "refact": own(
        "GPTRefactForCausalLM",
        "ln_(1|2) 32 attn.q 32x32 attn.kv 16x32 attn.c_proj 32x32 mlp.gate_up_proj 512x32 mlp.c_proj 32x256",
        _GPT_TOP, "starcoder", prefix=_H, base=_GPT, multi_query=True,
    ),
    "spark2_5": own(
        "Spark2_5ForCausalLM",
        NORMS + "self_attn.q_k_v_proj 64x32 self_attn.g_proj 4x32 self_attn.o_proj 32x32 " + below("mlp.", MLP),
        hidden_act="gelu", head_dim=8, sliding_window=8, layer_types=["sliding_attention", "full_attention"],
        gate_attn_act_mode="sigmoid", headwise_attn_output_gate=True,
        rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    ),
    "talkie": own(
        "TalkieForCausalLM",
        "attn.attn_(query|key|value|resid) 32x32 attn.head_gain.head_g. 4 (attn_gain|mlp_gain|embed_skip).a_g. 1 "
        "mlp.mlp_(gate|linear) 48x32 mlp.mlp_resid 32x48",
        "model.embed Vx32 lm_head. Vx32 lm_head_gain.w_g. 1", "gpt-4o", prefix="model.blocks.{}.",
        num_key_value_heads=4, head_dim=8, hidden_act=None, rope_theta=1e6, rms_norm_eps=1e-5,
    ),
    "xverse": own(
        "XverseForCausalLM", NORMS + QUERIES + "self_attn.(k|v)_proj 32x32 " + below("mlp.", MLP), TOP, "spm",
        num_key_value_heads=None,
    ),
    # diffusion models
    "dream": own("DreamModel", NORMS + BIASED + below("mlp.", MLP), model_type="Dream", rope_theta=1e6,
                 mask_token_id=9),
    "llada": own(
        "LLaDAModelLM", "(attn|ff)_norm 32 (q_proj|attn_out) 32x32 (k|v)_proj 16x32 (ff|up)_proj 48x32 ff_out 32x48",
        below("model.transformer.", "wte Vx32 ln_f 32 ff_out Vx32"), "llama3", prefix="model.transformer.blocks.{}.",
        base=TOKENS, model_type="llada", bos_token_id=None, d_model=32, n_heads=4, n_kv_heads=2, n_layers=2,
        mlp_hidden_size=48, max_sequence_length=256, rms_norm_eps=1e-5, rope_theta=5e5, activation_type="silu",
        block_type="llama", layer_norm_type="rms", alibi=False, rope=True, mask_token_id=9, weight_tying=False,
    ),
    # encoders
    "jina-bert-v2": own(
        "JinaBertForMaskedLM", _JINA_LAYER + "mlp.gated_layers 96x32 mlp.wo+ 32x48 mlp.layernorm+ 32",
        below("bert.", _JINA_TOP), "wordpiece", prefix="bert.encoder.layer.{}.", base=_JINA,
    ),
    "jina-bert-v2-code": own(
        "JinaBertModel",
        _JINA_LAYER + "mlp.up_gated_layer+ 96x32 mlp.down_layer+ 32x48 (layer_norm_1|layer_norm_2)+ 32 "
        "attention.self.layer_norm_(q|k)+ 32",
        _JINA_TOP, "wordpiece", prefix="encoder.layer.{}.", base=_JINA,
    ),
    "neo-bert": own(
        "NeoBERTLMHead", _NEO_LAYER, _NEO_TOP + "decoder+ Vx32", "wordpiece", prefix=_NEO_PREFIX, base=_NEO,
    ),
    "neo-bert-rank": own(
        "NeoBERTForSequenceClassification", _NEO_LAYER, _NEO_TOP + "dense+ 32x32 classifier+ 3x32", "wordpiece",
        prefix=_NEO_PREFIX, base=_NEO, id2label={"0": "no", "1": "maybe", "2": "yes"},
    ),
}  # fmt: skip

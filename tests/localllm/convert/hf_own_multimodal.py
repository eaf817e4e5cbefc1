"""Tiny checkpoints of vision and speech models that transformers lacks, for `hf_own`: the language model, and some
tensors of the other components.
"""

from __future__ import annotations

from tests.localllm.convert.hf_own_shapes import (
    BIASED,
    COMMON,
    EXPERTS,
    HEAD_NORMS,
    LATENT,
    LLAMA,
    MLA,
    MLP,
    NORMS,
    SMALL_MLP,
    TOKENS,
    TOP,
    Case,
    below,
    experts,
    own,
    shapes,
)

_WHOLE = NORMS + "self_attn.(q|k|v|o)_proj 32x32 "
_LING = NORMS + "attention.dense 32x"
_CODES = 1100  # the last 1024 codes of Qwen3-TTS are special tokens, including EOS


def _inside(key: str, case: Case, outer: dict[str, object], **more: object) -> Case:
    """Return the case with its config.json below `key`, next to the settings of the other components."""
    inner = {name: x for name, x in case.config.items() if name != "architectures"}
    return Case({"architectures": case.config["architectures"], **outer, key: {**inner, **more}}, *case[1:])


SEES: dict[str, Case] = {
    "cogvlm": own(
        "CogVLMForCausalLM",
        NORMS + "self_attn.(language|vision)_expert_query_key_value 96x32 "
        "self_attn.(language|vision)_expert_dense 32x32 " + below("mlp.(language|vision)_mlp.", MLP),
        TOP + "model.vision.linear_proj.linear_proj 32x16", "spm", model_type="cogvlm", num_key_value_heads=4,
        num_multi_query_heads=4, rope_theta=10000.0, vision_config={"hidden_size": 16},
    ),
    "deepseek2-ocr": _inside(
        "language_config",
        own("DeepseekOCRForCausalLM", _WHOLE + "mlp.gate 4x32 " + experts("mlp.experts",
            SMALL_MLP) + "mlp.shared_experts.(gate|up)_proj 48x32 mlp.shared_experts.down_proj 32x48",
            TOP + "model.sam_model.pos_embed 4 model.vision_model.pre_layrnorm 4 model.projector.layers 4x4 "
            "model.(image_newline|view_seperator) 4", "deepseek-llm", others={0: _WHOLE + below("mlp.", MLP)},
            model_type=None, rope_theta=10000.0, num_key_value_heads=4, moe_intermediate_size=24, n_routed_experts=4,
            n_shared_experts=2, num_experts_per_tok=2, first_k_dense_replace=1, use_mla=False, qk_nope_head_dim=0,
            qk_rope_head_dim=0, v_head_dim=0, topk_method="greedy", n_group=1, topk_group=1),
        {"model_type": "deepseek_vl_v2", "vision_config": {"width": {"sam_vit_b": {}}}}, q_lora_rank=None,
        kv_lora_rank=None,
    ),
    "llama-sarashina2": _inside(
        "text_config",
        own("Sarashina2VisionForCausalLM", LLAMA, below("llm.",
            TOP) + "(visual.patch_embed.proj|visual.merger.mlp.0) 4 norm 32", "llama3", prefix="llm.model.layers.{}.",
            model_type="llama"), {"model_type": "sarashina2_vision", "vision_config": {"hidden_size": 4}},
    ),
    "phi3-vision": own(
        "Phi4ForCausalLMV",
        NORMS + "self_attn.qkv_proj 64x32 self_attn.o_proj 32x32 mlp.gate_up_proj 96x32 mlp.down_proj 32x48",
        TOP + "model.vision_tower.vision_tower.vision_model.post_layernorm 4 model.mm_projector.0 4x4", "spm",
        model_type="phi4-siglip", original_max_position_embeddings=256,
    ),
    "qwen2-dots": own(
        "DotsOCRForCausalLM", NORMS + BIASED + below("mlp.", MLP), TOP + "vision_tower.blocks.0.attn.qkv 4x4",
        model_type="dots_ocr", vision_config={"embed_dim": 4},
    ),
    "qwen3-step-vl": _inside(
        "text_config",
        own("StepVLForConditionalGeneration", LLAMA + HEAD_NORMS, TOP + "(vision_model.conv1|vit_large_projector) 4x4",
            model_type="qwen3", head_dim=8),
        {"model_type": "step_robotics", "vision_config": {"width": 4}}, architectures=["Qwen3ForCausalLM"],
    ),
    "deepseek2-youtu-vl": own(
        "YoutuVLForConditionalGeneration", NORMS + MLA + below("mlp.", MLP),
        TOP + "siglip2.vision_model.post_layernorm 4 merger.mlp.0 4x4", model_type="youtu_vl", **LATENT,
        vision_config={"hidden_size": 4},
    ),
    "bailingmoe3-vl": _inside(
        "text_config",
        own("BailingMoeV3VLForConditionalGeneration",
            _LING + "48 attention.q_proj 72x32 attention.kv_a_proj_with_mqa 24x32 attention.kv_a_layernorm 16 "
            "attention.kv_b_proj 88x16 attention.g_proj 4x32 mlp.gate 4x32 mlp.gate.expert_bias. 4 " +
            experts("mlp.experts", MLP) + below("mlp.shared_experts.", MLP), TOP.replace("embed_tokens",
            "word_embeddings") + "model.visual.merger.norm 4 linear_proj.0 4x4",
            others={0: _LING + "32 attention.(q|k|v|f|g)_proj 32x32 attention.(q|k|v)_conv1d 32x1x4 attention.b_proj "
            "4x32 attention.A_log. 4 attention.dt_bias. 32 attention.o_norm 8 " + below("mlp.", MLP)},
            model_type="bailing_moe_v3", base={**COMMON, **EXPERTS, **LATENT, "q_lora_rank": None}, layer_group_size=2,
            first_k_dense_replace=1, moe_intermediate_size=48, moe_shared_expert_intermediate_size=48,
            num_shared_experts=1, n_group=1, topk_group=1, routed_scaling_factor=2.5, norm_topk_prob=True,
            kda_safe_gate=True, no_kda_lora=True, gated_attention_proj_granularity_type="head_wise",
            kda_lower_bound=-5.0, short_conv_kernel_size=4, mrope_section=[1, 1, 2], score_function="sigmoid"),
        {"model_type": "bailing_moe_v3_vl", "vision_config": {"hidden_size": 4}}, q_lora_rank=None,
    ),
}  # fmt: skip

_TALKER = {
    "vocab_size": _CODES, "text_vocab_size": TOKENS["vocab_size"], "hidden_size": 16, "text_hidden_size": 24,
    "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu",
    "rope_scaling": {"mrope_section": [4, 2, 2], "interleaved": True, "rope_type": "default", "type": "default"},
    "codec_bos_id": 1049, "codec_eos_token_id": 1050, "codec_pad_id": 1048, "codec_language_id": {"english": 1051},
    "code_predictor_config": {"vocab_size": 8}, "attention_bias": False,
}  # fmt: skip
_TALKER_LAYER = (
    "(input|post_attention)_layernorm 16 self_attn.q_proj 32x16 self_attn.(k|v)_proj 16x16 self_attn.o_proj 16x32 "
    "self_attn.(q|k)_norm 16 mlp.(gate|up)_proj 32x16 mlp.down_proj 16x32"
)
# Pocket TTS has no config.json, a head size of 64, and tensors of the codec whose shapes llama.cpp's converter reads.
_POCKET = (
    "conditioner.embed Vx128 bos_emb. 8 bos_before_voice. 1x1x128 input_linear 128x8 out_norm+ 128 out_eos+ 1x128 "
    "(emb_mean|emb_std). 8 speaker_proj_weight. 128x16 flow_net.cond_embed 16x128"
)
_POCKET_LAYER = (
    "(norm1|norm2)+ 128 self_attn.in_proj 384x128 self_attn.out_proj 128x128 linear1 192x128 linear2 128x192"
)
SPEAKS: dict[str, Case] = {
    "qwen3tts": Case(
        {"architectures": ["Qwen3TTSForConditionalGeneration"], "model_type": "qwen3_tts", "talker_config": _TALKER,
         "speaker_encoder_config": {"enc_dim": 8}, "tts_bos_token_id": 1, "tts_eos_token_id": 2, "tts_pad_token_id": 0},
        shapes(f"model.text_embedding Vx24 model.codec_embedding {_CODES}x16 text_projection.linear_fc1+ 24x24 "
               f"text_projection.linear_fc2+ 16x24 codec_head {_CODES}x16 model.norm 16 code_predictor.model.norm 8 "
               + below("model.layers.(0|1).", _TALKER_LAYER), "talker.") + shapes("speaker_encoder.fc 8x8"),
        "qwen2",
    ),
    "pockettts": Case(
        {},
        shapes(_POCKET + " " + below("transformer.layers.(0|1).", _POCKET_LAYER), "flow_lm.")
        + shapes("norm1 64 linear1 96x64", "mimi.encoder_transformer.transformer.layers.0."),
        "pieces",
    ),
}  # fmt: skip

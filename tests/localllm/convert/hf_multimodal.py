"""Settings of tiny vision and audio models, and of classes that share a GGUF architecture, which `hf_make` builds."""

from __future__ import annotations

import re
from functools import partial

from tests.localllm.convert.hf_settings import (
    CONV,
    DEFAULT,
    DELTA,
    EXPERTS,
    GEMMA4,
    GRANITE,
    LATENT,
    LLAMA3,
    MINISTRAL,
    ROUTED,
    SEES,
    WINDOW,
    YARN,
    Tiny,
    seeing,
    text,
    tiny,
)

# Tensor names of the language model; all other tensors belong to vision or audio encoders.
TEXT = re.compile(
    r"((model|thinker)\.)*((language|text)_model\.)?(model\.)?"
    r"(embed_tokens|layers|norm|lm_head|final_layernorm|embedding_norm)"
)
# The class in transformers, if its name differs.
PROGRAMS = {"Qwen2_5OmniModel": "Qwen2_5OmniForConditionalGeneration"}

ANSWERS = {  # submodule class that returns text logits
    "Qwen2_5OmniModel": "Qwen2_5OmniThinkerForConditionalGeneration",
    "Qwen3OmniMoeForConditionalGeneration": "Qwen3OmniMoeThinkerForConditionalGeneration",
}
BESIDE = {  # tensors of additional models in the checkpoint, which transformers does not load here
    "Qwen2_5OmniModel": ("talker.model.layers.0.mlp.up_proj.weight", "token2wav.code2wav_bigvgan_model.a.weight"),
    "Qwen3OmniMoeForConditionalGeneration": ("talker.codec_head.weight", "code2wav.upsample.0.weight"),
}
AUDIO = {
    "d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "hidden_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "output_dim": 32,
    "num_mel_bins": 8, "max_source_positions": 8,
}  # fmt: skip
_VIT = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
_SECTIONS = {**DEFAULT, "mrope_section": [1, 1, 2]}
_WIDE = {**DEFAULT, "mrope_section": [2, 3, 3]}
_CONFORMER = {
    "model_type": "granite_speech_encoder", "num_layers": 1, "hidden_dim": 16, "feedforward_mult": 1, "num_heads": 2,
    "dim_head": 8, "input_dim": 8, "output_dim": 10, "max_pos_emb": 8, "context_size": 8,
}  # fmt: skip
_GRANITE = {**GRANITE, "logits_scaling": 1.0}  # transformers 5.23 leaves this setting out here
_QFORMER = {
    "model_type": "blip_2_qformer", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 16, "encoder_hidden_size": 16,
}  # fmt: skip

STEP = {
    **EXPERTS, "num_hidden_layers": 4, "head_dim": 16, "sliding_window": WINDOW, "num_sliding_attention_heads": 6,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "moe_layers_enum": "1,2,3", "n_routed_experts": 4, "share_expert_dim": 40, "moe_router_scaling_factor": 3.0,
    "swiglu_limits": [0.0, 0.0, 0.25, 0.0], "swiglu_limits_shared": [0.0, 0.5, 0.0, 0.25],
    "rope_parameters": {
        "full_attention": {**LLAMA3, "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    },
}  # fmt: skip

MULTIMODAL: dict[str, Tiny] = {
    "hunyuan_vl": seeing(
        "HunYuanVLConfig", "qwen2", head_dim=16,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0,
            "mrope_section": [2, 2, 2, 2]},
    ),
    "mistral4": seeing(
        "Mistral3Config", "tekken", LATENT, EXPERTS, n_routed_experts=4, n_shared_experts=2, routed_scaling_factor=1.5,
        rope_parameters=MINISTRAL, model_type="mistral4",
    ),
    "muse-glimmer": tiny(
        "MuseGlimmerConfig", "llama3", SEES, out_hidden_size=64, projector_hidden_size=16,
        **text("", num_hidden_layers=5, head_dim=16, sliding_window=WINDOW, rope_theta=10000.0),
    ),
    "paddleocr-vl": seeing(
        "PaddleOCRVLConfig", "spm", head_dim=16,
        rope_parameters={**DEFAULT, "rope_theta": 5e5, "mrope_section": [2, 3, 3]},
    ),
    "qwen2vl": seeing("Qwen2_5_VLConfig", "qwen2", rope_parameters={**DEFAULT, "mrope_section": [1, 1, 2]}),
    "qwen3vl": seeing("Qwen3VLConfig", "qwen2", head_dim=16, rope_parameters={**DEFAULT, "mrope_section": [2, 3, 3]}),
    "qwen3vlmoe": seeing(
        "Qwen3VLMoeConfig", "qwen2", EXPERTS, head_dim=16, num_experts=4, moe_intermediate_size=24, norm_topk_prob=True,
        rope_parameters={**DEFAULT, "mrope_section": [2, 3, 3]},
    ),
    "step35": seeing("Step3p7Config", "deepseek-v3", STEP),
}  # fmt: skip

row = partial(tiny, "")
# Models of a class whose GGUF architecture other classes share
_ROWS: dict[str, Tiny] = {
    "AudioFlamingo3ForConditionalGeneration": row("qwen2", text("qwen2"), audio_config=AUDIO),
    "BambaForCausalLM": row(
        "llama3", num_hidden_layers=3, attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=2,
        mamba_d_state=16, mamba_expand=2, head_dim=8,
    ),
    "Exaone4_5_ForConditionalGeneration": seeing(
        "", "qwen2", sliding_window=None, layer_types=["full_attention"] * 2, model_type="exaone4",
    ),
    "Gemma4UnifiedForConditionalGeneration": row(
        "gemma4", text("gemma4_unified_text", GEMMA4, num_kv_shared_layers=0),
        vision_config={"output_proj_dims": 16, "mm_embed_dim": 16, "mm_posemb_size": 4},
        audio_config={"audio_embed_dim": 8},
    ),
    "Glm4vForConditionalGeneration": seeing(
        "", "llama3", rope_parameters={**_SECTIONS, "partial_rotary_factor": 1.0}, model_type="glm4v_text",
    ),
    "Glm4vMoeForConditionalGeneration": seeing(
        "", "llama3", EXPERTS, ROUTED, head_dim=16, first_k_dense_replace=1,
        rope_parameters={**_SECTIONS, "partial_rotary_factor": 0.5}, model_type="glm4v_moe_text",
    ),
    "GlmOcrForConditionalGeneration": seeing(
        "", "llama3", head_dim=16, rope_parameters=_WIDE, model_type="glm_ocr_text",
    ),
    "GraniteSpeechForConditionalGeneration": row(
        "starcoder", text("granite", _GRANITE), encoder_config=_CONFORMER, projector_config=_QFORMER,
        has_lora_adapter=False,
    ),
    "Idefics3ForConditionalGeneration": row("llama3", text("llama"), vision_config=_VIT),
    "InternVLForConditionalGeneration": row("qwen2", text("qwen2"), vision_config=_VIT),
    "InternVLForConditionalGeneration-qwen3": row("qwen2", text("qwen3", head_dim=16), vision_config=_VIT),
    "JanusForConditionalGeneration": row(
        "llama3", text("llama"),
        vision_config={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "projection_dim": 32,
            "depth": 1, "image_size": 16, "mlp_ratio": 1.0},
        vq_config={"embed_dim": 8, "base_channels": 32, "num_embeddings": 16, "channel_multiplier": [1],
            "num_res_blocks": 1, "projection_dim": 32, "image_token_embed_dim": 32, "num_patches": 4},
    ),
    "Lfm2VlForConditionalGeneration": row(
        "qwen2", text("lfm2", num_hidden_layers=3, layer_types=CONV, block_multiple_of=16, intermediate_size=90),
        vision_config={**_VIT, "model_type": "siglip2_vision_model", "num_patches": 4}, projector_hidden_size=8,
    ),
    "LightOnOcrForConditionalGeneration": row(
        "qwen2", text("qwen3", head_dim=16), vision_config={**_VIT, "model_type": "pixtral"},
    ),
    "LlavaForConditionalGeneration": row(
        "tekken", text("mistral", head_dim=16, sliding_window=None),
        vision_config={"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 16},
    ),
    "MiniCPMV4_6ForConditionalGeneration": seeing(
        "", "qwen35", DELTA, num_hidden_layers=4,
        rope_parameters={**DEFAULT, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
        model_type="qwen3_5_text",
    ),
    "Qwen2AudioForConditionalGeneration": row("qwen2", text("qwen2"), audio_config=AUDIO),
    "Qwen2_5OmniModel": row(
        "qwen2", enable_audio_output=False,
        thinker_config={**text("qwen2_5_omni_text", rope_parameters=_SECTIONS), **SEES, "audio_config": AUDIO},
    ),
    "Qwen3ASRForConditionalGeneration": row(
        "qwen2", text("qwen3", head_dim=16, rope_parameters=_WIDE), audio_config=AUDIO,
    ),
    "Qwen3OmniMoeForConditionalGeneration": row(
        "qwen2", enable_audio_output=False,
        thinker_config={**text("qwen3_omni_moe_text", EXPERTS, head_dim=16, num_experts=4, norm_topk_prob=True,
            rope_parameters=_WIDE), **SEES, "audio_config": AUDIO},
    ),
    "SolarOpenForCausalLM": row(
        "llama3", EXPERTS, ROUTED, head_dim=16, routed_scaling_factor=1.5, rope_parameters=YARN,
    ),
    "VoxtralForConditionalGeneration": row(
        "tekken", text("llama", head_dim=16, rope_parameters=LLAMA3), audio_config=AUDIO,
    ),
    "YoutuForCausalLM": row("qwen2", LATENT, pad_token_id=None, rope_parameters={**DEFAULT, "rope_theta": 16e5}),
}  # fmt: skip
CLASSES = {
    name: model._replace(
        kind=f"{name.partition('For')[0].removesuffix('Model')}Config",
        program=PROGRAMS.get(name, name.partition("-")[0]),
    )
    for name, model in _ROWS.items()
}

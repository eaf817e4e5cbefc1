"""Settings of the tiny models in `hf_classes`: model class, configuration class in transformers, and tokenizer."""

from __future__ import annotations

import re
from typing import Any

from tests.localllm.convert.hf_settings import (
    COMMON,
    CONV,
    DEFAULT,
    DELTA,
    EXPERTS,
    GEMMA4,
    GRANITE,
    LATENT,
    LLAMA3,
    VISION,
    YARN,
)

# Tensor names of the language model; all other tensors belong to vision or audio encoders.
TEXT = re.compile(
    r"((model|thinker)\.)*((language|text)_model\.)?(model\.)?"
    r"(embed_tokens|layers|norm|lm_head|final_layernorm|embedding_norm)"
)
PROGRAMS = {  # the class in transformers, if its name differs
    "IQuestCoderForCausalLM": "LlamaForCausalLM", "InternLM3ForCausalLM": "LlamaForCausalLM",
    "Qwen2_5OmniModel": "Qwen2_5OmniForConditionalGeneration",
}  # fmt: skip

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
_SEES = {"vision_config": VISION}
_CONFORMER = {
    "model_type": "granite_speech_encoder", "num_layers": 1, "hidden_dim": 16, "feedforward_mult": 1, "num_heads": 2,
    "dim_head": 8, "input_dim": 8, "output_dim": 10, "max_pos_emb": 8, "context_size": 8,
}  # fmt: skip
_GRANITE = {**GRANITE, "logits_scaling": 1.0}  # transformers 5.23 leaves this setting out here
_QFORMER = {
    "model_type": "blip_2_qformer", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 16, "encoder_hidden_size": 16,
}  # fmt: skip


def _text(model: str, **more: Any) -> dict[str, Any]:
    return {"text_config": {**COMMON, "model_type": model, **more}}


CLASSES: dict[str, tuple[str, dict[str, Any], str]] = {
    "BambaForCausalLM": (
        "BambaConfig",
        {**COMMON, "num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16,
         "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_expand": 2, "head_dim": 8},
        "llama3",
    ),
    "IQuestCoderForCausalLM": ("IQuestCoderConfig", {**COMMON, "head_dim": 16}, "llama3"),
    "InternLM3ForCausalLM": (
        "InternLM3Config", {**COMMON, "head_dim": 16, "attention_bias": True, "mlp_bias": True}, "spm",
    ),
    "SolarOpenForCausalLM": (
        "SolarOpenConfig",
        {**COMMON, **EXPERTS, "head_dim": 16, "n_routed_experts": 4, "n_shared_experts": 1,
         "routed_scaling_factor": 1.5, "rope_parameters": YARN},
        "llama3",
    ),
    "YoutuForCausalLM": (
        "YoutuConfig",
        {**COMMON, **LATENT, "pad_token_id": None, "rope_parameters": {**DEFAULT, "rope_theta": 16e5}}, "qwen2",
    ),
    "Gemma4UnifiedForConditionalGeneration": (
        "Gemma4UnifiedConfig",
        {**_text("gemma4_unified_text", **GEMMA4, num_kv_shared_layers=0),
         "vision_config": {"output_proj_dims": 16, "mm_embed_dim": 16,
                           "mm_posemb_size": 4},
         "audio_config": {"audio_embed_dim": 8}},
        "gemma4",
    ),
    "Glm4vForConditionalGeneration": (
        "Glm4vConfig", {**_text("glm4v_text", rope_parameters={**_SECTIONS, "partial_rotary_factor": 1.0}), **_SEES},
        "llama3",
    ),
    "Glm4vMoeForConditionalGeneration": (
        "Glm4vMoeConfig",
        {**_text("glm4v_moe_text", **EXPERTS, head_dim=16, n_routed_experts=4, n_shared_experts=1,
                 first_k_dense_replace=1, rope_parameters={**_SECTIONS, "partial_rotary_factor": 0.5}), **_SEES},
        "llama3",
    ),
    "GlmOcrForConditionalGeneration": (
        "GlmOcrConfig", {**_text("glm_ocr_text", head_dim=16, rope_parameters=_WIDE), **_SEES}, "llama3",
    ),
    "Exaone4_5_ForConditionalGeneration": (
        "Exaone4_5_Config",
        {**_text("exaone4", sliding_window=None, layer_types=["full_attention"] * 2), **_SEES}, "qwen2",
    ),
    "MiniCPMV4_6ForConditionalGeneration": (
        "MiniCPMV4_6Config",
        {**_text("qwen3_5_text", **DELTA, num_hidden_layers=4,
                 rope_parameters={**DEFAULT, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}), **_SEES},
        "qwen35",
    ),
    "GraniteSpeechForConditionalGeneration": (
        "GraniteSpeechConfig",
        {**_text("granite", **_GRANITE), "encoder_config": _CONFORMER, "projector_config": _QFORMER,
         "has_lora_adapter": False},
        "starcoder",
    ),
    "GraniteSpeechPlusForConditionalGeneration": (
        "GraniteSpeechPlusConfig",
        {**_text("granite", **_GRANITE), "encoder_config": {**_CONFORMER, "model_type": "granite_speech_plus_encoder"},
         "projector_config": _QFORMER, "has_lora_adapter": False},
        "starcoder",
    ),
    "LlavaForConditionalGeneration": (
        "LlavaConfig",
        {**_text("mistral", head_dim=16, sliding_window=None),
         "vision_config": {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                           "num_attention_heads": 2, "image_size": 16}},
        "tekken",
    ),
    "VoxtralForConditionalGeneration": (
        "VoxtralConfig", {**_text("llama", head_dim=16, rope_parameters=LLAMA3), "audio_config": AUDIO}, "tekken",
    ),
    "Qwen2AudioForConditionalGeneration": (
        "Qwen2AudioConfig", {**_text("qwen2"), "audio_config": AUDIO}, "qwen2",
    ),
    "AudioFlamingo3ForConditionalGeneration": (
        "AudioFlamingo3Config", {**_text("qwen2"), "audio_config": AUDIO}, "qwen2",
    ),
    "JanusForConditionalGeneration": (
        "JanusConfig",
        {**_text("llama"), "vision_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                                             "projection_dim": 32, "depth": 1, "image_size": 16, "mlp_ratio": 1.0},
         "vq_config": {"embed_dim": 8, "base_channels": 32, "num_embeddings": 16, "channel_multiplier": [1],
                       "num_res_blocks": 1, "projection_dim": 32, "image_token_embed_dim": 32, "num_patches": 4}},
        "llama3",
    ),
    "Qwen2_5OmniModel": (
        "Qwen2_5OmniConfig",
        {"enable_audio_output": False, "thinker_config": {
            **_text("qwen2_5_omni_text", rope_parameters=_SECTIONS), **_SEES, "audio_config": AUDIO}},
        "qwen2",
    ),
    "Qwen3OmniMoeForConditionalGeneration": (
        "Qwen3OmniMoeConfig",
        {"enable_audio_output": False, "thinker_config": {
            **_text("qwen3_omni_moe_text", **EXPERTS, head_dim=16, num_experts=4, norm_topk_prob=True,
                    rope_parameters=_WIDE), **_SEES, "audio_config": AUDIO}},
        "qwen2",
    ),
    "Qwen3ASRForConditionalGeneration": (
        "Qwen3ASRConfig", {**_text("qwen3", head_dim=16, rope_parameters=_WIDE), "audio_config": AUDIO}, "qwen2",
    ),
    "InternVLForConditionalGeneration": ("InternVLConfig", {**_text("qwen2"), "vision_config": _VIT}, "qwen2"),
    "InternVLForConditionalGeneration-qwen3": (
        "InternVLConfig", {**_text("qwen3", head_dim=16), "vision_config": _VIT}, "qwen2",
    ),
    "SmolVLMForConditionalGeneration": ("SmolVLMConfig", {**_text("llama"), "vision_config": _VIT}, "llama3"),
    "Idefics3ForConditionalGeneration": ("Idefics3Config", {**_text("llama"), "vision_config": _VIT}, "llama3"),
    "Lfm2VlForConditionalGeneration": (
        "Lfm2VlConfig",
        {**_text("lfm2", num_hidden_layers=3, layer_types=CONV, block_multiple_of=16, intermediate_size=90),
         "vision_config": {**_VIT, "model_type": "siglip2_vision_model", "num_patches": 4}, "projector_hidden_size": 8},
        "qwen2",
    ),
    "LightOnOcrForConditionalGeneration": (
        "LightOnOcrConfig",
        {**_text("qwen3", head_dim=16), "vision_config": {**_VIT, "model_type": "pixtral"}}, "qwen2",
    ),
}  # fmt: skip

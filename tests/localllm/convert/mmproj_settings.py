"""The settings of the tiny checkpoints with encoders (see `mmproj_make`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.localllm.convert import mmproj_embed as e
from tests.localllm.convert import mmproj_own as own

TEXT = {
    "vocab_size": 40, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
VIT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
QWEN = {"hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "spatial_merge_size": 2,
        "temporal_patch_size": 2}  # fmt: skip
WHISPER = {
    "hidden_size": 32, "d_model": 32, "intermediate_size": 128, "encoder_ffn_dim": 128, "num_hidden_layers": 3,
    "encoder_layers": 3, "num_attention_heads": 2, "encoder_attention_heads": 2, "num_mel_bins": 128,
    "max_source_positions": 1500,
}  # fmt: skip
HEARING = {
    "d_model": 32, "encoder_layers": 3, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "num_mel_bins": 128,
    "downsample_hidden_size": 32, "output_dim": 64,
}  # fmt: skip
COLORS = {"image_mean": [0.5, 0.25, 0.125], "image_std": [0.5, 0.75, 0.25]}
PIXTRAL = {"model_type": "pixtral", "head_dim": 16, "image_size": 512, "hidden_act": "silu"}
TOWER = ((r"vision_tower\.", "vision_tower.vision_model."),)
SIGHT_WITHOUT_HEAD = r"^(model\.)?(vision_tower\.(?!head)|multi_modal)"
SIGHT = r"^(model\.)?(visual|vision_|multi_modal|connector|mlp_AR|merger|embed_vision|embed_audio|audio_tower)"


@dataclass(frozen=True)
class Case:
    config: str = ""  # class names in transformers
    program: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    preparing: dict[str, Any] = field(default_factory=lambda: dict(COLORS))
    changes: dict[str, Any] = field(default_factory=dict)  # keys of config.json that differ from transformers' own
    spellings: tuple[tuple[str, str], ...] = ()  # from transformers' names of tensors to the hub's
    keeps: str = SIGHT
    tensors: list[list[Any]] = field(default_factory=list)  # of models that transformers lacks
    dtype: str = "F32"
    theirs: tuple[str, str] = ("", "")  # spelling of names that llama.cpp's converter reads, if not the hub's
    converts: bool = True  # llama.cpp's converter knows the class
    embed: tuple[e.Prepare, ...] = ()  # how transformers runs

    def told(self, config: dict[str, Any]) -> dict[str, Any]:
        return config | self.changes


def _qwen(name: str, vision: dict[str, Any], **more: Any) -> Case:
    settings = {"text_config": TEXT | ROPE, "vision_config": QWEN | vision}
    return Case(f"{name}Config", f"{name}ForConditionalGeneration", settings, **more)


# llama.cpp's converter skips language_model.*, where the row of [IMG_BREAK] is
_EMBEDDED = (r"^language_model\.", "")

CASES: dict[str, Case] = {
    "qwen2vl": _qwen(
        "Qwen2VL", {"depth": 3, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, "patch_size": 14}, embed=(e.qwen,)
    ),
    "qwen2.5vl": _qwen(
        "Qwen2_5_VL", {"depth": 4, "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [1, 3]},
        embed=(e.qwen,),
    ),
    "qwen2.5vl-bf16": _qwen(
        "Qwen2_5_VL", {"depth": 3, "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [1]}, dtype="BF16"
    ),
    "qwen3vl": _qwen(
        "Qwen3VL",
        {"depth": 3, "patch_size": 16, "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2]},
        embed=(e.qwen,),
    ),
    "qwen3.5": _qwen("Qwen3_5", {"depth": 3, "patch_size": 16, "num_position_embeddings": 36}, embed=(e.qwen,)),
    "gemma3": Case(
        "Gemma3Config", "Gemma3ForConditionalGeneration",
        {"text_config": TEXT, "mm_tokens_per_image": 16, "vision_config": VIT | {"image_size": 112, "patch_size": 14}},
        COLORS | {"image_seq_length": 16}, spellings=TOWER, keeps=SIGHT_WITHOUT_HEAD,
        embed=(e.square,),
    ),
    "gemma4": Case(
        "Gemma4Config", "Gemma4ForConditionalGeneration",
        {"text_config": TEXT | {"vocab_size_per_layer_input": 40}, "vision_config": VIT | {
            "num_key_value_heads": 2, "head_dim": 16, "patch_size": 16, "position_embedding_size": 40,
            "use_clipped_linears": True,
        }, "audio_config": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
                            "output_proj_dims": 48}},
        embed=(e.gemma4, e.gemma4_audio,),
    ),
    "gemma4-unified": Case(
        "Gemma4UnifiedConfig", "Gemma4UnifiedForConditionalGeneration",
        {"text_config": TEXT | {"vocab_size_per_layer_input": 40},
         "vision_config": {"mm_embed_dim": 32, "output_proj_dims": 32, "num_soft_tokens": 4, "mm_posemb_size": 96},
         "audio_config": {"audio_embed_dim": 640}},
        embed=(e.gemma4, e.unified_audio,),
    ),
    "idefics3": Case(
        "Idefics3Config", "Idefics3ForConditionalGeneration",
        {"text_config": TEXT | {"model_type": "llama"}, "scale_factor": 2,
         "vision_config": VIT | {"image_size": 128, "patch_size": 16}},
        COLORS | {"size": {"longest_edge": 512}},
        embed=(e.idefics,),
    ),
    "smolvlm": Case(
        "SmolVLMConfig", "SmolVLMForConditionalGeneration",
        {"text_config": TEXT | {"model_type": "llama"}, "scale_factor": 2,
         "vision_config": VIT | {"image_size": 128, "patch_size": 16}},
        COLORS | {"size": {"longest_edge": 256}},
        embed=(e.idefics,),
    ),
    "pixtral": Case(
        "LlavaConfig", "LlavaForConditionalGeneration",
        {"text_config": TEXT | {"model_type": "mistral"}, "image_token_index": 10, "vision_feature_layer": -1,
         "vision_feature_select_strategy": "full", "vision_config": VIT | PIXTRAL | {"patch_size": 16}},
        keeps=SIGHT + "|embed_tokens", theirs=_EMBEDDED,
        embed=(e.pixtral,),
    ),
    "mistral3": Case(
        "Mistral3Config", "Mistral3ForConditionalGeneration",
        {"text_config": TEXT | {"model_type": "mistral"}, "spatial_merge_size": 2,
         "vision_config": VIT | PIXTRAL | {"patch_size": 14}},
        keeps=SIGHT + "|embed_tokens", theirs=_EMBEDDED,
        embed=(e.pixtral,),
    ),
    "internvl": Case(settings=own.INTERN, tensors=own.intern()),
    "internvl-hf": Case(
        "InternVLConfig", "InternVLForConditionalGeneration",
        {"text_config": TEXT | {"model_type": "qwen2"},
         "vision_config": VIT | {"image_size": [56, 56], "patch_size": [14, 14], "attention_bias": True,
                                 "layer_norm_eps": 1e-6, "hidden_act": "gelu"}},
        converts=False,
        embed=(e.square,),
    ),
    "lfm2": Case(
        "Lfm2VlConfig", "Lfm2VlForConditionalGeneration",
        {"text_config": TEXT | {"model_type": "lfm2"}, "projector_hidden_size": 48,
         "vision_config": VIT | {"patch_size": 16, "num_patches": 64, "layer_norm_eps": 1e-6}},
        keeps=SIGHT_WITHOUT_HEAD, spellings=TOWER,
        embed=(e.lfm2,),
    ),
    "paddleocr": Case(
        "PaddleOCRVLConfig", "PaddleOCRVLForConditionalGeneration",
        {"text_config": TEXT | ROPE, "vision_config": VIT | {
            "image_size": 112, "patch_size": 14, "architectures": ["PaddleOCRVisionModel"]}},
        COLORS | {"min_pixels": 3136, "max_pixels": 100352},
        embed=(e.paddle,),
    ),
    "minicpmv4_6": Case(
        "MiniCPMV4_6Config", "MiniCPMV4_6ForConditionalGeneration",
        {"text_config": TEXT, "insert_layer_id": 0, "vision_config": VIT | {"image_size": 140, "patch_size": 14}},
        COLORS | {"scale_resolution": 112},
        embed=(e.minicpm,),
    ),
    "deepseekocr": Case(settings=own.DEEPSEEK, tensors=own.deepseek()),
    "voxtral": Case(
        "VoxtralConfig", "VoxtralForConditionalGeneration",
        {"text_config": TEXT | {"model_type": "llama"}, "audio_config": WHISPER},
        embed=(e.whisper,),
    ),
    "ultravox": Case(settings=own.ULTRAVOX, tensors=own.ultravox()),
    "qwen2audio": Case(
        "Qwen2AudioConfig", "Qwen2AudioForConditionalGeneration",
        {"text_config": TEXT | {"model_type": "qwen2"}, "audio_config": WHISPER},
        embed=(e.whisper,),
    ),
    "qwen3asr": Case(settings=own.ASR, tensors=own.asr("thinker.audio_tower.", "proj")),
    "qwen2.5omni": Case(settings=own.OMNI25, tensors=own.omni25()),
    "qwen3omni": Case(settings=own.OMNI3, tensors=own.omni3(), theirs=(r"^thinker\.visual", "model.visual")),
    "qwen3asr-hf": Case(
        "Qwen3ASRConfig", "Qwen3ASRForConditionalGeneration",
        {"text_config": TEXT, "audio_config": HEARING}, converts=False, embed=(e.qwen3a,),
    ),
}  # fmt: skip

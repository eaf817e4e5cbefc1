"""Tiny checkpoints with encoders whose names of tensors are not those that transformers saves: tensors and settings."""

from __future__ import annotations

from typing import Any

Tensors = list[list[Any]]  # name, shape, mean of the random values
TEXT = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 40}


def _weights(prefix: str, **shapes: tuple[int, ...]) -> Tensors:
    """Return matrices with biases, and norms, by the names of their modules; `__` means a dot."""
    found: Tensors = []
    for key, shape in shapes.items():
        name = prefix + key.replace("__", ".")
        found.append([f"{name}.weight", list(shape), float(len(shape) == 1)])
        found.append([f"{name}.bias", [shape[0]], 0.0])
    return found


INTERN = {
    "architectures": ["InternVLChatModel"], "model_type": "internvl_chat", "downsample_ratio": 0.5,
    "min_dynamic_patch": 1, "max_dynamic_patch": 6, "llm_config": TEXT, "vision_config": {
        "architectures": ["InternVisionModel"], "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 2, "image_size": 56, "patch_size": 14, "layer_norm_eps": 1e-6, "hidden_act": "gelu",
    },
}  # fmt: skip


def intern() -> Tensors:
    tables = "vision_model.embeddings."
    found = [[f"{tables}class_embedding", [1, 1, 32], 0.0], [f"{tables}position_embedding", [1, 17, 32], 0.0]]
    found += _weights(tables, patch_embedding=(32, 3, 14, 14))
    for n in range(4):
        layer = f"vision_model.encoder.layers.{n}."
        found += _weights(layer, attn__qkv=(96, 32), attn__proj=(32, 32), mlp__fc1=(64, 32), mlp__fc2=(32, 64))
        found += _weights(layer, norm1=(32,), norm2=(32,))
        found += [[f"{layer}ls{i}", [32], 0.0] for i in (1, 2)]
    return [*found, *_weights("mlp1.", **{"0": (128,), "1": (64, 128), "3": (64, 64)})]


DEEPSEEK = {
    "architectures": ["DeepseekOCRForCausalLM"], "model_type": "DeepseekOCR", "language_config": TEXT,
    "vision_config": {"image_size": 1024, "model_type": "vision", "width": {
        "clip-l-14-224": {"heads": 2, "image_size": 224, "layers": 4, "patch_size": 14, "width": 32},
        "sam_vit_b": {"heads": 2, "layers": 4, "width": 32, "global_attn_indexes": [2, 3]},
    }},
    **TEXT,
}  # fmt: skip


def deepseek() -> Tensors:
    sam, clip = "model.sam_model.", "model.vision_model."
    found = [
        [f"{sam}pos_embed", [1, 64, 64, 32], 0.0], ["model.image_newline", [64], 0.0],
        ["model.view_seperator", [64], 0.0], [f"{clip}embeddings.class_embedding", [32], 0.0],
        [f"{clip}embeddings.patch_embedding.weight", [32, 3, 14, 14], 0.0],
        [f"{clip}embeddings.position_embedding.weight", [257, 32], 0.0], [f"{sam}neck.0.weight", [32, 32, 1, 1], 0.0],
        [f"{sam}neck.2.weight", [32, 32, 3, 3], 0.0], [f"{sam}net_2.weight", [32, 32, 3, 3], 0.0],
        [f"{sam}net_3.weight", [32, 32, 3, 3], 0.0],
    ]  # fmt: skip
    found += _weights(sam, patch_embed__proj=(32, 3, 16, 16), neck__1=(32,), neck__3=(32,))
    found += _weights(clip, pre_layrnorm=(32,)) + _weights("model.projector.", layers=(64, 64))
    for n in range(4):
        side = 64 if n in (2, 3) else 14
        layer = f"{sam}blocks.{n}."
        found += [[f"{layer}attn.rel_pos_{x}", [2 * side - 1, 16], 0.0] for x in "hw"]
        found += _weights(layer, attn__qkv=(96, 32), attn__proj=(32, 32), mlp__lin1=(64, 32), mlp__lin2=(32, 64))
        found += _weights(layer, norm1=(32,), norm2=(32,))
    for n in range(4):
        layer = f"{clip}transformer.layers.{n}."
        found += _weights(layer, self_attn__qkv_proj=(96, 32), self_attn__out_proj=(32, 32), layer_norm1=(32,))
        found += _weights(layer, layer_norm2=(32,), mlp__fc1=(64, 32), mlp__fc2=(32, 64))
    return found


_AUDIO = {
    "d_model": 32, "encoder_layers": 4, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "num_mel_bins": 128,
    "num_hidden_layers": 4, "downsample_hidden_size": 32, "output_dim": 64,
}  # fmt: skip


def _whisper(prefix: str) -> Tensors:
    """Return the layers of Whisper's encoder."""
    found: Tensors = []
    for n in range(4):
        layer = f"{prefix}layers.{n}."
        heads = {f"self_attn__{x}_proj": (32, 32) for x in ("q", "k", "v", "out")}
        found += _weights(layer, self_attn_layer_norm=(32,), final_layer_norm=(32,), fc1=(64, 32), fc2=(32, 64))
        found += [pair for pair in _weights(layer, **heads) if not pair[0].endswith("k_proj.bias")]
    return found


ULTRAVOX = {
    "architectures": ["UltravoxModel"], "model_type": "ultravox", "hidden_size": 48, "stack_factor": 8,
    "projector_act": "swiglu", "text_config": TEXT, "audio_config": {
        "model_type": "whisper", "d_model": 32, "encoder_layers": 4, "encoder_attention_heads": 2,
        "encoder_ffn_dim": 64, "num_hidden_layers": 4, "num_mel_bins": 80,
    },
}  # fmt: skip


def ultravox() -> Tensors:
    tower, projector = "audio_tower.", "multi_modal_projector."
    return [
        *_weights(tower, conv1=(32, 80, 3), conv2=(32, 32, 3), layer_norm=(32,)), *_whisper(tower),
        [f"{tower}embed_positions.weight", [1500, 32], 0.0], [f"{projector}linear_1.weight", [96, 256], 0.0],
        [f"{projector}linear_2.weight", [64, 48], 0.0], [f"{projector}ln_pre.weight", [256], 1.0],
        [f"{projector}ln_mid.weight", [48], 1.0],
    ]  # fmt: skip


ASR = {
    "architectures": ["Qwen3ASRForConditionalGeneration"], "model_type": "qwen3_asr",
    "thinker_config": {"audio_config": _AUDIO, "text_config": TEXT},
}  # fmt: skip


def asr(tower: str, projector: str) -> Tensors:
    convolutions = {f"conv2d{n}": (32, 1 if n == 1 else 32, 3, 3) for n in (1, 2, 3)}
    return [
        *_weights(tower, **convolutions, ln_post=(32,)), [f"{tower}conv_out.weight", [32, 512], 0.0], *_whisper(tower),
        *_weights(tower, **{f"{projector}1": (32, 32), f"{projector}2": (64, 32)}),
    ]  # fmt: skip


_VISION = {
    "depth": 3, "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 64, "num_heads": 2,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
OMNI25 = {
    "architectures": ["Qwen2_5OmniModel"], "model_type": "qwen2_5_omni", "thinker_config": {
        "audio_config": _AUDIO, "text_config": TEXT,
        "vision_config": _VISION | {"patch_size": 14, "fullatt_block_indexes": [1]},
    },
}  # fmt: skip


def omni25() -> Tensors:
    visual, tower = "thinker.visual.", "thinker.audio_tower."
    found: Tensors = [
        [f"{visual}patch_embed.proj.weight", [32, 3, 2, 14, 14], 0.0], [f"{visual}merger.ln_q.weight", [32], 1.0],
        *_weights(visual, merger__mlp__0=(128, 128), merger__mlp__2=(64, 128)),
        *_weights(tower, conv1=(32, 128, 3), conv2=(32, 32, 3), ln_post=(32,), proj=(64, 32)), *_whisper(tower),
        [f"{tower}audio_bos_eos_token.weight", [2, 64], 0.0], ["thinker.model.embed_tokens.weight", [40, 64], 0.0],
        ["talker.codec_head.weight", [40, 64], 0.0], ["token2wav.code2wav_bigvgan_model.a.weight", [4, 4], 0.0],
    ]  # fmt: skip
    for n in range(3):
        layer = f"{visual}blocks.{n}."
        found += [[f"{layer}norm{i}.weight", [32], 1.0] for i in (1, 2)]
        found += _weights(layer, attn__qkv=(96, 32), attn__proj=(32, 32), mlp__gate_proj=(64, 32))
        found += _weights(layer, mlp__up_proj=(64, 32), mlp__down_proj=(32, 64))
    return found


OMNI3 = {
    "architectures": ["Qwen3OmniMoeForConditionalGeneration"], "model_type": "qwen3_omni_moe", "thinker_config": {
        "audio_config": _AUDIO, "text_config": TEXT, "vision_config": _VISION | {
            "patch_size": 16, "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2],
        },
    },
}  # fmt: skip


def omni3() -> Tensors:
    visual = "thinker.visual."
    found = [
        *_weights(visual, patch_embed__proj=(32, 3, 2, 16, 16)), *_weights(visual, merger__ln_q=(32,)),
        *_weights(visual, merger__mlp__0=(128, 128), merger__mlp__2=(64, 128)),
        [f"{visual}pos_embed.weight", [36, 32], 0.0], *asr("thinker.audio_tower.", "proj"),
        ["talker.codec_head.weight", [40, 64], 0.0],
    ]  # fmt: skip
    for n in range(3):
        layer = f"{visual}blocks.{n}."
        found += _weights(layer, norm1=(32,), norm2=(32,), attn__qkv=(96, 32), attn__proj=(32, 32))
        found += _weights(layer, mlp__linear_fc1=(64, 32), mlp__linear_fc2=(32, 64))
    for n in range(2):
        merger = f"{visual}merger_list.{n}."
        found += _weights(merger, ln_q=(128,), mlp__0=(128, 128), mlp__2=(64, 128))
    return found

"""Tiny checkpoints of Qwen3-TTS and Pocket TTS for `hf_own`: the language model, and some tensors of the
audio components.
"""

from __future__ import annotations

from typing import Any

from tests.localllm.convert.hf_tokenizers import VOCABULARY

WIDTH, CODES = 16, 1100  # the last 1024 codes are special tokens, including EOS

_TALKER = {
    "vocab_size": CODES, "text_vocab_size": VOCABULARY, "hidden_size": WIDTH, "text_hidden_size": 24,
    "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu",
    "rope_scaling": {"mrope_section": [4, 2, 2], "interleaved": True, "rope_type": "default", "type": "default"},
    "codec_bos_id": 1049, "codec_eos_token_id": 1050, "codec_pad_id": 1048, "codec_language_id": {"english": 1051},
    "code_predictor_config": {"vocab_size": 8}, "attention_bias": False,
}  # fmt: skip
_QWEN = {
    "architectures": ["Qwen3TTSForConditionalGeneration"], "model_type": "qwen3_tts", "talker_config": _TALKER,
    "speaker_encoder_config": {"enc_dim": 8}, "tts_bos_token_id": 1, "tts_eos_token_id": 2, "tts_pad_token_id": 0,
}  # fmt: skip


def _qwen() -> list[list[Any]]:
    found: dict[str, list[int]] = {
        "model.text_embedding.weight": [VOCABULARY, 24], "model.codec_embedding.weight": [CODES, WIDTH],
        "text_projection.linear_fc1.weight": [24, 24], "text_projection.linear_fc1.bias": [24],
        "text_projection.linear_fc2.weight": [WIDTH, 24], "text_projection.linear_fc2.bias": [WIDTH],
        "codec_head.weight": [CODES, WIDTH], "model.norm.weight": [WIDTH],
        "code_predictor.model.norm.weight": [8],
    }  # fmt: skip
    for layer in range(2):
        own: dict[str, list[int]] = {
            "input_layernorm": [WIDTH], "post_attention_layernorm": [WIDTH], "self_attn.q_proj": [32, WIDTH],
            "self_attn.k_proj": [16, WIDTH], "self_attn.v_proj": [16, WIDTH], "self_attn.o_proj": [WIDTH, 32],
            "self_attn.q_norm": [16], "self_attn.k_norm": [16], "mlp.gate_proj": [32, WIDTH],
            "mlp.up_proj": [32, WIDTH], "mlp.down_proj": [WIDTH, 32],
        }  # fmt: skip
        found |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in own.items()}
    tensors = [[f"talker.{name}", shape, 1.0 if "norm" in name else 0.0] for name, shape in found.items()]
    return [*tensors, ["speaker_encoder.fc.weight", [8, 8], 0.0]]


# -- Pocket TTS: no config.json, and a head size of 64 ---------------------------------------------------------------


def _pocket() -> list[list[Any]]:
    width, latent = 128, 8
    found: dict[str, list[int]] = {
        "conditioner.embed.weight": [VOCABULARY, width], "bos_emb": [latent], "bos_before_voice": [1, 1, width],
        "input_linear.weight": [width, latent], "out_norm.weight": [width], "out_norm.bias": [width],
        "out_eos.weight": [1, width], "out_eos.bias": [1], "emb_mean": [latent], "emb_std": [latent],
        "speaker_proj_weight": [width, 16], "flow_net.cond_embed.weight": [16, width],
    }  # fmt: skip
    for layer in range(2):
        own: dict[str, list[int]] = {
            "norm1.weight": [width], "norm1.bias": [width], "norm2.weight": [width], "norm2.bias": [width],
            "self_attn.in_proj.weight": [3 * width, width], "self_attn.out_proj.weight": [width, width],
            "linear1.weight": [192, width], "linear2.weight": [width, 192],
        }  # fmt: skip
        found |= {f"transformer.layers.{layer}.{name}": shape for name, shape in own.items()}
    tensors = [[f"flow_lm.{name}", shape, 1.0 if "norm" in name else 0.0] for name, shape in found.items()]
    # tensors whose shapes llama.cpp's converter reads
    codec: dict[str, list[int]] = {"norm1.weight": [64], "linear1.weight": [96, 64]}
    return tensors + [
        [f"mimi.encoder_transformer.transformer.layers.0.{name}", shape, 0.0] for name, shape in codec.items()
    ]


SPEECH: dict[str, tuple[dict[str, Any], list[Any], str]] = {
    "qwen3tts": (_QWEN, _qwen(), "qwen2"), "pockettts": ({}, _pocket(), "pieces"),
}  # fmt: skip

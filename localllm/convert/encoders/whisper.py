"""Rows of models whose encoder of sound is Whisper's: Voxtral, Ultravox and Qwen2-Audio."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from localllm.convert.encoders import keys as k
from localllm.convert.encoders.parts import column
from localllm.convert.encoders.row import Encoder, EncoderRow, Stack
from localllm.convert.recipe import Layer, taken

LAYER: Layer = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj", "ln1": "self_attn_layer_norm", "ln2": "final_layer_norm", "ffn_up": "fc1",
    "ffn_down": "fc2",
}  # fmt: skip
SIZES = {
    "d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120, "num_mel_bins": 128,
}  # fmt: skip
FORMATS = ((r"^a\.conv.*\.weight$", "F16"),)
_TOP: Layer = {
    **{f"a.conv1d.{n}.weight": f"audio_tower.conv{n}.weight" for n in (1, 2)},
    **{f"a.conv1d.{n}.bias": taken(f"audio_tower.conv{n}.bias", column) for n in (1, 2)},
    "a.position_embd.weight": "audio_tower.embed_positions.weight", "a.post_ln": "audio_tower.layer_norm",
}  # fmt: skip


def _row(
    name: str, projector: str, top: Layer, defaults: Mapping[str, Any] = MappingProxyType({}), **keys: Any
) -> EncoderRow:
    own: Mapping[str, Any] = {
        "audio.num_mel_bins": k.own_count("num_mel_bins"),
        "audio.attention.layer_norm_epsilon": k.own("layer_norm_eps", otherwise=1e-5),
        **{f"audio.{key}".replace("__", "."): value for key, value in keys.items()},
    }
    encoder = Encoder(
        kind="audio", projector=projector, tables=("audio_config",), top={**_TOP, **top}, keys=own,
        defaults=defaults,
        stacks=(Stack("audio_tower.layers.{}.", "a.blk.{}.", LAYER),),
    )  # fmt: skip
    return EncoderRow(
        classes=(name,), encoders=(encoder,), starts=("audio_tower.", "multi_modal_projector."), formats=FORMATS
    )


_TWO: Layer = {f"mm.a.mlp.{n}": f"multi_modal_projector.linear_{n}" for n in (1, 2)}
_ULTRAVOX: Layer = {
    **_TWO, "mm.a.norm_pre": "multi_modal_projector.ln_pre", "mm.a.norm_mid": "multi_modal_projector.ln_mid",
}  # fmt: skip

ROWS = (
    _row("VoxtralForConditionalGeneration", "voxtral", _TWO, SIZES, projector__stack_factor=4),
    _row("UltravoxModel", "ultravox", _ULTRAVOX, projector__stack_factor=k.count("stack_factor")),
    _row("Qwen2AudioForConditionalGeneration", "qwen2a", {"mm.a.fc": "multi_modal_projector.linear"}, SIZES),
)

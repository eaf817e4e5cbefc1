"""The recipe of MiMo V2."""

from __future__ import annotations

from typing import Any

import numpy as np

from localllm.base.printable import printable
from localllm.convert import tensor as t
from localllm.convert.errors import ConvertError
from localllm.convert.hf_config import HfConfig
from localllm.convert.recipe import Keys, Raw, Recipe
from localllm.convert.recipes.shared import named_kinds, slides_of
from localllm.convert.tensor import LazyTensor

_SINKS = {"attn_sinks.weight": ("self_attn.attention_sink_bias", "self_attn.sinks")}


def _mimo_kinds(config: HfConfig) -> list[str]:
    """Return the attention kind of each layer: from the 0/1 list in checkpoints of 2025 (1: sliding-window), else by
    the default period."""
    if config.get("hybrid_layer_pattern") is None:
        layers = range(config.layers)
        return named_kinds([layer > 0 and (layer + 1) % 6 != 0 for layer in layers])
    flags = config.per_layer("hybrid_layer_pattern", "0 or 1, {} times", lambda flag: flag in (0, 1))
    return named_kinds([flag == 1 for flag in flags])


def _mimo_kv_heads(config: HfConfig) -> np.ndarray:
    """Return the number of KV heads by layer. By default, sliding-window layers have twice the number."""
    full = config.needed("num_key_value_heads")
    few = config.integer("swa_num_key_value_heads") or 2 * full
    return np.array([few if slide else full for slide in slides_of(config)], np.int32)


def _mimo_window(config: HfConfig) -> int:
    """Return the sliding-window size including the current position, which checkpoints of 2025 do not count."""
    others = config.integer("sliding_window_size")
    return others + 1 if others else config.needed("sliding_window")


def _value_scale(config: HfConfig) -> float | None:
    told = "attention_value_scale" in config.values  # null: values are not scaled
    return config.real("attention_value_scale") if told else 0.707


def _mimo_alike(config: HfConfig) -> str | None:
    """Require the same head sizes in layers with and without sliding-window attention."""
    rope = config.inner("rope_parameters")
    shares = {rope.inner(x).real("partial_rotary_factor") for x in ("full_attention", "sliding_attention")}
    if len(shares) > 1:
        return "partial_rotary_factor is not the same with a window and without; the GGUF architecture has one for both"
    for name in ("num_attention_heads", "head_dim", "v_head_dim"):
        if config.integer(f"swa_{name}") not in (None, config.integer(name)):
            return f"swa_{name} is not {name}; the GGUF architecture has one for both"
    return None


def _of_cards(raw: Raw, config: HfConfig) -> Raw:
    """Dequantize the fused QKV matrices of MiMo V2.5."""
    for name, parts in raw.items():
        scales = raw.get(f"{name}_scale_inv")
        if name.endswith("self_attn.qkv_proj.weight") and parts[0].format == "F8_E4M3" and scales:
            raw[name] = [_of_card(parts[0], t.as_float32(scales[0]), config)]
    return {name: parts for name, parts in raw.items() if not name.endswith("self_attn.qkv_proj.weight_scale_inv")}


def _of_card(codes: LazyTensor, scales: LazyTensor, config: HfConfig) -> LazyTensor:
    """Return MiMo V2.5's fused QKV matrix, which its checkpoints store in tensor-parallel shards.

    Each shard has a part of the queries, keys and values, with scales for blocks of 128 rows.
    """
    rows, heads = codes.shape[0], config.heads
    key, value = config.needed("head_dim"), config.needed("v_head_dim")
    counts = [config.integer(name) or 0 for name in ("num_key_value_heads", "swa_num_key_value_heads")]
    sizes = [(heads * key, few * key, few * value) for few in counts if heads * key + few * (key + value) == rows]
    for cards in (8, 4):
        each = rows // cards
        blocks = -(-each // 128)
        if sizes and not any(size % cards for size in sizes[0]) and scales.shape[0] == cards * blocks:
            numbers = np.arange(rows)
            whole = t.scaled_fp8(codes, scales, (128, 128), numbers // each * blocks + numbers % each // 128)
            ends = np.cumsum([size // cards for size in sizes[0]])
            shares = np.split(numbers.reshape(cards, each), ends[:-1], axis=1)
            return t.picked(whole, np.concatenate([share.reshape(-1) for share in shares]), rows)
    raise ConvertError(
        f"tensor '{printable(codes.name)}' {codes.shape} with scales {scales.shape} is not in shares of 4 or 8 cards; "
        "config.json does not match these weights"
    )


_MIMO_KEYS: Keys = {
    "attention.head_count_kv": _mimo_kv_heads,
    "attention.value_length": "v_head_dim",
    "attention.value_scale": _value_scale,
    "attention.sliding_window": _mimo_window,
}
_MIMO_FIXED = {
    "attention_bias": False,
    "n_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_shared_experts": 0,
}
_MIMO_DEFAULTS: dict[str, Any] = {
    "head_dim": 192,
    "v_head_dim": 128,
    "sliding_window": 129,
    "layer_types": _mimo_kinds,
    "rope_theta": 5e6,
    "rope_local_base_freq": lambda config: config.real("swa_rope_theta") or 1e4,
    "partial_rotary_factor": 0.334,
    "rms_norm_eps": lambda config: config.real("layernorm_epsilon") or 1e-5,
}


ROWS = (
    Recipe(
        "mimo2", ("MiMoV2FlashForCausalLM",), _SINKS, keys=_MIMO_KEYS, defaults=_MIMO_DEFAULTS, fixed=_MIMO_FIXED,
        checks=(_mimo_alike,),
    ),
    Recipe(
        "mimo2", ("MiMoV2ForCausalLM",), {**_SINKS, "attn_qkv": "self_attn.qkv_proj"}, keys=_MIMO_KEYS,
        fixed=_MIMO_FIXED, checks=(_mimo_alike,), defaults=_MIMO_DEFAULTS, others=("speech_embeddings.",),
        raw=_of_cards,
    ),
)  # fmt: skip

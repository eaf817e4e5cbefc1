"""The recipes of architectures with gated delta nets (Qwen 3 Next and 3.5) or short convolutions (LFM 2)."""

from __future__ import annotations

from typing import Any

import numpy as np

from localllm.convert import tensor as t
from localllm.convert.changes import Groups, decay, height, in_turn, numbered, of_groups, squeezed
from localllm.convert.hf_config import HfConfig, Reader
from localllm.convert.modules import width_keys
from localllm.convert.recipe import Change, Key, Keys, Recipe, Tensors, taken
from localllm.convert.recipes.shared import NORMED_SPARSE
from localllm.convert.tensor import LazyTensor
from localllm.models.reading.mixers import RECURRENT_KEY


def is_kind(*kinds: str, otherwise: Reader[Any] = lambda config: None) -> Reader[Any]:
    """Return a reader of a mask of the layers with these kinds in `layer_types`, or of another value without them."""

    def layers(config: HfConfig) -> Any:
        found, count = config.get("layer_types"), config.layers
        if found is None:
            return otherwise(config)
        if not isinstance(found, list) or len(found) != count:
            raise config.error("layer_types", len(found) if isinstance(found, list) else found, f"{count} kinds")
        return np.array([kind in kinds for kind in found])

    return layers


def _delta_heads(config: HfConfig) -> tuple[int, int, int, int]:
    """Return the number of key heads, the number of value heads per key head, and the head widths of keys and
    values."""
    groups, heads = config.needed("linear_num_key_heads"), config.needed("linear_num_value_heads")
    return groups, heads // groups, config.needed("linear_key_head_dim"), config.needed("linear_value_head_dim")


def _qkvz(config: HfConfig) -> Groups:
    groups, each, key, value = _delta_heads(config)
    return groups, (key, key, each * value, each * value)


def tiled(keys: int, rows: bool) -> Change:
    """Return a change that reorders value heads from grouped by key head to interleaved over key heads. The value rows
    start after `keys` times the rows of all keys. If `rows` is true, a head has one row per value; otherwise it has a
    single row."""

    def change(parts: Tensors, config: HfConfig) -> LazyTensor:
        index = _tiled(parts[0], config, keys, rows, height(parts[0]))
        return t.picked(parts[0], index, len(index))

    return change


def tiled_columns(parts: Tensors, config: HfConfig) -> LazyTensor:
    """Reorder the columns in the same way as `tiled`."""
    return t.picked_columns(parts[0], _tiled(parts[0], config, 0, True, parts[0].shape[-1]))


def _tiled(tensor: LazyTensor, config: HfConfig, keys: int, wide: bool, count: int) -> np.ndarray:
    groups, each, key, value = _delta_heads(config)
    before, width = keys * groups * key, value if wide else 1
    values = numbered(tensor, count - before, groups, each * width)
    order = values.reshape(groups, each, width).swapaxes(0, 1).reshape(-1)
    return np.concatenate([np.arange(before), before + order])


DELTA_KEYS: Keys = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.inner_size": lambda config: config.needed("linear_value_head_dim") * config.needed("linear_num_value_heads"),
    "full_attention_interval": lambda config: config.integer("full_attention_interval") or 4,
    RECURRENT_KEY: is_kind("linear_attention"),
}
_QWEN3_NEXT = {
    "attn_qkv": taken("linear_attn.in_proj_qkvz", of_groups(_qkvz, 0, 1, 2)),
    "attn_gate": taken("linear_attn.in_proj_qkvz", of_groups(_qkvz, 3)),
}
QWEN35 = {
    "attn_qkv": tiled(2, rows=True),
    "attn_gate": tiled(0, rows=True),
    "ssm_beta": tiled(0, rows=False),
    "ssm_alpha": tiled(0, rows=False),
    "ssm_conv1d": in_turn(squeezed, tiled(2, rows=True)),
    "ssm_dt": tiled(0, rows=False),
    "ssm_a": in_turn(decay, tiled(0, rows=False)),
    "ssm_out": tiled_columns,
}


def sections(config: HfConfig) -> np.ndarray:
    """Return the number of rotated pairs for time, height and width of an image. The sections do not change text
    positions."""
    found = config.inner("rope_parameters", "rope_scaling").get("mrope_section")
    whole = isinstance(found, list) and len(found) <= 4 and all(type(n) is int and 0 <= n < 1024 for n in found)
    sections = found if whole else [11, 11, 10]  # transformers' default
    return np.array([*sections, 0, 0, 0, 0][:4], np.int32)


def kv_heads(attends: Reader[np.ndarray]) -> Key:
    """Return the number of KV heads of each layer, 0 in layers without attention."""
    return lambda config: np.where(attends(config), config.needed("num_key_value_heads"), 0).astype(np.int32)


def attending(config: HfConfig) -> np.ndarray:
    """Return which layers have attention, from `layer_types`."""
    found: np.ndarray | None = is_kind("attention", "full_attention")(config)
    if found is None:
        raise config.error("layer_types", None, "the kinds of the layers")
    return found


_LFM2_KEYS: Keys = {
    "attention.head_count_kv": kv_heads(attending),
    "shortconv.l_cache": "conv_L_cache",
}


def _adjusted_width(config: HfConfig) -> int:
    """Return LFM2's feed-forward width. config.json has the width before it is scaled by 2/3 and rounded."""
    width = config.needed("block_ff_dim", "intermediate_size")
    if config.flag("block_auto_adjust_ff_dim") is False:
        return width
    factor, multiple = config.real("block_ffn_dim_multiplier"), config.needed("block_multiple_of")
    width = int((1.0 if factor is None else factor) * int(2 * width / 3))
    return -(-width // multiple) * multiple


QWEN35_ROW: dict[str, Any] = {
    "changes": QWEN35,
    "norm_offset": 1.0,
    "plain_norms": ("ssm_norm",),
    "defaults": {"partial_rotary_factor": 0.25},
    "keys": {**DELTA_KEYS, "rope.dimension_sections": sections},
}

ROWS = (
    Recipe(
        "qwen3next", ("Qwen3NextForCausalLM",), _QWEN3_NEXT, norm_offset=1.0, plain_norms=("ssm_norm",),
        defaults={"partial_rotary_factor": 0.25}, keys=DELTA_KEYS, fixed=NORMED_SPARSE,
    ),
    Recipe("qwen35", ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"), **QWEN35_ROW),
    Recipe("qwen35moe", ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"), **QWEN35_ROW),
    Recipe(
        "lfm2", ("Lfm2ForCausalLM", "LFM2ForCausalLM", "Lfm2Model", "Lfm2VlForConditionalGeneration"),
        keys={**_LFM2_KEYS, "feed_forward_length": _adjusted_width}, fixed={"conv_bias": False}, dense=width_keys,
    ),
    Recipe(
        "lfm2moe", ("Lfm2MoeForCausalLM",), keys=_LFM2_KEYS,
        fixed={"norm_topk_prob": True, "routed_scaling_factor": 1.0, "conv_bias": False},
    ),
)  # fmt: skip

"""The recipe of Step 3.5.

Models that transformers does not support keep the tensor names of their reference implementation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.convert.hf_config import HfConfig
from localllm.convert.recipe import Key, Keys, Recipe, by_name, real
from localllm.convert.recipes.shared import head_width


def _listed(config: HfConfig, name: str) -> list[float] | None:
    """Return a per-layer list from config.json without the entries of the multi-token prediction heads; null counts as
    0.
    """
    found, layers = config.get(name), config.layers
    if found is None:
        return None
    right = isinstance(found, list) and len(found) >= layers
    if not right or not all(x is None or (type(x) in (int, float) and 0 <= x < 1e30) for x in found):
        raise config.error(name, found, f"{layers} numbers")
    return [float(x or 0.0) for x in found[:layers]]


def _limits(name: str) -> Key:
    """Return a reader of the SwiGLU limits by layer, if config.json has any."""
    return lambda config: None if (found := _listed(config, name)) is None else np.array(found, np.float32)


def _step_kinds(config: HfConfig) -> list[str]:
    """Return the attention kind of each layer, without multi-token prediction heads."""
    found, layers = config.get("layer_types"), config.layers
    kinds = ("full_attention", "sliding_attention")
    if not isinstance(found, list) or len(found) < layers or not all(kind in kinds for kind in found):
        raise config.error("layer_types", found, f"{' or '.join(kinds)}, {layers} times")
    return found[:layers]


def _in_windows(name: str, *own: str) -> Key:
    """Return the number of heads of each layer. A nested table gives the number for sliding-window layers."""

    def numbers(config: HfConfig) -> NDArray[np.int32]:
        table = config.inner("attention_other_setting")
        full = config.needed(name, *own)
        few = config.integer("num_sliding_attention_heads") if name == "num_attention_heads" else None
        few = few or table.integer(name, *own) or full
        return np.array([few if kind == "sliding_attention" else full for kind in _step_kinds(config)], np.int32)

    return numbers


def _dense_first(config: HfConfig) -> int:
    """Return the number of leading dense layers."""
    layers, told = config.layers, config.get("mlp_layer_types")
    if isinstance(told, list):
        sparse = [layer for layer, kind in enumerate(told[:layers]) if kind == "sparse"]
    else:
        listed = config.get("moe_layers_enum")
        texts = listed.split(",") if isinstance(listed, str) else listed or []
        if not all(str(text).strip().isdecimal() and len(str(text)) < 10 for text in texts):
            raise config.error("moe_layers_enum", listed, "numbers of layers")
        sparse = sorted(int(text) for text in texts if int(text) < layers) or list(range(3, layers))
    if not sparse or sparse != list(range(sparse[0], layers)):
        raise config.error("moe_layers_enum", sparse, "all layers from one on, as the GGUF architecture has it")
    return sparse[0]


def _step_words(config: HfConfig) -> dict[str, Any]:
    """Return the per-layer lists of checkpoints with the original key names in transformers' form: the kind of each
    layer, and the rope base and rotated fraction by kind."""
    kinds = _step_kinds(config)
    listed = {name: _listed(config, name) if isinstance(config.get(name), list) else None for name in _LISTED}
    scaling, rope = config.table("rope_scaling"), dict(config.table("rope_parameters"))
    for kind in () if set(kinds) <= rope.keys() else sorted(set(kinds)):
        own: dict[str, Any] = dict(scaling) if kind == "full_attention" else {}
        for name, key in _LISTED.items():
            values = listed[name]
            found = {value for value, other in zip(values, kinds, strict=True) if other == kind} if values else set()
            if len(found) > 1:
                raise config.error(name, sorted(found), f"one number for all layers with {kind}")
            own[key] = found.pop() if found else config.get(name)
        rope[kind] = own
    return {"layer_types": kinds, "rope_parameters": rope, "rope_theta": None}


def _half_when_full(config: HfConfig) -> str | None:
    """Require that sliding-window layers rotate the whole head, and other layers half of it."""
    rope = config.inner("rope_parameters")
    for kind, fixed in (("full_attention", 0.5), ("sliding_attention", 1.0)):
        if kind in rope.values and (rope.inner(kind).real("partial_rotary_factor") or 1.0) != fixed:
            return f"the rotated share of heads is not {fixed:g} with {kind}; the GGUF architecture requires it"
    return None


_LISTED = {"rope_theta": "rope_theta", "partial_rotary_factors": "partial_rotary_factor"}
_STEP_KEYS: Keys = {
    "attention.head_count": _in_windows("num_attention_heads"),
    "attention.head_count_kv": _in_windows("num_attention_groups", "num_key_value_heads"),
    "rope.dimension_count": head_width,  # value for sliding-window layers; other layers rotate half the head
    "expert_used_count": by_name("moe_top_k", "num_experts_per_tok"),
    "expert_shared_feed_forward_length": by_name("share_expert_dim", "share_expert_dims"),
    "expert_weights_scale": real("moe_router_scaling_factor"),
    "expert_weights_norm": lambda config: config.flag("norm_expert_weight") is not False,
    "leading_dense_block_count": _dense_first,
    "moe_every_n_layers": 1,
    "swiglu_clamp_exp": _limits("swiglu_limits"),
    "swiglu_clamp_shexp": _limits("swiglu_limits_shared"),
}


ROWS = (
    Recipe(
        "step35", ("Step3p5ForCausalLM", "Step3p7ForConditionalGeneration", "Step3p7ForCausalLM"), keys=_STEP_KEYS,
        norm_offset=1.0, words=_step_words, rope_tensors="whole",
        fixed={
            "moe_every_n_layer": 1, "moe_router_activation": "sigmoid", "use_head_wise_attn_gate": True,
            "zero_centered": True, "attention_bias": False, "mlp_bias": False, "use_bidirectional_attention": False,
            "gating": True, "query_pre_attn_scalar": head_width,
        },
        checks=(_half_when_full,),
    ),
)  # fmt: skip

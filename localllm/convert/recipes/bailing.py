"""The recipes of Ling 1 to 3.

Models that transformers does not support keep the tensor names of their reference implementation.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm import quant
from localllm.convert import tensor as t
from localllm.convert.changes import column, in_turn, of_one, second
from localllm.convert.hf_config import HfConfig
from localllm.convert.latent import LATENT, ROUTED_KEYS
from localllm.convert.recipe import From, Keys, Layer, Raw, Recipe, Tensors, by_name, flag, real, taken
from localllm.convert.recipes.gated_delta import is_kind
from localllm.convert.recipes.shared import head_width, neighbours, one_after_other
from localllm.convert.tensor import LazyTensor
from localllm.models.reading.mixers import BOUND_KEY

_CHUNK = 4096  # rows of the output matrix read at a time


def _unit_columns(parts: Tensors, config: HfConfig) -> LazyTensor:
    """Return the output matrix of a model with `norm_head`. As in the reference implementation, each column is divided
    by its norm."""
    tensor = parts[0]
    if not config.flag("norm_head"):
        return tensor

    @cache
    def lengths() -> NDArray[np.float32]:
        total = np.zeros(tensor.shape[-1], np.float64)
        for start in range(0, tensor.rows, _CHUNK):
            rows = quant.dequantize(tensor.read(start, min(start + _CHUNK, tensor.rows)), tensor.format)
            total += np.square(rows, dtype=np.float64).sum(axis=0)
        return (np.sqrt(total) + 1e-7).astype(np.float32)

    return t.computed(tensor, lambda rows: rows / lengths())


def _centred(parts: Tensors, config: HfConfig) -> LazyTensor:
    """Return Sarvam's router biases minus their mean, which the reference implementation subtracts when it loads the
    model."""
    return t.computed(parts[0], lambda row: row - row.mean(dtype=np.float32))


def _shared(config: HfConfig) -> int | None:
    return config.integer("num_shared_experts") or None


def _shared_width(config: HfConfig) -> int:
    """Return the width of one shared expert, which llama.cpp multiplies by the number of shared experts."""
    return config.integer("moe_shared_expert_intermediate_size") or config.needed("moe_intermediate_size")


def _gating(config: HfConfig) -> int:
    """Return the GGUF number of the router's scoring function."""
    names = ("score_function", "moe_router_activation", "scoring_func")
    return config.choice(*names, of={"softmax": 1, "sigmoid": 2}, default="softmax")


_LING1 = {
    **neighbours("attention.query_key_value", one_after_other),
}
_OUTPUT = {"output": _unit_columns}
_LING2_KEYS: Keys = {
    "expert_shared_count": _shared,
    "expert_shared_feed_forward_length": _shared_width,
    "expert_gating_func": _gating,
}
_LING_FIXED = {"use_rmsnorm": True, "use_bias": False, "multi_gate": False}


# -- Ling 3 ------------------------------------------------------------------------------------------------------------


def _last_of_groups(config: HfConfig) -> np.ndarray:
    """Return the last layer of each group; in an incomplete last group, all layers."""
    layers, group = config.layers, config.needed("layer_group_size")
    numbers = np.arange(layers)
    return np.array(((numbers + 1) % group == 0) | (numbers >= layers // group * group))


_attends = is_kind("full_attention", otherwise=_last_of_groups)  # layers of Ling 3 with full attention
_LING3_KEYS: Keys = {
    **ROUTED_KEYS,
    "attention.head_count_kv": lambda config: _attends(config).astype(np.int32),
    "ssm.conv_kernel": "short_conv_kernel_size",
    "kda.head_dim": by_name("linear_head_dim", "head_dim"),
    "kda.safe_gate": lambda config: True,
    BOUND_KEY: real("kda_lower_bound"),
    "expert_shared_feed_forward_length": lambda config: (
        config.integer("moe_shared_expert_intermediate_size")
        or config.needed("moe_intermediate_size") * (config.integer("num_shared_experts") or 1)
    ),
    "expert_weights_norm": flag("norm_topk_prob", "moe_renormalize"),
    "swiglu_clamp_exp": lambda config: _limits(config, "expert_swiglu_limit_list"),
    "swiglu_clamp_shexp": lambda config: _limits(config, "share_expert_swiglu_limit_list"),
}


def _limits(config: HfConfig, name: str) -> np.ndarray | None:
    """Return the activation limit of each layer's experts, with 0 for no limit; return None if no layer has a limit."""
    found, layers = config.get(name), config.layers
    if found is None:
        return None
    if not isinstance(found, list) or not all(n is None or (type(n) in (int, float) and n >= 0) for n in found):
        raise config.error(name, found, "a number or null for each layer")
    return np.array([float(n or 0) for n in [*found, *[None] * layers][:layers]], np.float32)


_LING3: Layer = {
    **LATENT,
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_gate.weight": From(("self_attn.kv_a_layernorm.weight", "self_attn.g_proj.weight"), second),
    "ssm_a": taken("self_attn.A_log", in_turn(column, of_one(lambda tensor: t.computed(tensor, np.exp)))),  # slopes
    "ssm_f_a": "self_attn.f_proj",
    "ssm_g_a.weight": From(("self_attn.A_log", "self_attn.g_proj.weight"), second),
}


def _ling_names(raw: Raw, config: HfConfig) -> Raw:
    return {name.replace(".attention.", ".self_attn."): parts for name, parts in raw.items()}


_LING3_DEFAULTS: dict[str, Any] = {
    "kda_lower_bound": -5.0,
    "norm_topk_prob": True,
    "short_conv_kernel_size": 4,
}
_LING3_FIXED = {"kda_safe_gate": True, "no_kda_lora": True, "gated_attention_proj_granularity_type": "head_wise"}


def _ling_sections(config: HfConfig) -> np.ndarray:
    """Return the number of rotated pairs for time, height and width, and 0 for a fourth axis."""
    found, pairs = config.get("mrope_section"), config.needed("qk_rope_head_dim") // 2
    if not isinstance(found, list) or len(found) < 3 or not all(type(n) is int and 0 <= n <= pairs for n in found):
        raise config.error("mrope_section", found, "three numbers of pairs")
    if sum(found[:3]) != pairs:
        raise config.error("mrope_section", found, f"three numbers whose sum is {pairs}")
    return np.array([*found[:3], 0], np.int32)


ROWS = (
    Recipe(
        "bailingmoe", ("BailingMoeForCausalLM",), _LING1, changes=_OUTPUT,
        keys={"expert_shared_count": _shared, "expert_weights_scale": 1.0},
        fixed={**_LING_FIXED, "score_function": "softmax", "norm_softmax": False, "first_k_dense_replace": 0},
    ),
    Recipe(
        "bailingmoe2", ("BailingMoeV2ForCausalLM",), changes=_OUTPUT, keys=_LING2_KEYS,
        fixed={**_LING_FIXED, "use_qk_norm": True}, defaults={"partial_rotary_factor": 0.5},
    ),
    Recipe(
        "bailingmoe2", ("SarvamMoEForCausalLM", "modeling_sarvam_moe.SarvamMoEForCausalLM"),
        changes={**_OUTPUT, "exp_probs_b": _centred}, keys={**_LING2_KEYS, "rope.dimension_count": head_width},
        fixed={**_LING_FIXED, "use_qk_norm": True},
    ),
    Recipe(
        "bailingmoe3", ("BailingHybridForCausalLM", "BailingMoeV3ForCausalLM"), _LING3, keys=_LING3_KEYS,
        raw=_ling_names, like="kimi-linear", defaults=_LING3_DEFAULTS, fixed=_LING3_FIXED,
    ),
    Recipe(
        "bailingmoe3", ("BailingMoeV3VLForConditionalGeneration",), _LING3, raw=_ling_names, defaults=_LING3_DEFAULTS,
        like="kimi-linear", keys={**_LING3_KEYS, "rope.dimension_sections": _ling_sections}, fixed=_LING3_FIXED,
        others=("linear_proj.",),
    ),
)  # fmt: skip

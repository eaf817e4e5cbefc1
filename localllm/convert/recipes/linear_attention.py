"""The recipes of models with mostly linear attention layers: Kimi Linear and Ling 3 (KDA), MiniMax 01.

The checkpoints have the format of the reference implementations, which transformers also reads and writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from localllm.convert import tensor as t
from localllm.convert.changes import column, decay, in_turn, of_one
from localllm.convert.hf_config import HfConfig
from localllm.convert.latent import LATENT, LATENT_WIDTHS, OUTPUT_FIRST
from localllm.convert.recipe import (
    Check,
    From,
    Key,
    Keys,
    Layer,
    Raw,
    Recipe,
    Tensors,
    by_name,
    flag,
    integer,
    real,
    taken,
)
from localllm.convert.recipes.gated_delta import is_kind
from localllm.convert.recipes.shared import head_width, leading
from localllm.convert.tensor import LazyTensor
from localllm.convert.tokens import BYTE, NORMAL
from localllm.models.reading.mixers import BOUND_KEY, RECURRENT_KEY
from localllm.quant import dequantize


def _listed(config: HfConfig, table: HfConfig, name: str) -> list[int]:
    """Return a list of layer numbers, which count from 1."""
    found, layers = table.get(name), config.layers
    if not isinstance(found, list) or not all(type(n) is int and 1 <= n <= layers for n in found):
        raise table.error(name, found, f"layers from 1 to {layers}")
    return found


def kimi_attends(config: HfConfig) -> np.ndarray:
    """Return which layers of Kimi Linear have full attention, from `layer_types` or `linear_attn_config`. The default
    is every fourth layer.
    """
    found, own, layers = is_kind("full_attention")(config), own_table(config), config.layers
    if found is not None:
        return found
    numbers = np.arange(layers)
    if own.get("full_attn_layers") is None:
        return np.array((numbers > 0) & (numbers % 4 == 0))
    full, linear = (_listed(config, own, f"{name}_layers") for name in ("full_attn", "kda"))
    if sorted([*full, *linear]) != list(range(1, layers + 1)):
        raise own.error("full_attn_layers", full, f"together with kda_layers, each of the {layers} layers once")
    return np.isin(numbers + 1, full)


def own_table(config: HfConfig) -> HfConfig:
    return config.inner("linear_attn_config")


def of_own(name: str, inner: str) -> Key:
    """Return a reader of a size of Kimi's linear attention, under transformers' key or the key of the reference
    implementation."""
    return lambda config: config.integer(name) or own_table(config).needed(inner)


def one_count(config: HfConfig) -> str | None:
    heads = config.integer("linear_num_heads") or own_table(config).integer("num_heads")
    if heads is None or heads == config.heads:
        return None
    return f"linear attention has {heads} heads, but the GGUF architecture has as many as attention has"


def dense_layers(config: HfConfig) -> int:
    """Return the number of leading dense layers."""
    if config.get("mlp_layer_types") is None:
        return config.integer("first_k_dense_replace") or 0
    return leading(config)


def ling_attends(config: HfConfig) -> np.ndarray:
    """Return which layers of Ling 3 have full attention: from `layer_types`, else the last layer of each group. In an
    incomplete last group, all layers have it."""
    found = is_kind("full_attention")(config)
    if found is not None:
        return found
    layers, group = config.layers, config.needed("layer_group_size")
    numbers = np.arange(layers)
    return np.array(((numbers + 1) % group == 0) | (numbers >= layers // group * group))


def second(parts: Tensors, config: HfConfig) -> LazyTensor:
    """Return the second tensor. Both kinds of layers have it; the first tensor only identifies the kind of the
    layer."""
    return parts[1]


LATENT_KEYS: Keys = {
    **LATENT_WIDTHS,
    "leading_dense_block_count": dense_layers,
    "expert_gating_func": 2,  # sigmoid
    "expert_shared_count": integer("num_shared_experts", "n_shared_experts"),
    "expert_group_count": integer("num_expert_group", "n_group"),
}
_KIMI_KEYS: Keys = {
    **LATENT_KEYS,
    "attention.head_count_kv": lambda config: kimi_attends(config).astype(np.int32),
    "ssm.conv_kernel": of_own("linear_conv_kernel_dim", "short_conv_kernel_size"),
    "kda.head_dim": of_own("linear_head_dim", "head_dim"),
}
KDA = {"ssm_a": in_turn(column, decay)}
KIMI_ORDER = f"{OUTPUT_FIRST}, ssm_a ssm_dt, ssm_f_b ssm_beta, ffn_down_exps exp_probs_b"
KIMI: Layer = {
    **LATENT,
    # transformers names the tensors of the dense layers like the tensors of expert layers
    **{f"ffn_{x}": (f"mlp.{x}_proj", f"block_sparse_moe.{x}_proj") for x in ("gate", "up", "down")},
    "exp_probs_b.bias": "block_sparse_moe.gate.e_score_correction_bias",
}
_LING_KEYS: Keys = {
    **LATENT_KEYS,
    "attention.head_count_kv": lambda config: ling_attends(config).astype(np.int32),
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


_LING: Layer = {
    **LATENT,
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_gate.weight": From(("self_attn.kv_a_layernorm.weight", "self_attn.g_proj.weight"), second),
    "ssm_a": taken("self_attn.A_log", in_turn(column, of_one(lambda tensor: t.computed(tensor, np.exp)))),  # slopes
    "ssm_f_a": "self_attn.f_proj",
    "ssm_g_a.weight": From(("self_attn.A_log", "self_attn.g_proj.weight"), second),
    "exp_probs_b.bias": "mlp.gate.expert_bias",
}
_LING_ORDER = (
    "exp_probs_b attn_output attn_gate attn_k attn_v ssm_conv1d_q ssm_conv1d_k ssm_conv1d_v ssm_a ssm_dt ssm_f_a "
    "ssm_g_a ssm_beta ssm_norm"
)


def _ling_names(raw: Raw, config: HfConfig) -> Raw:
    return {name.replace(".attention.", ".self_attn."): parts for name, parts in raw.items()}


_LING_DEFAULTS: dict[str, Any] = {
    "kda_lower_bound": -5.0,
    "norm_topk_prob": True,
    "short_conv_kernel_size": 4,
}
_LING_FIXED = {"kda_safe_gate": True, "no_kda_lora": True, "gated_attention_proj_granularity_type": "head_wise"}


def _ling_sections(config: HfConfig) -> np.ndarray:
    """Return the number of rotated pairs for time, height and width, and 0 for a fourth axis."""
    found, pairs = config.get("mrope_section"), config.needed("qk_rope_head_dim") // 2
    if not isinstance(found, list) or len(found) < 3 or not all(type(n) is int and 0 <= n <= pairs for n in found):
        raise config.error("mrope_section", found, "three numbers of pairs")
    if sum(found[:3]) != pairs:
        raise config.error("mrope_section", found, f"three numbers whose sum is {pairs}")
    return np.array([*found[:3], 0], np.int32)


# -- MiniMax 01 --------------------------------------------------------------------------------------------------------


def _of_residual(which: str) -> Check:
    """Require one residual factor `alpha` for all parts of a layer, or a factor `beta` of 1."""
    names = [
        (f"{short}_{which}_factor", f"layernorm_{long}_{which}")
        for short, long in (("full_attn", "full_attention"), ("linear_attn", "linear_attention"), ("mlp", "mlp"))
    ]

    def check(config: HfConfig) -> str | None:
        found = [config.real(*each) for each in names]
        values = {1.0 if value is None else value for value in found}
        if len(values) == 1 and (which == "alpha" or values == {1.0}):
            return None
        told = " and ".join(f"{each[0]} {value}" for each, value in zip(names, found, strict=True))
        return f"{told}; the GGUF architecture has {'one factor for all' if which == 'alpha' else 'none'}"

    return check


def _decays(config: HfConfig) -> np.ndarray:
    """Return which layers have lightning attention, from `layer_types`, or from the zeros in `attn_type_list`."""
    found = is_kind("linear_attention")(config)
    if found is not None:
        return found
    listed = config.per_layer("attn_type_list", "0 or 1 for each of the {} layers", lambda kind: kind in (0, 1))
    return np.array([kind == 0 for kind in listed])


_MINIMAX: Layer = {
    "attn_output": ("self_attn.o_proj", "self_attn.out_proj"),
    "attn_qkv": "self_attn.qkv_proj",
    "attn_gate": "self_attn.output_gate",
    "attn_norm_2": "self_attn.norm",
}
_MINIMAX_KEYS: Keys = {
    "attention.key_length": head_width,
    "attention.value_length": head_width,
    "rope.dimension_count": lambda config: config.integer("rotary_dim") or head_width(config),
    "residual_scale": lambda config: config.real("full_attn_alpha_factor", "layernorm_full_attention_alpha") or 1.0,
    RECURRENT_KEY: _decays,
}


def untrained(config: HfConfig, keys: Mapping[str, Any], tensors: Mapping[str, LazyTensor]) -> np.ndarray | None:
    """Return suppress_tokens: the list in generation_config.json, and special tokens with a zero embedding, which were
    never trained."""
    table = tensors["token_embd.weight"]
    special = np.flatnonzero(~np.isin(keys["tokenizer.ggml.token_type"], (NORMAL, BYTE))).tolist()
    rows = [i for i in special if not dequantize(table.read(i, i + 1), table.format).any()]
    listed = np.union1d(keys.get("tokenizer.ggml.suppress_tokens", ()), rows).astype(np.int32)
    return listed if len(listed) else None


ROWS = (
    Recipe(
        "kimi-linear", ("KimiLinearForCausalLM", "KimiLinearModel"), KIMI, changes=KDA, keys=_KIMI_KEYS,
        order=KIMI_ORDER, fixed={"moe_renormalize": True, "moe_router_activation_func": "sigmoid"}, checks=(one_count,),
    ),
    Recipe(
        "bailingmoe3", ("BailingHybridForCausalLM", "BailingMoeV3ForCausalLM"), _LING, keys=_LING_KEYS, raw=_ling_names,
        like="kimi-linear", order=_LING_ORDER, defaults=_LING_DEFAULTS, fixed=_LING_FIXED,
    ),
    Recipe(
        "bailingmoe3", ("BailingMoeV3VLForConditionalGeneration",), _LING, raw=_ling_names, defaults=_LING_DEFAULTS,
        like="kimi-linear", order=_LING_ORDER, keys={**_LING_KEYS, "rope.dimension_sections": _ling_sections},
        fixed=_LING_FIXED, others=("linear_proj.",),
    ),
    Recipe(
        "minimax-01", ("MiniMaxForCausalLM", "MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"), _MINIMAX,
        like="minimax-m2", order="attn_output attn_qkv, attn_gate attn_norm_2", keys=_MINIMAX_KEYS,
        fixed={"postnorm": True}, checks=(_of_residual("alpha"), _of_residual("beta")),
        whole_keys={"tokenizer.ggml.suppress_tokens": untrained},
    ),
)  # fmt: skip

"""The recipes of Kimi Linear, and of Kimi K3: Kimi Linear plus attention residuals, with routed experts on a narrower,
projected input.

The checkpoints of Kimi Linear have the format of the reference implementation, which transformers also reads and
writes. transformers does not support Kimi K3, whose published weights are packed as MXFP4 by compressed-tensors.
"""

from __future__ import annotations

import numpy as np

from localllm.convert import tensor as t
from localllm.convert.changes import column, decay, flat, in_turn, second
from localllm.convert.hf_config import HfConfig
from localllm.convert.latent import LATENT, ROUTED_KEYS
from localllm.convert.recipe import From, Keys, Layer, Recipe, Tensors, flag, integer, taken
from localllm.convert.recipes.gated_delta import is_kind
from localllm.convert.recipes.shared import either
from localllm.convert.tensor import LazyTensor
from localllm.models.reading.mixers import BOUND_KEY


def _listed(config: HfConfig, table: HfConfig, name: str) -> list[int]:
    """Return a list of layer numbers, which count from 1."""
    found, layers = table.get(name), config.layers
    if not isinstance(found, list) or not all(type(n) is int and 1 <= n <= layers for n in found):
        raise table.error(name, found, f"layers from 1 to {layers}")
    return found


def _listed_attends(config: HfConfig) -> np.ndarray:
    """Return the layers with full attention in `linear_attn_config`. The default is every fourth layer."""
    own, layers = own_table(config), config.layers
    numbers = np.arange(layers)
    if own.get("full_attn_layers") is None:
        return np.array((numbers > 0) & (numbers % 4 == 0))
    full, linear = (_listed(config, own, f"{name}_layers") for name in ("full_attn", "kda"))
    if sorted([*full, *linear]) != list(range(1, layers + 1)):
        raise own.error("full_attn_layers", full, f"together with kda_layers, each of the {layers} layers once")
    return np.isin(numbers + 1, full)


_attends = is_kind("full_attention", otherwise=_listed_attends)  # layers of Kimi Linear with full attention


def own_table(config: HfConfig) -> HfConfig:
    return config.inner("linear_attn_config")


def one_count(config: HfConfig) -> str | None:
    heads = config.integer("linear_num_heads") or own_table(config).integer("num_heads")
    if heads is None or heads == config.heads:
        return None
    return f"linear attention has {heads} heads; the GGUF architecture requires the number of attention heads"


KDA_SIZES: Keys = {
    "ssm.conv_kernel": either("linear_conv_kernel_dim", "linear_attn_config", "short_conv_kernel_size"),
    "kda.head_dim": either("linear_head_dim", "linear_attn_config", "head_dim"),
}
_KIMI_KEYS: Keys = {
    **ROUTED_KEYS,
    **KDA_SIZES,
    "attention.head_count_kv": lambda config: _attends(config).astype(np.int32),
}
KDA = {"ssm_a": in_turn(column, decay)}
KIMI: Layer = {
    **LATENT,
    # transformers names the tensors of the dense layers like the tensors of expert layers
    **{f"ffn_{x}": (f"mlp.{x}_proj", f"block_sparse_moe.{x}_proj") for x in ("gate", "up", "down")},
}


# -- Kimi K3 -----------------------------------------------------------------------------------------------------------


def _product(parts: Tensors, config: HfConfig) -> LazyTensor:
    """Return a norm's weights times a one-row projection. The residual score only needs this product."""
    return t.multiplied(*(flat([t.as_float32(part)], config) for part in parts))


def _rates(parts: Tensors, config: HfConfig) -> LazyTensor:
    """Return the decay rates of the heads. The values after them are padding."""
    return decay([t.strided(flat(parts, config), 0, config.heads)], config)


def _score(name: str) -> From:
    return From((f"{name}_norm.weight", f"{name}_proj.weight"), _product)


_LAYER: Layer = {
    **KIMI,
    "attn_res_score.weight": _score("self_attention_res"),
    "ffn_res_score.weight": _score("mlp_res"),
    # Both kinds of layers use the same name for their gate; another tensor shows the kind of the layer.
    "attn_gate.weight": From(("self_attn.kv_b_proj.weight", "self_attn.g_proj.weight"), second),
    "ssm_g.weight": From(("self_attn.A_log", "self_attn.g_proj.weight"), second),
    "ssm_a": taken("self_attn.A_log", _rates),
    **{f"ffn_routed_{x}": f"block_sparse_moe.routed_expert_{x}_proj" for x in ("down", "up")},
    "ffn_routed_norm": "block_sparse_moe.routed_expert_norm",
}
_KEYS: Keys = {
    **_KIMI_KEYS,
    BOUND_KEY: lambda config: own_table(config).real("gate_lower_bound"),
    "attn_res.block_size": "attn_res_block_size",
    "activation.situ_beta": lambda config: _cap(config, "activation_situ_beta"),
    "activation.situ_linear_beta": lambda config: _cap(config, "activation_situ_linear_beta"),
    "expert_latent_length": integer("routed_expert_hidden_size"),
    "expert_weights_norm": flag("moe_renormalize"),
}


def _cap(config: HfConfig, name: str) -> float:
    value = config.real(name)
    if value is None:
        raise config.error(name, None, "a number, the limit of feed-forward activations")
    return value


ROWS = (
    Recipe(
        "kimi-k3", ("KimiK3ForConditionalGeneration", "KimiK3ForCausalLM"), _LAYER, keys=_KEYS, like="kimi-linear",
        top={"output_res_score.weight": (_score("model.output_attn_res"), _score("output_attn_res"))},
        fixed={"mla_use_nope": True, "moe_router_activation_func": "sigmoid"}, checks=(one_count,),
    ),
    Recipe(
        "kimi-linear", ("KimiLinearForCausalLM", "KimiLinearModel"), KIMI, changes=KDA, keys=_KIMI_KEYS,
        fixed={"moe_renormalize": True, "moe_router_activation_func": "sigmoid"}, checks=(one_count,),
    ),
)  # fmt: skip

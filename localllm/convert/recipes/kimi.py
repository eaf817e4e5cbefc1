"""The recipe of Kimi K3: Kimi Linear plus attention residuals, with routed experts on a narrower, projected input.

transformers does not support it. The published weights are packed as MXFP4 by compressed-tensors.
"""

from __future__ import annotations

from localllm.convert import tensor as t
from localllm.convert.changes import decay, flat
from localllm.convert.hf_config import HfConfig
from localllm.convert.recipe import From, Keys, Layer, Recipe, Tensors, flag, integer, taken
from localllm.convert.recipes.linear_attention import (
    KIMI,
    KIMI_ORDER,
    LATENT_KEYS,
    kimi_attends,
    of_own,
    one_count,
    own_table,
    second,
)
from localllm.convert.tensor import LazyTensor
from localllm.models.reading.mixers import BOUND_KEY


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
_ORDER = (
    f"{KIMI_ORDER}, ffn_down_shexp attn_res_score ffn_res_score attn_gate ssm_g ffn_routed_down ffn_routed_up "
    "ffn_routed_norm"
)
_KEYS: Keys = {
    **LATENT_KEYS,
    "attention.head_count_kv": lambda config: kimi_attends(config).astype("int32"),
    "ssm.conv_kernel": of_own("linear_conv_kernel_dim", "short_conv_kernel_size"),
    "kda.head_dim": of_own("linear_head_dim", "head_dim"),
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
        raise config.error(name, None, "a number, at which the units of a feed-forward end")
    return value


ROWS = (
    Recipe(
        "kimi-k3", ("KimiK3ForConditionalGeneration", "KimiK3ForCausalLM"), _LAYER, keys=_KEYS, like="kimi-linear",
        order=_ORDER, top={"output_res_score.weight": (_score("model.output_attn_res"), _score("output_attn_res"))},
        fixed={"mla_use_nope": True, "moe_router_activation_func": "sigmoid"}, checks=(one_count,),
    ),
)  # fmt: skip

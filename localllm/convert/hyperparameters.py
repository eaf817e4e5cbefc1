"""Convert config.json to the GGUF keys that describe the sizes and structure of the model."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from localllm.convert.errors import ConvertError
from localllm.convert.hf_config import HfConfig
from localllm.convert.recipe import Key, Recipe
from localllm.convert.rope_scaling import RopeKeys
from localllm.models import ARCHITECTURES
from localllm.models.reading.config import eps_key

# GGUF key without the architecture prefix: its names in config.json. Missing values are not written.
_INTEGERS = {
    "attention.head_count": ("num_attention_heads",),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "feed_forward_length": ("intermediate_size",),
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "expert_used_count": (
        "num_experts_per_tok",
        "num_experts_per_token",
        "experts_per_token",
        "moe_topk",
        "moe_k",
        "num_activated_experts",
    ),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size", "shared_intermediate_size"),
    "expert_shared_count": ("n_shared_experts",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "leading_dense_block_count": ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
}
_REALS = {
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "attention.scale": ("attention_multiplier",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logits_scaling", "logit_scale"),
    "expert_weights_scale": ("routed_scaling_factor", "route_scale"),
    "attention.clamp_kqv": ("clip_qkv",),
}
_FLAGS = {"expert_weights_norm": ("norm_topk_prob",)}
_EPS = ("norm_eps", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "layernorm_epsilon")
_GATINGS = {"sigmoid": 2, "sqrt_softplus": 4}  # GGUF numbers of the routers' functions other than softmax
_OF_EXPERTS = ("expert_used_count", "expert_group_count", "expert_group_used_count")
_ACTIVATIONS = {
    "silu": ("silu", "swish"),
    "gelu": ("gelu_pytorch_tanh", "gelu", "gelu_new", "gelu_fast"),
    "relu2": ("relu2", "sqrelu"),
    "xielu": ("xielu",),
    "situ": ("situ",),
    "swiglu_oai": ("swigluoai", "silu"),  # transformers uses both names for the same activation
}


def shape_keys(
    config: HfConfig,
    recipe: Recipe,
    rope: RopeKeys,
    vocabulary: int,
    pooling: int | None = None,
    further: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return prefixed keys for `write_gguf`; raise ConvertError if config.json is incomplete or contradictory.

    `pooling` and the `further` keys come from other files of the checkpoint.
    """
    _check(config, recipe)
    keys: dict[str, Any] = {
        "vocab_size": vocabulary,
        "block_count": config.layers,
        "context_length": config.needed("max_position_embeddings"),
        "embedding_length": config.width,
    }
    keys |= {key: config.integer(*names) for key, names in _INTEGERS.items() if key not in recipe.keys}
    keys |= {key: config.real(*names) for key, names in _REALS.items()}
    keys |= {key: config.flag(*names) for key, names in _FLAGS.items()}
    if "attention.head_count_kv" not in recipe.keys:
        keys["attention.head_count_kv"] = config.integer("num_key_value_heads") or config.heads
    row, eps = ARCHITECTURES[recipe.name], config.real(*_EPS)
    if eps is None and row.norm == "rms":
        raise config.error("rms_norm_eps", None, "a small number")
    keys[eps_key(row, row.norm)] = 1e-5 if eps is None else eps  # transformers' default in layer norms
    keys["expert_gating_func"] = _GATINGS.get(row.routing.gating) if row.routing else None
    keys["attention.causal"] = False if row.encoder or row.diffusion else None
    keys |= _windows(config, recipe)
    keys |= rope.keys
    keys |= {"pooling_type": pooling, **further}
    keys |= {key: _further(config, of) for key, of in recipe.keys.items()}
    if not keys.get("expert_count"):  # llama.cpp refuses a file with expert keys but no experts
        keys = {key: value for key, value in keys.items() if key not in _OF_EXPERTS}
    return {f"{recipe.name}.{key}": value for key, value in keys.items() if value is not None}


def _further(config: HfConfig, of: Key) -> Any:
    if isinstance(of, str):
        return config.needed(of)
    return of(config) if callable(of) else of


def _check(config: HfConfig, recipe: Recipe) -> None:
    architecture = ARCHITECTURES[recipe.name]
    known = _ACTIVATIONS["situ" if architecture.limits == "situ" else architecture.activation]
    known += _ACTIVATIONS["silu"] if architecture.activation_key else ()
    activation = config.get("hidden_activation", "hidden_act")
    if activation is not None and activation not in known:
        raise config.error("hidden_act", activation, f"{known[0]}, as {recipe.name} computes")
    if problem := next(recipe.problems(config), None):
        raise ConvertError(f"{config.path}: {problem} in {recipe.name}; this model cannot be converted")


_KINDS = ("sliding_attention", "full_attention", "indexed_attention")


def _windows(config: HfConfig, recipe: Recipe) -> dict[str, Any]:
    """Return the sliding-window size and which layers use it, for architectures with sliding-window attention."""
    sliding, window = ARCHITECTURES[recipe.name].sliding, config.integer("sliding_window")
    if sliding is None or window is None or "attention.sliding_window_pattern" in recipe.keys:
        return {}
    if config.get("layer_types") is None:
        period = config.integer("sliding_window_pattern", "_sliding_window_pattern") or sliding.period
        slides = [(layer + 1) % period != 0 for layer in range(config.layers)]
    else:
        expected = f"{' or '.join(_KINDS[:2])}, {{}} times"
        slides = [kind == _KINDS[0] for kind in config.per_layer("layer_types", expected, lambda kind: kind in _KINDS)]
    return {"attention.sliding_window": window, "attention.sliding_window_pattern": np.array(slides)}


def shape_notes(config: HfConfig, recipe: Recipe) -> tuple[str, ...]:
    """Return notes about settings in config.json that the GGUF architecture ignores."""
    window = config.integer("sliding_window")
    unused = ARCHITECTURES[recipe.name].sliding is None and config.flag("use_sliding_window") is not False
    if unused and window and window < config.needed("max_position_embeddings"):
        return (f"sliding_window {window} is ignored: every layer of {recipe.name} has full attention",)
    return ()

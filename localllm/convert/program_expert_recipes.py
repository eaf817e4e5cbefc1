"""The recipes of mixture-of-experts models that transformers does not support: Arctic, Ling 1 and 2, DeepSeek MoE,
Maple and SmallThinker. The tensor names come from the models' own code."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from localllm import quant
from localllm.convert import sources as of
from localllm.convert import tensor as t
from localllm.convert.hf_config import HfConfig
from localllm.convert.program_recipes import head_width, neighbours, one_after_other
from localllm.convert.recipe import From, Key, Layer, Recipe, Sizes, must_be, taken
from localllm.convert.tensor import LazyTensor

_CHUNK = 4096  # rows read at a time


# -- Ling --------------------------------------------------------------------------------------------------------------


def _unit_columns(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
    """Return the output matrix of a model with `norm_head`: columns divided by their norm, as in the original code."""
    tensor = parts[0]
    if not sizes.config.flag("norm_head"):
        return tensor

    @cache
    def lengths() -> NDArray[np.float32]:
        total = np.zeros(tensor.shape[-1], np.float64)
        for start in range(0, tensor.rows, _CHUNK):
            rows = quant.dequantize(tensor.read(start, min(start + _CHUNK, tensor.rows)), tensor.format)
            total += np.square(rows, dtype=np.float64).sum(axis=0)
        return (np.sqrt(total) + 1e-7).astype(np.float32)

    return t.computed(tensor, lambda rows: rows / lengths())


def _centred(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
    """Return Sarvam's router biases minus their mean, as the original code does at load."""
    return t.computed(parts[0], lambda row: row - row.mean(dtype=np.float32))


def _shared(config: HfConfig) -> int | None:
    return config.integer("num_shared_experts") or None


def _shared_width(config: HfConfig) -> int:
    """Return the width of one shared expert; llama.cpp multiplies it by the number of shared experts."""
    return config.integer("moe_shared_expert_intermediate_size") or config.needed("moe_intermediate_size")


def _gating(config: HfConfig) -> int:
    """Return GGUF's number for the router's scoring function."""
    functions = {"softmax": 1, "sigmoid": 2}
    name = config.get("score_function", "moe_router_activation", "scoring_func") or "softmax"
    if name not in functions:
        raise config.error("score_function", name, " or ".join(functions))
    return functions[name]


_BAILING: Layer = {
    **of.NORMS, "attn_output": taken("attention.dense"), **of.GATED, **of.ROUTED, **of.SHARED,
}  # fmt: skip
_LING1: Layer = {**_BAILING, **neighbours("attention.query_key_value", one_after_other)}
_LING2: Layer = {
    **_BAILING,
    "attn_qkv": taken("attention.query_key_value"),
    "attn_q_norm": taken("attention.query_layernorm"),
    "attn_k_norm": taken("attention.key_layernorm"),
    "exp_probs_b.bias": taken("mlp.gate.expert_bias"),
}
_LING_TOP = {"token_embd": From(("model.word_embeddings",)), "output": From(("lm_head",), _unit_columns)}
_LING2_KEYS: dict[str, Key] = {
    "expert_shared_count": _shared, "expert_shared_feed_forward_length": _shared_width, "expert_gating_func": _gating,
}  # fmt: skip
_LING_CHECKS = (must_be("use_rmsnorm", True), must_be("use_bias", False), must_be("multi_gate", False))

# -- SmallThinker ------------------------------------------------------------------------------------------------------


def _layout(config: HfConfig, name: str) -> list[bool]:
    """Return a list of 0 and 1 by layer; all 0 if it is missing."""
    found, layers = config.get(name), config.needed("num_hidden_layers")
    if found is None:
        return [False] * layers
    if not isinstance(found, list) or len(found) != layers or not all(flag in (0, 1) for flag in found):
        raise config.error(name, found, f"0 or 1, {layers} times")
    return [flag == 1 for flag in found]


def _window(config: HfConfig) -> int | None:
    return config.integer("sliding_window_size") if any(_layout(config, "sliding_window_layout")) else None


def _small_kinds(config: HfConfig) -> list[str]:
    slides = _layout(config, "sliding_window_layout")
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def _rotated_in_windows(config: HfConfig) -> str | None:
    """Require one of two patterns: layers 0, 4, 8, ... have neither window nor rope, or no layer has a window.

    Without windows, all layers have rope.
    """
    slides, rotated = _layout(config, "sliding_window_layout"), _layout(config, "rope_layout")
    if any(slides) and slides != [layer % 4 != 0 for layer in range(len(slides))]:
        return "sliding_window_layout is not every layer but each fourth; the GGUF architecture has it fixed so"
    if rotated != (slides if any(slides) else [True] * len(slides)):
        return "rope_layout is not sliding_window_layout, or 1 for all without windows; the GGUF architecture is so"
    return None


_SMALL: Layer = {
    **of.NORMS, **of.QKV, **of.OUT, "ffn_gate_inp": taken("block_sparse_moe.primary_router"),
    **of.expert_sources(*(f"block_sparse_moe.experts.{{}}.{x}" for x in ("gate", "up", "down"))),
}  # fmt: skip

# -- the table ---------------------------------------------------------------------------------------------------------

_ARCTIC: Layer = {
    "attn_norm": taken("input_layernorm"), **of.QKV_PERMUTED, **of.OUT,
    "ffn_norm": taken("residual_layernorm"), "ffn_norm_exps": taken("post_attention_layernorm"),
    **{f"ffn_{x}": taken(f"residual_mlp.{name}") for x, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))},
    **of.MIXTRAL,
}  # fmt: skip

ROWS = (
    Recipe(
        "arctic", ("ArcticForCausalLM",), _ARCTIC,
        checks=(must_be("parallel_attn_mlp_res", True), must_be("use_residual", True)),
        defaults={"parallel_attn_mlp_res": False},
    ),
    Recipe(
        "bailingmoe", ("BailingMoeForCausalLM",), _LING1, top=_LING_TOP,
        keys={"expert_shared_count": _shared, "expert_weights_scale": 1.0},
        checks=(*_LING_CHECKS, must_be("score_function", "softmax"), must_be("norm_softmax", False),
                must_be("first_k_dense_replace", 0)),
    ),
    Recipe(
        "bailingmoe2", ("BailingMoeV2ForCausalLM",), _LING2, top=_LING_TOP, keys=_LING2_KEYS,
        checks=(*_LING_CHECKS, must_be("use_qk_norm", True)), defaults={"partial_rotary_factor": 0.5},
    ),
    Recipe(
        "bailingmoe2", ("SarvamMoEForCausalLM", "modeling_sarvam_moe.SarvamMoEForCausalLM"),
        {**_LING2, "exp_probs_b.bias": taken("mlp.gate.expert_bias", _centred)}, top=_LING_TOP,
        keys={**_LING2_KEYS, "rope.dimension_count": head_width}, checks=(*_LING_CHECKS, must_be("use_qk_norm", True)),
    ),
    Recipe(
        "deepseek", ("DeepseekForCausalLM",), {**of.LLAMA, **of.ROUTED, **of.SHARED},
        keys={"expert_weights_scale": 1.0, "expert_weights_norm": None, "expert_gating_func": 1},
        checks=(
            must_be("norm_topk_prob", False), must_be("scoring_func", "softmax"), must_be("moe_layer_freq", 1),
            must_be("attention_bias", False),
        ),
    ),
    Recipe(
        "maple", ("MapleForCausalLM",), {**of.NORMS, **of.QKV, **of.OUT, **of.HEAD_NORMS, **of.ROUTED},
        keys={"swiglu_clamp_exp": lambda config: np.full(config.needed("num_hidden_layers"), 7.0, np.float32)},
        checks=(
            must_be("num_shared_experts", 0), must_be("norm_topk_prob", True),
            must_be("nope_on_global_attention", True),
        ),
        defaults={"nope_on_global_attention": False},
    ),
    Recipe(
        "smallthinker", ("SmallThinkerForCausalLM",), _SMALL,
        keys={
            "expert_count": "moe_num_primary_experts", "expert_used_count": "moe_num_active_primary_experts",
            "feed_forward_length": "moe_ffn_hidden_size", "expert_feed_forward_length": "moe_ffn_hidden_size",
            "expert_gating_func": lambda config: 1 if config.flag("moe_primary_router_apply_softmax") else 2,
        },
        checks=(
            _rotated_in_windows, must_be("norm_topk_prob", True), must_be("moe_enable_early_router", True),
            must_be("moe_enable_secondary_experts", False),
        ),
        defaults={"sliding_window": _window, "layer_types": _small_kinds},
    ),
)  # fmt: skip

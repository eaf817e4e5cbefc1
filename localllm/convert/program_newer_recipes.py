"""Recipes of models of 2024 to 2026 with unusual layers: DeciLM and pruned Llamas, Muse Glimmer, Spark X2.5, Step 3.5
and Talkie. The tensor names come from the models' own code; transformers supports only Muse Glimmer and Step 3.5."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.convert import sources as of
from localllm.convert import tensor as t
from localllm.convert.hf_config import HfConfig
from localllm.convert.program_recipes import as_many_keys, head_width
from localllm.convert.recipe import (
    Change,
    From,
    Key,
    Layer,
    Recipe,
    Sizes,
    by_name,
    column,
    height,
    must_be,
    numbered,
    permuted,
    taken,
)
from localllm.convert.tensor import LazyTensor

_LAYER = re.compile(r"\.(\d+)\.")

# -- DeciLM ------------------------------------------------------------------------------------------------------------


def _blocks(config: HfConfig, part: str, name: str) -> list[object] | None:
    """Return the settings of one part of each layer from `block_configs`; None without such a list."""
    found, layers = config.get("block_configs"), config.needed("num_hidden_layers")
    if found is None:
        return None
    right = isinstance(found, list) and len(found) == layers and all(isinstance(block, dict) for block in found)
    parts = [block.get(part) for block in found] if right else []
    if not right or not all(isinstance(own, dict) for own in parts):
        raise config.error("block_configs", "something else", f"{part} of {layers} layers")
    return [own.get(name) for own in parts]


def _deci_kv_heads(config: HfConfig) -> list[int]:
    """Return the number of KV heads by layer."""
    heads, layers = config.needed("num_attention_heads"), config.needed("num_hidden_layers")
    groups = _blocks(config, "attention", "n_heads_in_group")
    if groups is not None:
        if not all(type(n) is int and n > 0 and heads % n == 0 for n in groups):
            raise config.error(
                "block_configs", "a layer without attention", "attention in all layers, the others are not known here"
            )
        return [heads // n for n in groups if type(n) is int]
    listed = config.get("num_key_value_heads_per_layer")
    if listed is None:
        return [config.integer("num_key_value_heads") or heads] * layers
    if not isinstance(listed, list) or len(listed) != layers or not all(type(n) is int and n > 0 for n in listed):
        raise config.error("num_key_value_heads_per_layer", listed, f"{layers} numbers of heads")
    return listed


def _deci_ffn(config: HfConfig) -> NDArray[np.int32] | int:
    """Return the feed-forward widths: two thirds of width times a factor, rounded up to a multiple of 256."""
    factors = _blocks(config, "ffn", "ffn_mult")
    if factors is None:
        return config.needed("intermediate_size")
    widths = []
    for factor in factors:
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < 1000:
            raise config.error("block_configs", f"ffn_mult {factor}", "a feed-forward in all layers")
        widths.append(-(-int(2 * factor * config.needed("hidden_size") / 3) // 256) * 256)
    return np.array(widths, np.int32)


def _by_own_heads(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
    """Reorder the rows of keys, using this layer's number of heads."""
    found = _LAYER.search(parts[0].name)
    assert found is not None, f"{parts[0].name} is of no layer"
    heads = _deci_kv_heads(sizes.config)[int(found[1])]
    return permuted(lambda _: heads)(parts, sizes)


# -- Muse Glimmer ------------------------------------------------------------------------------------------------------


def _constant(value: Callable[[HfConfig], float]) -> Change:
    """Return a head norm with constant weights: the original code multiplies all values by one number."""

    def change(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
        width = sizes.config.needed("head_dim")
        return t.array_tensor(parts[0].name, np.full(width, value(sizes.config), np.float32))

    return change


def _muse_kinds(config: HfConfig) -> list[str]:
    layers = config.needed("num_hidden_layers")
    return ["sliding_attention" if (layers - 1 - i) % 4 else "full_attention" for i in range(layers)]


def _rotated_in_windows(config: HfConfig) -> str | None:
    """Require rope, with a single base, in sliding-window layers and in no others."""
    bases, kinds = config.get("layer_rope_theta"), config.get("layer_types")
    if bases is None and kinds == _muse_kinds(config):
        return None
    slides = [kind == "sliding_attention" for kind in kinds] if isinstance(kinds, list) else []
    if isinstance(bases, list) and [base != 0 for base in bases] == slides and len({*bases} - {0}) == 1:
        return None
    return (
        "layer_rope_theta is not 0 in layers that see everything, and one number in others; the GGUF architecture is so"
    )


_MUSE: Layer = {
    **of.FOUR_NORMS, **of.QKV_PERMUTED, **of.OUT, **of.GATED, "attn_gate": taken("self_attn.gate_proj"),
    "attn_q_norm.weight": taken(
        "self_attn.q_proj.weight", _constant(lambda config: config.real("qk_scale_factor") or 1.0)
    ),
    "attn_k_norm.weight": taken("self_attn.k_proj.weight", _constant(lambda config: 1.0)),
}  # fmt: skip

# -- Spark X2.5 -------------------------------------------------------------------------------------------------------


def _share(kind: str) -> Key:
    """Return the number of rotated values per head in layers of this kind."""

    def width(config: HfConfig) -> int:
        rope = config.below("rope_parameters", config.table("rope_parameters"))
        share = rope.below(kind, rope.table(kind)).real("partial_rotary_factor")
        return int(config.needed("head_dim") * (1.0 if share is None else share))

    return width


_SPARK: Layer = {
    **of.NORMS, "attn_qkv": taken("self_attn.q_k_v_proj"), "attn_gate": taken("self_attn.g_proj"), **of.OUT, **of.GATED,
}  # fmt: skip

# -- Step 3.5 ----------------------------------------------------------------------------------------------------------


def _listed(config: HfConfig, name: str) -> list[float] | None:
    """Return a list by layer without the entries of next-token heads; null counts as 0."""
    found, layers = config.get(name), config.needed("num_hidden_layers")
    if found is None:
        return None
    right = isinstance(found, list) and len(found) >= layers
    if not right or not all(x is None or (type(x) in (int, float) and 0 <= x < 1e30) for x in found):
        raise config.error(name, found, f"{layers} numbers")
    return [float(x or 0.0) for x in found[:layers]]


def _limits(name: str) -> Key:
    """Return the SwiGLU limits by layer, if config.json has any."""
    return lambda config: None if (found := _listed(config, name)) is None else np.array(found, np.float32)


def _step_kinds(config: HfConfig) -> list[str]:
    """Return the kind of each layer, without next-token heads."""
    found, layers = config.get("layer_types"), config.needed("num_hidden_layers")
    kinds = ("full_attention", "sliding_attention")
    if not isinstance(found, list) or len(found) < layers or not all(kind in kinds for kind in found):
        raise config.error("layer_types", found, f"{' or '.join(kinds)}, {layers} times")
    return found[:layers]


def _in_windows(name: str, *own: str) -> Key:
    """Return a number of heads by layer. Sliding-window layers have theirs in a nested table."""

    def numbers(config: HfConfig) -> NDArray[np.int32]:
        table = config.below("attention_other_setting", config.table("attention_other_setting"))
        full = config.needed(name, *own)
        few = config.integer("num_sliding_attention_heads") if name == "num_attention_heads" else None
        few = few or table.integer(name, *own) or full
        return np.array([few if kind == "sliding_attention" else full for kind in _step_kinds(config)], np.int32)

    return numbers


def _dense_first(config: HfConfig) -> int:
    """Return the number of leading dense layers."""
    layers, told = config.needed("num_hidden_layers"), config.get("mlp_layer_types")
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
    """Return transformers' form of the per-layer lists in folders with the original key names: the kind of each layer,
    and rope base and rotated fraction by kind."""
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
    """Require sliding-window layers to rotate the whole head, and others half of it."""
    rope = config.below("rope_parameters", config.table("rope_parameters"))
    for kind, fixed in (("full_attention", 0.5), ("sliding_attention", 1.0)):
        if kind in rope.values and (rope.below(kind, rope.table(kind)).real("partial_rotary_factor") or 1.0) != fixed:
            return f"the rotated share of heads is not {fixed:g} with {kind}; the GGUF architecture has it fixed so"
    return None


def _scores(config: HfConfig) -> str | None:
    scalar = config.real("query_pre_attn_scalar")
    if scalar in (None, head_width(config)):
        return None
    return f"query_pre_attn_scalar is {scalar:g}; the GGUF architecture has it fixed at the width of heads"


_LISTED = {"rope_theta": "rope_theta", "partial_rotary_factors": "partial_rotary_factor"}
_STEP: Layer = {
    **of.QWEN, **of.HEAD_NORMS, "attn_gate": taken("self_attn.g_proj"),
    "ffn_gate_inp": taken("moe.gate"), "exp_probs_b.bias": taken("moe.router_bias"),
    **{f"ffn_{x}_exps": taken(f"moe.{x}_proj") for x in ("gate", "up", "down")},
    **{f"ffn_{x}_shexp": taken(f"share_expert.{x}_proj") for x in ("gate", "up", "down")},
}  # fmt: skip
_STEP_KEYS: dict[str, Key] = {
    "attention.head_count": _in_windows("num_attention_heads"),
    "attention.head_count_kv": _in_windows("num_attention_groups", "num_key_value_heads"),
    "rope.dimension_count": head_width,  # for sliding-window layers; the others rotate half of it
    "expert_used_count": by_name("moe_top_k", "num_experts_per_tok"),
    "expert_shared_feed_forward_length": by_name("share_expert_dim", "share_expert_dims"),
    "expert_weights_scale": lambda config: config.real("moe_router_scaling_factor"),
    "expert_weights_norm": lambda config: config.flag("norm_expert_weight") is not False,
    "expert_gating_func": 2,
    "leading_dense_block_count": _dense_first,
    "moe_every_n_layers": 1,
    "swiglu_clamp_exp": _limits("swiglu_limits"),
    "swiglu_clamp_shexp": _limits("swiglu_limits_shared"),
}

# -- Talkie ------------------------------------------------------------------------------------------------------------

_FLOAT32_EPS = 2.0**-23  # epsilon of the norms: the original code sets none, and this is PyTorch's default


def _turned_back(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
    """Negate the second half of each head's rows: the original code rotates in the opposite direction."""
    rows, width = height(parts[0]), head_width(sizes.config)
    numbered(parts[0], rows, sizes.heads, width)
    return t.scaled(parts[0], np.where(np.arange(rows) % width < width // 2, 1.0, -1.0).astype(np.float32))


_TALKIE: Layer = {
    **{
        f"attn_{x}.weight": taken(f"attn.attn_{name}.weight", _turned_back)
        for x, name in (("q", "query"), ("k", "key"))
    },
    "attn_v": taken("attn.attn_value"),
    "attn_q_norm.weight": taken("attn.head_gain.head_g", column),  # a factor for each head
    "attn_output": taken("attn.attn_resid"),
    "attn_output.scale": taken("attn_gain.a_g"),
    **{f"ffn_{x}": taken(f"mlp.mlp_{name}") for x, name in (("gate", "gate"), ("up", "linear"), ("down", "resid"))},
    "ffn_down.scale": taken("mlp_gain.a_g"),
    "layer_output_scale.weight": taken("embed_skip.a_g"),
}


ROWS = (
    Recipe(
        "deci", ("DeciLMForCausalLM",), {**of.LLAMA, "attn_k": taken("self_attn.k_proj", _by_own_heads)},
        rope_tensors=True,
        keys={
            "attention.head_count_kv": lambda config: np.array(_deci_kv_heads(config), np.int32),
            "feed_forward_length": _deci_ffn, "attention.key_length": head_width, "attention.value_length": head_width,
        },
    ),
    Recipe(
        "muse-glimmer", ("MuseGlimmerForConditionalGeneration",), _MUSE, norm_offset=1.0,
        plain_norms=("output_norm", "attn_q_norm.weight", "attn_k_norm.weight"),
        keys={"logit_scale": lambda config: config.real("output_multiplier")},
        checks=(must_be("post_norm_eps", 1e-8), must_be("attention_bias", False), _rotated_in_windows),
        defaults={
            "head_dim": 128, "final_logit_softcapping": 20.0, "qk_scale_factor": 3.87,
            "output_multiplier": 0.19611613513818404, "sliding_window": 2048, "layer_types": _muse_kinds,
        },
    ),
    Recipe(
        "nanbeige", ("NanbeigeForCausalLM",), of.LLAMA, rope_tensors=True,
        keys={
            "num_loops": lambda config: config.integer("num_loops") or 1,
            "skip_loop_final_norm": lambda config: config.flag("skip_loop_final_norm") is True,
        },
    ),
    Recipe(
        "spark2_5", ("Spark2_5ForCausalLM",), _SPARK,
        keys={
            "rope.dimension_count": _share("full_attention"),
            "rope.dimension_count_swa": _share("sliding_attention"),
        },
        checks=(
            must_be("gate_attn_act_mode", "sigmoid"), must_be("headwise_attn_output_gate", True),
        ),
        defaults={"gate_attn_act_mode": "", "headwise_attn_output_gate": False},
    ),
    Recipe(
        "step35", ("Step3p5ForCausalLM", "Step3p7ForConditionalGeneration", "Step3p7ForCausalLM"), _STEP,
        keys=_STEP_KEYS, norm_offset=1.0, words=_step_words, rope_tensors="whole",
        checks=(
            _half_when_full, _scores, must_be("moe_every_n_layer", 1), must_be("moe_router_activation", "sigmoid"),
            must_be("use_head_wise_attn_gate", True), must_be("zero_centered", True), must_be("attention_bias", False),
            must_be("mlp_bias", False), must_be("use_bidirectional_attention", False), must_be("gating", True),
        ),
    ),
    Recipe(
        "talkie", ("TalkieForCausalLM",), _TALKIE,
        top={
            "token_embd": From(("model.embed",)), "output.weight": (From(("lm_head.weight",)), From(("lm_head",))),
        },
        layers=lambda config: [f"model.blocks.{n}." for n in range(config.needed("num_hidden_layers"))],
        keys={"attention.layer_norm_rms_epsilon": _FLOAT32_EPS}, number={"talkie.logit_scale": "lm_head_gain.w_g"},
        checks=(as_many_keys, must_be("rope_scaling", None)),
        defaults={"rms_norm_eps": _FLOAT32_EPS, "rope_theta": 1e6},
    ),
)  # fmt: skip

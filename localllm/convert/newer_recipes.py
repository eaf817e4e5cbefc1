"""Recipes of unusual models of 2026: North, Granite with windows, HRM-Text, Hunyuan 3, Laguna, Mellum 2, MiMo V2."""

from __future__ import annotations

from typing import Any

import numpy as np

from localllm.convert import sources as of
from localllm.convert import tensor as t
from localllm.convert.errors import ConvertError
from localllm.convert.hf_config import HfConfig
from localllm.convert.recipe import From, Key, Layer, Parts, Recipe, by_name, must_be, quarter, take_half, taken
from localllm.convert.tensor import LazyTensor
from localllm.models.reading.bounds import MAX_LAYERS
from localllm.printable import printable

_HUNYUAN: Layer = {
    **of.QWEN,
    **of.HEAD_NORMS,
    "ffn_gate_inp": taken("mlp.router.gate"),
    "exp_probs_b": taken("mlp.expert_bias"),
    **of.NUMBERED,
    **{f"ffn_{x}_shexp": taken(f"mlp.shared_mlp.{x}_proj") for x in ("gate", "up", "down")},
}
_LAGUNA: Layer = {
    **of.QWEN,
    **of.HEAD_NORMS,
    "attn_gate": taken("self_attn.g_proj"),
    "ffn_gate_inp": taken("mlp.gate"),
    "exp_probs_b.bias": taken("mlp.experts.e_score_correction_bias"),
    **of.NUMBERED,
    **{f"ffn_{x}_shexp": taken(f"mlp.shared_expert.{x}_proj") for x in ("gate", "up", "down")},
}
_COHERE: Layer = {
    "attn_norm": taken("input_layernorm"), **of.QKV, **of.OUT, **of.GATED, **of.ROUTED, **of.SHARED,
}  # fmt: skip
_GRANITE: Layer = {
    **of.LLAMA,
    "attn_sinks.weight": taken("self_attn.sinks"),
    "ffn_gate_inp": (From(("block_sparse_moe.router",)), From(("block_sparse_moe.router.layer",))),
    **{
        f"ffn_{x}_exps.weight": (
            From(("block_sparse_moe.experts.gate_up_proj",), take_half(which)),
            From(("block_sparse_moe.input_linear.weight",), take_half(which)),
        )
        for which, x in enumerate(("gate", "up"))
    },
    "ffn_down_exps.weight": (
        From(("block_sparse_moe.experts.down_proj",)), From(("block_sparse_moe.output_linear.weight",)),
    ),
    "ffn_up_shexp": taken("shared_mlp.input_linear"),  # gate and up in one matrix
    "ffn_down_shexp": taken("shared_mlp.output_linear"),
}  # fmt: skip
_HRM: Layer = {
    **{
        f"attn_{x}": (From((f"self_attn.{x}_proj",)), From(("attn.gqkv_proj",), quarter(which)))
        for which, x in enumerate(("gate", "q", "k", "v"))
    },
    "attn_output": (From(("self_attn.o_proj",)), From(("attn.o_proj",))),
    **{
        f"ffn_{x}": (From((f"mlp.{x}_proj",)), From(("mlp.gate_up_proj",), take_half(which)))
        for which, x in enumerate(("gate", "up"))
    },
    "ffn_down": taken("mlp.down_proj"),
}
_MIMO: Layer = {
    **of.QWEN,
    **of.ROUTED,
    "attn_sinks.weight": (From(("self_attn.attention_sink_bias",)), From(("self_attn.sinks",))),
    "exp_probs_b.bias": taken("mlp.gate.e_score_correction_bias"),
}
_SIGMOID: dict[str, Key] = {"expert_gating_func": 2, "expert_weights_norm": True}


def _hrm_stack(config: HfConfig) -> int:
    """Return the number of layers per stack. transformers counts the layers of all passes in `num_hidden_layers`."""
    layers = config.needed("num_layers_per_stack", "num_hidden_layers")
    if layers > MAX_LAYERS:
        raise config.error("num_layers_per_stack", layers, f"at most {MAX_LAYERS}")
    return layers


def _hrm_passes(config: HfConfig) -> int:
    """Return the total number of passes through both stacks."""
    return config.needed("H_cycles") * (config.needed("L_cycles") + 1)


def _hrm_scale(config: HfConfig) -> float:
    return config.real("embedding_scale") or 1.0 / (config.real("initializer_range") or 0.02)


def _hrm_layers(config: HfConfig) -> list[str]:
    """Return the names of the layers: the low stack, then the high stack."""
    return [f"model.{stack}_module.layers.{layer}." for stack in "LH" for layer in range(_hrm_stack(config))]


def _kinds(config: HfConfig) -> list[str]:
    """Return "dense" or "sparse" for each layer."""
    kinds, layers = config.get("mlp_layer_types"), config.needed("num_hidden_layers")
    known = isinstance(kinds, list) and len(kinds) == layers and all(kind in ("dense", "sparse") for kind in kinds)
    if not known:
        raise config.error("mlp_layer_types", kinds, f"dense or sparse, {layers} times")
    return list(kinds)


def _leading(config: HfConfig) -> int:
    """Return the number of leading dense layers."""
    kinds = _kinds(config)
    count = kinds.index("sparse") if "sparse" in kinds else len(kinds)
    if "dense" in kinds[count:]:
        raise config.error("mlp_layer_types", ", ".join(kinds), "dense layers before all sparse ones")
    return count


def _all_sparse(config: HfConfig) -> str | None:
    return "mlp_layer_types has dense layers, which do not exist" if _leading(config) else None


def _heads(config: HfConfig) -> np.ndarray | int:
    """Return the number of heads: an array by layer, or one number for all layers."""
    each, layers = config.get("num_attention_heads_per_layer"), config.needed("num_hidden_layers")
    if each is None:
        return config.needed("num_attention_heads")
    if not isinstance(each, list) or len(each) != layers or not all(type(n) is int and 0 < n < 1 << 16 for n in each):
        raise config.error("num_attention_heads_per_layer", each, f"{layers} numbers of heads")
    return np.array(each, np.int32)


def _rotated_when_sliding(config: HfConfig) -> int:
    """Return the number of rotated values per head in sliding-window layers."""
    rope = config.below("rope_parameters", config.table("rope_parameters")).table("sliding_attention")
    share = config.below("sliding_attention", rope).real("partial_rotary_factor")
    return int(config.needed("head_dim") * (1.0 if share is None else share))


def _slides(config: HfConfig) -> list[bool]:
    """Return which layers have a sliding window."""
    kinds, layers = config.get("layer_types"), config.needed("num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise config.error("layer_types", kinds, f"the kinds of {layers} layers")
    return [kind == "sliding_attention" for kind in kinds]


def _named_kinds(slides: list[bool]) -> list[str]:
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def _cohere_kinds(config: HfConfig) -> list[str]:
    """Return the kind of each layer when config.json only gives periods. The period restarts after the dense layers."""
    dense = config.integer("first_k_dense_replace") or 0
    first, period = config.integer("prefix_dense_sliding_window_pattern") or 1, config.integer("sliding_window_pattern")
    rest = config.needed("num_hidden_layers") - dense
    starts = [(i + 1) % first != 0 for i in range(dense)]
    return _named_kinds([*starts, *((i + 1) % (period or 4) != 0 for i in range(rest))])


def _cohere_widths(config: HfConfig) -> list[str]:
    dense, layers = config.integer("first_k_dense_replace") or 0, config.needed("num_hidden_layers")
    return ["dense" if layer < dense else "sparse" for layer in range(layers)]


def _cohere_gating(config: HfConfig) -> int:
    """Return GGUF's number for the router's scoring function."""
    functions = {"sigmoid": 2, "softmax": 3}
    name = config.get("expert_selection_fn") or "softmax"
    if name not in functions:
        raise config.error("expert_selection_fn", name, " or ".join(functions))
    return functions[name]


def _rms_eps(config: HfConfig) -> float | None:
    """Return the epsilon of RMS norms; None if the model uses layer norms."""
    return config.real("rms_norm_eps")


def _layer_eps(config: HfConfig) -> float | None:
    return config.real("layer_norm_eps")


def _average(config: HfConfig) -> str | None:
    strategy = config.get("shared_expert_combination_strategy") or "average"
    if not config.integer("num_shared_experts") or strategy == "average":
        return None
    return f"shared_expert_combination_strategy is {strategy}; the GGUF architecture has it fixed at average"


def _turned_as_told(config: HfConfig) -> str | None:
    """Require sliding windows in some layer, since GGUF rotates every layer otherwise, and rope in dense layers."""
    slides, dense = _slides(config), _leading(config)
    if config.values.get("sliding_window", 0) is None or not any(slides):
        return "no layer has a window; the GGUF architecture rotates all layers then, transformers none"
    if all(slides[:dense]) or (config.integer("prefix_dense_sliding_window_pattern") or 1) == 1:
        return None
    return "prefix_dense_sliding_window_pattern is not 1; the GGUF architecture rotates all dense layers"


def _layer_bases(config: HfConfig) -> list[float]:
    """Return each layer's rope base, 0 for layers without rope."""
    found, layers = config.get("layer_rope_theta"), config.needed("num_hidden_layers")
    if found is None:
        rope = config.below("rope_parameters", config.table("rope_parameters", "rope_scaling"))
        return [rope.real("rope_theta") or config.real("rope_theta") or 10000.0] * layers
    if (
        not isinstance(found, list)
        or len(found) != layers
        or not all(type(x) in (int, float) and x >= 0 for x in found)
    ):
        raise config.error("layer_rope_theta", found, f"{layers} numbers from 0 up")
    return [float(base) for base in found]


def _granite_base(config: HfConfig) -> float | None:
    bases = {base for base in _layer_bases(config) if base}
    if len(bases) > 1:
        found = ", ".join(f"{base:g}" for base in sorted(bases))
        raise config.error("layer_rope_theta", found, "0 or one number for all layers, as GGUF files have it")
    return max(bases, default=None)


def _granite_kinds(config: HfConfig) -> list[str]:
    return _named_kinds([layer % 4 != 0 for layer in range(config.needed("num_hidden_layers"))])


def _mimo_kinds(config: HfConfig) -> list[str]:
    """Return the kind of each layer: from the 0/1 list of 2025 folders (1: sliding), else by the default period."""
    told, layers = config.get("hybrid_layer_pattern"), config.needed("num_hidden_layers")
    if told is None:
        return _named_kinds([layer > 0 and (layer + 1) % 6 != 0 for layer in range(layers)])
    if not isinstance(told, list) or len(told) != layers or not all(flag in (0, 1) for flag in told):
        raise config.error("hybrid_layer_pattern", told, f"0 or 1, {layers} times")
    return _named_kinds([flag == 1 for flag in told])


def _mimo_kv_heads(config: HfConfig) -> np.ndarray:
    """Return the number of KV heads by layer. By default sliding-window layers have twice the number."""
    full = config.needed("num_key_value_heads")
    few = config.integer("swa_num_key_value_heads") or 2 * full
    return np.array([few if slide else full for slide in _slides(config)], np.int32)


def _mimo_window(config: HfConfig) -> int:
    """Return the window size including the current position; folders of 2025 exclude it."""
    others = config.integer("sliding_window_size")
    return others + 1 if others else config.needed("sliding_window")


def _value_scale(config: HfConfig) -> float | None:
    told = "attention_value_scale" in config.values  # null means none
    return config.real("attention_value_scale") if told else 0.707


def _mimo_alike(config: HfConfig) -> str | None:
    """Require the same head sizes in layers with and without a window."""
    rope = config.below("rope_parameters", config.table("rope_parameters"))
    shares = {
        rope.below(x, rope.table(x)).real("partial_rotary_factor") for x in ("full_attention", "sliding_attention")
    }
    if len(shares) > 1:
        return "partial_rotary_factor is not the same with a window and without; the GGUF architecture has one for both"
    for name in ("num_attention_heads", "head_dim", "v_head_dim"):
        if config.integer(f"swa_{name}") not in (None, config.integer(name)):
            return f"swa_{name} is not {name}; the GGUF architecture has one for both"
    return None


def _of_cards(codes: LazyTensor, scales: LazyTensor, config: HfConfig) -> LazyTensor | None:
    """Return MiMo V2.5's fused QKV matrix, which its folders store in tensor-parallel shards.

    Each shard has its part of queries, keys and values, with its own scales for blocks of 128 rows.
    """
    if not codes.name.endswith("self_attn.qkv_proj.weight"):
        return None
    rows, heads = codes.shape[0], config.needed("num_attention_heads")
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
        "config.json does not belong to these weights"
    )


_MIMO_KEYS: dict[str, Key] = {
    "attention.head_count_kv": _mimo_kv_heads, "attention.value_length": "v_head_dim",
    "attention.value_scale": _value_scale, "attention.sliding_window": _mimo_window, "expert_gating_func": 2,
}  # fmt: skip
_MIMO_CHECKS = (
    must_be("attention_bias", False), must_be("n_group", 1), must_be("norm_topk_prob", True),
    must_be("routed_scaling_factor", 1.0), must_be("scoring_func", "sigmoid"), must_be("topk_method", "noaux_tc"),
    must_be("n_shared_experts", 0), _mimo_alike,
)  # fmt: skip
_MIMO_DEFAULTS: dict[str, Any] = {
    "head_dim": 192, "v_head_dim": 128, "sliding_window": 129, "layer_types": _mimo_kinds, "rope_theta": 5e6,
    "rope_local_base_freq": lambda config: config.real("swa_rope_theta") or 1e4, "partial_rotary_factor": 0.334,
    "rms_norm_eps": lambda config: config.real("layernorm_epsilon") or 1e-5,
}  # fmt: skip

ROWS = (
    Recipe(
        "cohere2moe", ("Cohere2MoeForCausalLM",), _COHERE, eps="layer_norm_eps",
        keys={
            "attention.layer_norm_epsilon": lambda config: _layer_eps(config) if _rms_eps(config) is None else None,
            "attention.layer_norm_rms_epsilon": _rms_eps, "leading_dense_block_count": _leading,
            "feed_forward_length": by_name("prefix_dense_intermediate_size", "intermediate_size"),
            "expert_feed_forward_length": "intermediate_size", "expert_gating_func": _cohere_gating,
            "expert_shared_count": lambda config: config.integer("num_shared_experts") or None,
        },
        checks=(must_be("attention_bias", False), _average, _turned_as_told),
        defaults={
            "layer_norm_eps": 1e-5, "head_dim": 128, "logit_scale": 0.0625, "norm_topk_prob": True,
            "sliding_window": 4096, "num_experts": 8, "num_experts_per_tok": 2, "layer_types": _cohere_kinds,
            "mlp_layer_types": _cohere_widths,
        },
    ),
    Recipe(
        "granite_swa", ("GraniteSWAForCausalLM", "GraniteMoeSWAForCausalLM"), _GRANITE, rope_tensors=True,
        keys={
            "rope.freq_base": _granite_base,
            "attention.rope_pattern": lambda config: np.array([base > 0 for base in _layer_bases(config)]),
        },
        defaults={"sliding_window": 128, "layer_types": _granite_kinds},
    ),
    Recipe(
        "hrm_text", ("HrmTextForCausalLM",), _HRM, layers=_hrm_layers, top={"hrm.z_l_init": From(("model.z_L_init",))},
        keys={
            "block_count": lambda config: _hrm_stack(config) * _hrm_passes(config),
            "attention.head_count_kv": "num_attention_heads",
            "hrm.layers_per_stack": _hrm_stack, "hrm.h_cycles": "H_cycles", "hrm.l_cycles": "L_cycles",
            "hrm.prefix_lm": lambda config: config.flag("prefix_lm"),
            "embedding_scale": _hrm_scale,
        },
        checks=(must_be("attention_bias", False), must_be("mlp_bias", False)),
        defaults={"H_cycles": 2, "L_cycles": 3, "head_dim": 128, "prefix_lm": True},
    ),
    Recipe(
        "hy_v3", ("HYV3ForCausalLM",), _HUNYUAN,
        keys={
            **_SIGMOID, "expert_weights_scale": lambda config: config.real("router_scaling_factor"),
            "leading_dense_block_count": _leading,
        },
    ),
    Recipe(
        "laguna", ("LagunaForCausalLM",), _LAGUNA,
        keys={
            **_SIGMOID, "expert_weights_scale": lambda config: config.real("moe_routed_scaling_factor"),
            "leading_dense_block_count": _leading, "attention.head_count": _heads,
            "rope.dimension_count_swa": _rotated_when_sliding,
        },
        checks=(must_be("moe_router_logit_softcapping", 0), must_be("moe_apply_router_weight_on_input", False)),
    ),
    Recipe(
        "mellum", ("MellumForCausalLM",), {**of.NORMS, **of.QKV, **of.OUT, **of.HEAD_NORMS, **of.QWEN2_MOE},
        checks=(must_be("norm_topk_prob", True), _all_sparse),
    ),
    Recipe("mimo2", ("MiMoV2FlashForCausalLM",), _MIMO, keys=_MIMO_KEYS, checks=_MIMO_CHECKS, defaults=_MIMO_DEFAULTS),
    Recipe(
        "mimo2", ("MiMoV2ForCausalLM",), {**_MIMO, "attn_qkv": taken("self_attn.qkv_proj")}, keys=_MIMO_KEYS,
        checks=_MIMO_CHECKS, defaults=_MIMO_DEFAULTS, parts=Parts(others=("speech_embeddings.",)), scaled=_of_cards,
    ),
)  # fmt: skip

"""The recipes of architectures with recurrent layers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from localllm.convert import sources as of
from localllm.convert import tensor as t
from localllm.convert.hf_config import HfConfig, class_of
from localllm.convert.recipe import (
    Change,
    From,
    Key,
    Layer,
    Recipe,
    Sizes,
    decay,
    half,
    height,
    in_turn,
    must_be,
    numbered,
    of_groups,
    shaped,
    squeezed,
    taken,
)
from localllm.convert.tensor import LazyTensor
from localllm.models.config import RECURRENT_KEY
from localllm.printable import printable


def is_kind(*kinds: str) -> Callable[[HfConfig], np.ndarray | None]:
    """Return which layers are of these kinds, by `layer_types`; None if config.json does not tell."""

    def layers(config: HfConfig) -> np.ndarray | None:
        found, count = config.get("layer_types"), config.needed("num_hidden_layers")
        if found is None:
            return None
        if not isinstance(found, list) or len(found) != count:
            raise config.error("layer_types", len(found) if isinstance(found, list) else found, f"{count} kinds")
        return np.array([kind in kinds for kind in found])

    return layers


def _delta_heads(config: HfConfig) -> tuple[int, int, int, int]:
    """Return key heads, value heads for each of them, and the widths of both."""
    groups, heads = config.needed("linear_num_key_heads"), config.needed("linear_num_value_heads")
    return groups, heads // groups, config.needed("linear_key_head_dim"), config.needed("linear_value_head_dim")


def _qkvz(config: HfConfig) -> tuple[int, tuple[int, ...]]:
    groups, each, key, value = _delta_heads(config)
    return groups, (key, key, each * value, each * value)


def tiled(keys: int, rows: bool) -> Change:
    """Reorder value heads, those of a key head together, to one of every key head, and again, after `keys` times the
    rows of all keys. A head has as many rows as values, or one."""

    def change(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
        index = _tiled(parts[0], sizes.config, keys, rows, height(parts[0]))
        return t.picked(parts[0], index, len(index))

    return change


def tiled_columns(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
    """Reorder the columns so."""
    return t.columns(parts[0], _tiled(parts[0], sizes.config, 0, True, parts[0].shape[-1]))


def _tiled(tensor: LazyTensor, config: HfConfig, keys: int, wide: bool, count: int) -> np.ndarray:
    groups, each, key, value = _delta_heads(config)
    before, width = keys * groups * key, value if wide else 1
    values = numbered(tensor, count - before, groups, each * width)
    order = values.reshape(groups, each, width).swapaxes(0, 1).reshape(-1)
    return np.concatenate([np.arange(before), before + order])


_DELTA_KEYS: dict[str, Key] = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.inner_size": lambda config: config.needed("linear_value_head_dim") * config.needed("linear_num_value_heads"),
    "full_attention_interval": lambda config: config.integer("full_attention_interval") or 4,
    RECURRENT_KEY: is_kind("linear_attention"),
}
_ATTENTION: Layer = {
    "attn_norm": taken("input_layernorm"),
    "post_attention_norm": taken("post_attention_layernorm"),
    **of.QKV,
    **of.OUT,
    **of.HEAD_NORMS,
}
_QWEN3_NEXT: Layer = {
    **_ATTENTION,
    "attn_qkv": taken("linear_attn.in_proj_qkvz", of_groups(_qkvz, 0, 1, 2)),
    "attn_gate": taken("linear_attn.in_proj_qkvz", of_groups(_qkvz, 3)),
    "ssm_ba": taken("linear_attn.in_proj_ba"),
    "ssm_conv1d": taken("linear_attn.conv1d", squeezed),
    "ssm_dt.bias": taken("linear_attn.dt_bias"),
    "ssm_a": taken("linear_attn.A_log", decay),
    "ssm_norm": taken("linear_attn.norm"),
    "ssm_out": taken("linear_attn.out_proj"),
}
_QWEN35: Layer = {
    **_ATTENTION,
    "attn_qkv": taken("linear_attn.in_proj_qkv", tiled(2, rows=True)),
    "attn_gate": taken("linear_attn.in_proj_z", tiled(0, rows=True)),
    "ssm_beta": taken("linear_attn.in_proj_b", tiled(0, rows=False)),
    "ssm_alpha": taken("linear_attn.in_proj_a", tiled(0, rows=False)),
    "ssm_conv1d": taken("linear_attn.conv1d", in_turn(squeezed, tiled(2, rows=True))),
    "ssm_dt.bias": taken("linear_attn.dt_bias", tiled(0, rows=False)),
    "ssm_a": taken("linear_attn.A_log", in_turn(decay, tiled(0, rows=False))),
    "ssm_norm": taken("linear_attn.norm"),
    "ssm_out": taken("linear_attn.out_proj", tiled_columns),
}
_EXPERTS: Layer = {key: source for key, source in of.QWEN2_MOE.items() if key.startswith("ffn_") and key != "ffn_norm"}


def _sections(config: HfConfig) -> np.ndarray:
    """Return how many angles encode time, height and width in a picture; text does not depend on it."""
    found = config.below("rope_parameters", config.table("rope_parameters", "rope_scaling")).get("mrope_section")
    whole = isinstance(found, list) and len(found) <= 4 and all(type(n) is int and 0 <= n < 1024 for n in found)
    sections = found if whole else [11, 11, 10]  # what transformers assumes
    return np.array([*sections, 0, 0, 0, 0][:4], np.int32)


def kv_heads(attends: Callable[[HfConfig], np.ndarray]) -> Key:
    """Return the key-value heads of every layer: none but in the layers that attend."""
    return lambda config: np.where(attends(config), config.needed("num_key_value_heads"), 0).astype(np.int32)


def attending(config: HfConfig) -> np.ndarray:
    """Return which layers have attention, by `layer_types`."""
    found = is_kind("attention", "full_attention")(config)
    if found is None:
        raise config.error("layer_types", None, "the kinds of the layers")
    return found


_LFM2: Layer = {
    "attn_norm": taken("operator_norm"),
    "ffn_norm": taken("ffn_norm"),
    **of.QKV,
    "attn_output": taken("self_attn.out_proj"),
    "attn_q_norm": taken("self_attn.q_layernorm"),
    "attn_k_norm": taken("self_attn.k_layernorm"),
    "shortconv.in_proj": taken("conv.in_proj"),
    "shortconv.conv": taken("conv.conv", squeezed),
    "shortconv.out_proj": taken("conv.out_proj"),
    "ffn_gate": taken("feed_forward.w1"),
    "ffn_up": taken("feed_forward.w3"),
    "ffn_down": taken("feed_forward.w2"),
}
_LFM2_MOE: Layer = {
    **_LFM2,
    "ffn_gate_inp": taken("feed_forward.gate"),
    "exp_probs_b.bias": taken("feed_forward.expert_bias"),
    **of.experts(*(f"feed_forward.experts.{{}}.{w}" for w in ("w1", "w3", "w2"))),
}
_LFM2_TOP = {"token_embd_norm": From(("model.embedding_norm",))}
_LFM2_KEYS: dict[str, Key] = {
    "attention.head_count_kv": kv_heads(attending),
    "shortconv.l_cache": "conv_L_cache",
}


def _adjusted_width(config: HfConfig) -> int:
    """Return the width of LFM2's feed-forward, which config.json tells before two thirds of it are rounded up."""
    width = config.needed("block_ff_dim", "intermediate_size")
    if config.flag("block_auto_adjust_ff_dim") is False:
        return width
    factor, multiple = config.real("block_ffn_dim_multiplier"), config.needed("block_multiple_of")
    width = int((1.0 if factor is None else factor) * int(2 * width / 3))
    return -(-width // multiple) * multiple


def _mamba(prefix: str) -> Layer:
    return {
        "ssm_in": taken(f"{prefix}.in_proj"),
        "ssm_conv1d.weight": taken(f"{prefix}.conv1d.weight", squeezed),
        "ssm_conv1d.bias": taken(f"{prefix}.conv1d.bias"),
        "ssm_x": taken(f"{prefix}.x_proj"),
        "ssm_dt": taken(f"{prefix}.dt_proj"),
        "ssm_a": taken(f"{prefix}.A_log", decay),
        "ssm_d": taken(f"{prefix}.D"),
        "ssm_out": taken(f"{prefix}.out_proj"),
        **{f"ssm_{x}_norm": taken(f"{prefix}.{x}_layernorm") for x in ("dt", "b", "c")},
    }


def _mamba2(prefix: str, group: Callable[[HfConfig], int]) -> Layer:
    """Sources of Mamba-2, whose norm has groups of so many values."""
    column = shaped(lambda sizes: 1)
    return {
        "ssm_in": taken(f"{prefix}.in_proj"),
        "ssm_conv1d.weight": taken(f"{prefix}.conv1d.weight", squeezed),
        "ssm_conv1d.bias": taken(f"{prefix}.conv1d.bias"),
        "ssm_dt.bias": taken(f"{prefix}.dt_bias"),
        "ssm_a": taken(f"{prefix}.A_log", in_turn(decay, column)),
        "ssm_d": taken(f"{prefix}.D", column),
        "ssm_norm": taken(f"{prefix}.norm", shaped(lambda sizes: group(sizes.config))),
        "ssm_out": taken(f"{prefix}.out_proj"),
    }


def product(one: str, other: str, share: str = "") -> Callable[[HfConfig], int]:
    """Return the product of two numbers, divided by a third."""
    return lambda config: config.needed(one) * config.needed(other) // (config.needed(share) if share else 1)


def steps_unbounded(config: HfConfig) -> str | None:
    limits = config.get("time_step_limit")
    if not isinstance(limits, list) or limits[:1] == [0.0]:
        return None
    return f"time_step_limit is {printable(str(limits))}; the GGUF architecture has no limits"


def rank(name: str) -> Callable[[HfConfig], int]:
    """Return the rank of the step sizes, a sixteenth of the width where config.json leaves it to the model."""
    return lambda config: (
        -(-config.needed("hidden_size") // 16) if config.get(name) in (None, "auto") else config.needed(name)
    )


_MAMBA_TOP = {
    "token_embd": From(("model.embeddings",)), "output_norm": From(("model.norm_f",)), "output": From(("lm_head",)),
}  # fmt: skip
_NO_ATTENTION: dict[str, Key] = {
    "attention.head_count": 0, "attention.head_count_kv": 0, "feed_forward_length": 0, "attention.key_length": None,
    "attention.value_length": None, "rope.dimension_count": None, "rope.freq_base": None,
}  # fmt: skip
_NO_ATTENTION_DEFAULTS = {"num_attention_heads": 1, "max_position_embeddings": 1 << 20}
_MAMBA_KEYS: dict[str, Key] = {
    **_NO_ATTENTION, "ssm.conv_kernel": "conv_kernel", "ssm.inner_size": product("expand", "hidden_size"),
    "ssm.state_size": "state_size", "ssm.time_step_rank": rank("time_step_rank"),
    "ssm.dt_b_c_rms": lambda config: class_of(config) == "FalconMambaForCausalLM",
}  # fmt: skip
_GRANITE_ATTENTION: Layer = {**of.NORMS, **of.QKV_PERMUTED, **of.OUT}
_GRANITE_FFN: Layer = {
    "ffn_gate": taken("shared_mlp.input_linear", half(0)),
    "ffn_up": taken("shared_mlp.input_linear", half(1)),
    "ffn_down": taken("shared_mlp.output_linear"),
}
_GRANITE_MAMBA: Layer = _mamba2("mamba", product("mamba_expand", "hidden_size", "mamba_n_groups"))
_GRANITE_ROPE: dict[str, Key] = {
    "rope.scaling.finetuned": lambda config: config.get("position_embedding_type") == "rope",
}
_GRANITE_KEYS: dict[str, Key] = {
    "attention.head_count_kv": kv_heads(attending),
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.inner_size": product("mamba_expand", "hidden_size"),
    "ssm.state_size": "mamba_d_state",
    "ssm.time_step_rank": "mamba_n_heads",
    "ssm.group_count": "mamba_n_groups",
    **_GRANITE_ROPE,
}
_GRANITE_CLASS = ("GraniteMoeHybridForCausalLM",)


def _granite_dense(config: HfConfig) -> bool:
    return not config.integer("num_local_experts")


def _granite_attends(config: HfConfig) -> bool:
    return bool(attending(config).all())


def _every(period: str, offset: str) -> Callable[[HfConfig], np.ndarray]:
    """Return which layers these keys choose: one of every `period`, from number `offset`."""

    def layers(config: HfConfig) -> np.ndarray:
        every, first = config.needed(period), config.integer(offset) or 0
        return np.array([layer % every == first for layer in range(config.needed("num_hidden_layers"))])

    return layers


_JAMBA: Layer = {
    "attn_norm": taken("input_layernorm"),
    "ffn_norm": taken("pre_ff_layernorm"),
    **of.QKV,
    **of.OUT,
    **_mamba("mamba"),
    **{f"ffn_{x}": taken(f"feed_forward.{x}_proj") for x in ("gate", "up", "down")},
    "ffn_gate_inp": taken("feed_forward.router"),
    **of.experts(*(f"feed_forward.experts.{{}}.{x}_proj" for x in ("gate", "up", "down"))),
}
_NEMOTRON_KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_SAME_KIND = {"linear_attention": "mamba", "full_attention": "attention"}


def _blocks(config: HfConfig) -> list[str]:
    """Return the kinds of Nemotron H's layers."""
    found = config.get("layers_block_type", "hybrid_override_pattern")
    if not isinstance(found, list | str) or not found:
        raise config.error("layers_block_type", found, "the kinds of the layers")
    return [_NEMOTRON_KINDS.get(kind) or _SAME_KIND.get(kind, kind) for kind in map(str, found)]


def _where(kind: str, name: str) -> Key:
    """Return a number of config.json in layers of this kind, and 0 in others."""
    return lambda config: np.array([config.needed(name) if one == kind else 0 for one in _blocks(config)], np.int32)


def without_experts(config: HfConfig) -> str | None:
    odd = set(_blocks(config)) - {"mamba", "attention", "mlp"}
    return f"layers_block_type has {printable(min(odd))}, which has no place" if odd else None


_NEMOTRON_H: Layer = {
    "attn_norm": taken("norm"),
    **{f"attn_{x}": taken(f"mixer.{x}_proj") for x in "qkv"},
    "attn_output": taken("mixer.o_proj"),
    **_mamba2("mixer", product("mamba_num_heads", "mamba_head_dim", "n_groups")),
    "ffn_up": taken("mixer.up_proj"),
    "ffn_down": taken("mixer.down_proj"),
}


ROWS = (
    Recipe(
        "qwen3next", ("Qwen3NextForCausalLM",), {**_QWEN3_NEXT, **_EXPERTS}, norm_offset=1.0,
        plain_norms=("ssm_norm",), defaults={"partial_rotary_factor": 0.25}, keys=_DELTA_KEYS,
        checks=(must_be("norm_topk_prob", True), must_be("decoder_sparse_step", 1), must_be("mlp_only_layers", [])),
    ),
    Recipe(
        "qwen35", ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"), {**_QWEN35, **of.GATED}, norm_offset=1.0,
        plain_norms=("ssm_norm",), defaults={"partial_rotary_factor": 0.25},
        keys={**_DELTA_KEYS, "rope.dimension_sections": _sections},
    ),
    Recipe(
        "qwen35moe", ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"), {**_QWEN35, **_EXPERTS},
        norm_offset=1.0, plain_norms=("ssm_norm",), defaults={"partial_rotary_factor": 0.25},
        keys={**_DELTA_KEYS, "rope.dimension_sections": _sections},
    ),
    Recipe(
        "lfm2", ("Lfm2ForCausalLM",), _LFM2, eps="norm_eps", top=_LFM2_TOP,
        keys={**_LFM2_KEYS, "feed_forward_length": _adjusted_width},
    ),
    Recipe(
        "lfm2moe", ("Lfm2MoeForCausalLM",), _LFM2_MOE, eps="norm_eps", keys={**_LFM2_KEYS, "expert_gating_func": 2},
        top=_LFM2_TOP, checks=(must_be("norm_topk_prob", True), must_be("routed_scaling_factor", 1.0)),
    ),
    Recipe(
        "granite", _GRANITE_CLASS, {**_GRANITE_ATTENTION, **_GRANITE_FFN}, rope_tensors=True,
        keys={**_GRANITE_ROPE, "feed_forward_length": "shared_intermediate_size"},
        when=lambda config: _granite_attends(config) and _granite_dense(config),
    ),
    Recipe(
        "granitemoe", _GRANITE_CLASS, of.GRANITE_MOE, rope_tensors=True, when=_granite_attends,
        checks=(must_be("position_embedding_type", "rope"),),
    ),
    Recipe(
        "granitehybrid", _GRANITE_CLASS, {**_GRANITE_ATTENTION, **_GRANITE_FFN, **_GRANITE_MAMBA}, rope_tensors=True,
        keys={**_GRANITE_KEYS, "feed_forward_length": "shared_intermediate_size"}, when=_granite_dense,
        checks=(steps_unbounded,),
    ),
    Recipe(
        "granitehybrid", _GRANITE_CLASS, {**of.GRANITE_MOE, **_GRANITE_MAMBA}, rope_tensors=True, keys=_GRANITE_KEYS,
        checks=(steps_unbounded,),
    ),
    Recipe(
        "mamba", ("MambaForCausalLM", "FalconMambaForCausalLM"), {"attn_norm": taken("norm"), **_mamba("mixer")},
        eps="layer_norm_epsilon", defaults={**_NO_ATTENTION_DEFAULTS, "layer_norm_epsilon": 1e-5, "expand": 2},
        keys=_MAMBA_KEYS, top=_MAMBA_TOP,
    ),
    Recipe(
        "mamba2", ("Mamba2ForCausalLM",),
        {"attn_norm": taken("norm"), **_mamba2("mixer", product("expand", "hidden_size", "n_groups"))},
        eps="layer_norm_epsilon", top=_MAMBA_TOP, checks=(steps_unbounded,),
        defaults={**_NO_ATTENTION_DEFAULTS, "layer_norm_epsilon": 1e-5, "expand": 2, "n_groups": 1},
        keys={
            **_NO_ATTENTION, "ssm.conv_kernel": "conv_kernel", "ssm.inner_size": product("expand", "hidden_size"),
            "ssm.state_size": "state_size", "ssm.time_step_rank": "num_heads", "ssm.group_count": "n_groups",
        },
    ),
    Recipe(
        "jamba", ("JambaForCausalLM",), _JAMBA, top={"output_norm": From(("model.final_layernorm",))},
        keys={
            "attention.head_count_kv": kv_heads(_every("attn_layer_period", "attn_layer_offset")),
            "rope.dimension_count": None, "rope.freq_base": None,
            "ssm.conv_kernel": "mamba_d_conv", "ssm.inner_size": product("mamba_expand", "hidden_size"),
            "ssm.state_size": "mamba_d_state", "ssm.time_step_rank": rank("mamba_dt_rank"),
        },
    ),
    Recipe(
        "nemotron_h", ("NemotronHForCausalLM",), _NEMOTRON_H, top=_MAMBA_TOP, eps="layer_norm_epsilon",
        defaults={"num_hidden_layers": lambda config: len(_blocks(config)), "layer_norm_epsilon": 1e-5},
        keys={
            "attention.head_count_kv": _where("attention", "num_key_value_heads"),
            "feed_forward_length": _where("mlp", "intermediate_size"), "expert_count": None, "expert_used_count": None,
            "rope.freq_base": None, "ssm.conv_kernel": "conv_kernel", "ssm.group_count": "n_groups",
            "ssm.inner_size": product("mamba_num_heads", "mamba_head_dim"), "ssm.state_size": "ssm_state_size",
            "ssm.time_step_rank": "mamba_num_heads",
        },
        checks=(without_experts, steps_unbounded, must_be("mlp_hidden_act", "relu2")),
    ),
)  # fmt: skip

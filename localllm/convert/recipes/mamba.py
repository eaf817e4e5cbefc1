"""The recipes of architectures with Mamba layers: Mamba only, Mamba parallel to attention, or a mix of Mamba and
attention layers."""

from __future__ import annotations

import math

import numpy as np

from localllm.base.printable import printable
from localllm.convert import tensor as t
from localllm.convert.changes import PERMUTED, decay, halves, height, in_turn, numbered, shaped, times
from localllm.convert.errors import ConvertError
from localllm.convert.hf_config import HfConfig, Reader, class_of
from localllm.convert.recipe import Change, Check, Key, Keys, Layer, Recipe, Tensors, integer, real
from localllm.convert.recipes.gated_delta import attending, kv_heads
from localllm.convert.recipes.granite import GRANITE_SHARED
from localllm.convert.recipes.shared import NOT_ROTATED, queries_and_keys
from localllm.convert.tensor import LazyTensor


def mamba2(group: Reader[int]) -> dict[str, Change]:
    """Return the changes of Mamba-2. The norm applies to groups of equal width."""
    column = shaped(lambda config: 1)
    return {"ssm_a": in_turn(decay, column), "ssm_d": column, "ssm_norm": shaped(group)}


def _own_number(name: str, default: int) -> Reader[int]:
    """Return a size from `ssm_cfg`, which uses the key names of Mamba's reference implementation."""

    def number(config: HfConfig) -> int:
        table = config.inner("ssm_cfg")
        return default if table.get(name) in (None, "auto") else table.needed(name)

    return number


def product(one: str, other: str, share: str = "") -> Reader[int]:
    """Return a reader of the product of two values, divided by a third if `share` names one."""
    return lambda config: config.needed(one) * config.needed(other) // (config.needed(share) if share else 1)


def steps_unbounded(config: HfConfig) -> str | None:
    limits = config.get("time_step_limit")
    if not isinstance(limits, list) or limits[:1] == [0.0]:
        return None
    return f"time_step_limit is {printable(str(limits))}; the GGUF architecture has no limits"


def rank(name: str) -> Reader[int]:
    """Return the rank of the step sizes: from config.json, else a sixteenth of the model width."""
    return lambda config: -(-config.width // 16) if config.get(name) in (None, "auto") else config.needed(name)


def inner(config: HfConfig) -> int:
    """Return Mamba's inner width: `intermediate_size`, else `expand` times the width.

    The two differ in Falcon Mamba 7B, whose `expand` of 16 is unused.
    """
    return config.integer("intermediate_size") or product("expand", "hidden_size")(config)


_NO_ATTENTION: Keys = {
    "attention.head_count": 0,
    "attention.head_count_kv": 0,
    "feed_forward_length": 0,
    "attention.key_length": None,
    "attention.value_length": None,
    **NOT_ROTATED,
}
_NO_ATTENTION_DEFAULTS = {"num_attention_heads": 1, "max_position_embeddings": 1 << 20}
_MAMBA_KEYS: Keys = {
    **_NO_ATTENTION,
    "ssm.conv_kernel": "conv_kernel",
    "ssm.inner_size": inner,
    "ssm.state_size": "state_size",
    "ssm.time_step_rank": rank("time_step_rank"),
    "ssm.dt_b_c_rms": lambda config: class_of(config) == "FalconMambaForCausalLM",
}
_GRANITE_FFN: Layer = {**halves("shared_mlp.input_linear"), "ffn_down": "shared_mlp.output_linear"}
_GRANITE = {**PERMUTED, **mamba2(product("mamba_expand", "hidden_size", "mamba_n_groups"))}
_GRANITE_ROPE: Keys = {
    "rope.scaling.finetuned": lambda config: config.get("position_embedding_type") == "rope",
}
MAMBA2_KEYS: Keys = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.inner_size": product("mamba_expand", "hidden_size"),
    "ssm.state_size": "mamba_d_state",
    "ssm.time_step_rank": "mamba_n_heads",
    "ssm.group_count": "mamba_n_groups",
}
_GRANITE_KEYS: Keys = {"attention.head_count_kv": kv_heads(attending), **MAMBA2_KEYS, **_GRANITE_ROPE}
_GRANITE_CLASS = ("GraniteMoeHybridForCausalLM",)


def _granite_dense(config: HfConfig) -> bool:
    return not config.integer("num_local_experts")


def _granite_attends(config: HfConfig) -> bool:
    return bool(attending(config).all())


def _every(period: str, offset: str) -> Reader[np.ndarray]:
    """Return a reader of the layers that these keys select: one in every `period`, starting at `offset`."""

    def layers(config: HfConfig) -> np.ndarray:
        every, first = config.needed(period), config.integer(offset) or 0
        return np.array([layer % every == first for layer in range(config.layers)])

    return layers


_NEMOTRON_KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_SAME_KIND = {"linear_attention": "mamba", "full_attention": "attention"}


def _blocks(config: HfConfig) -> list[str]:
    """Return the kind of each layer of Nemotron H."""
    found = config.get("layers_block_type", "hybrid_override_pattern")
    if not isinstance(found, list | str) or not found:
        raise config.error("layers_block_type", found, "the kinds of the layers")
    return [_NEMOTRON_KINDS.get(kind) or _SAME_KIND.get(kind, kind) for kind in map(str, found)]


def _where(kind: str, name: str) -> Key:
    """Return a reader of a size by layer: the value from config.json in layers of this kind, 0 in other layers."""
    return lambda config: np.array([config.needed(name) if one == kind else 0 for one in _blocks(config)], np.int32)


def _kinds(*known: str) -> Check:
    """Require that all layers have one of the given kinds."""

    def check(config: HfConfig) -> str | None:
        odd = set(_blocks(config)) - set(known)
        return f"layers_block_type has {printable(min(odd))}, which is not supported" if odd else None

    return check


def _with_experts(config: HfConfig) -> bool:
    return "moe" in _blocks(config)


_NEMOTRON_H = {"ssm_out": "mixer.out_proj"}
_NEMOTRON_H_CHANGES = mamba2(product("mamba_num_heads", "mamba_head_dim", "n_groups"))
_NEMOTRON_H_DEFAULTS = {"num_hidden_layers": lambda config: len(_blocks(config)), "layer_norm_epsilon": 1e-5}
_NEMOTRON_H_KEYS: Keys = {
    "attention.head_count_kv": _where("attention", "num_key_value_heads"),
    "rope.freq_base": None,
    "ssm.conv_kernel": "conv_kernel",
    "ssm.group_count": "n_groups",
    "ssm.state_size": "ssm_state_size",
    "ssm.inner_size": product("mamba_num_heads", "mamba_head_dim"),
    "ssm.time_step_rank": "mamba_num_heads",
    "attention.layer_norm_epsilon": real("layer_norm_epsilon"),  # llama.cpp also needs this key
}


def scaled(*names: str) -> Change:
    """Return a change that multiplies a tensor by these values of config.json. `name.i` is element i of a list."""
    return times(lambda config: math.prod([_factor(config, name) for name in names]))


def _factor(config: HfConfig, name: str) -> float:
    base, _, index = name.partition(".")
    if not index:
        value = config.real(base)
        return 1.0 if value is None else value
    values = config.get(base)
    if values is None:
        return 1.0
    if not isinstance(values, list) or len(values) <= int(index) or type(values[int(index)]) not in (int, float):
        raise config.error(base, values, f"a list of more than {index} numbers")
    return float(values[int(index)])


def _sections_scaled(parts: Tensors, config: HfConfig) -> LazyTensor:
    """Scale the rows of the gate, inner values, B, C and steps, each section by its factor."""
    inner, shared = config.needed("mamba_d_ssm"), config.needed("mamba_n_groups") * config.needed("mamba_d_state")
    heights = (inner, inner, shared, shared, config.needed("mamba_n_heads"))
    numbered(parts[0], height(parts[0]), 1, sum(heights))
    factors = [_factor(config, "ssm_in_multiplier") * _factor(config, f"ssm_multipliers.{i}") for i in range(5)]
    return t.scaled(parts[0], np.repeat(factors, heights).astype(np.float32))


def _norm_after_gate(config: HfConfig) -> str | None:
    if not config.flag("mamba_rms_norm") or config.flag("mamba_norm_before_gate") is False:
        return None
    return "mamba_norm_before_gate is true; the GGUF architecture requires false"


def _own_output(config: HfConfig) -> str | None:
    same = _factor(config, "embedding_multiplier") == _factor(config, "lm_head_multiplier")
    if same or not config.flag("tie_word_embeddings"):
        return None
    return "embedding_multiplier and lm_head_multiplier differ, but the matrix is one"


def _no_bias(parts: Tensors, config: HfConfig) -> LazyTensor:
    """Refuse a bias, to which the multipliers would not apply as in transformers."""
    raise ConvertError(f"tensor '{printable(parts[0].name)}' cannot be stored in GGUF files of falcon-h1")


_FALCON_H1 = {
    **{f"attn_{x}.bias": _no_bias for x in ("q", "k", "v", "output")},
    **{f"ffn_{x}.bias": _no_bias for x in ("gate", "up", "down")},
    "attn_q": scaled("attention_in_multiplier"),
    "attn_k": scaled("attention_in_multiplier", "key_multiplier"),
    "attn_v": scaled("attention_in_multiplier"),
    "attn_output": scaled("attention_out_multiplier"),
    **mamba2(product("mamba_n_heads", "mamba_d_head", "mamba_n_groups")),
    "ssm_in": _sections_scaled,
    "ssm_out": scaled("ssm_out_multiplier"),
    "ffn_gate": scaled("mlp_multipliers.0"),
    "ffn_down": scaled("mlp_multipliers.1"),
    "token_embd": scaled("embedding_multiplier"),
    "output": scaled("lm_head_multiplier"),
}


def _neighbours(count: int) -> np.ndarray:
    """Return the order that places i and i + count/2 next to each other."""
    return np.arange(count).reshape(2, -1).T.reshape(-1)


def _bamba_attends(config: HfConfig) -> np.ndarray:
    """Return which layers have attention."""
    layers, found = config.layers, config.get("attn_layer_indices") or []
    if not isinstance(found, list) or not all(type(n) is int and 0 <= n < layers for n in found):
        raise config.error("attn_layer_indices", found, f"layers below {layers}")
    return np.isin(np.arange(layers), found)


_BAMBA = {**queries_and_keys(_neighbours), **mamba2(product("mamba_expand", "hidden_size", "mamba_n_groups"))}


ROWS = (
    Recipe(
        "granite", _GRANITE_CLASS, _GRANITE_FFN, changes=PERMUTED, rope_tensors=True,
        keys={**_GRANITE_ROPE, "feed_forward_length": "shared_intermediate_size"},
        when=lambda config: _granite_attends(config) and _granite_dense(config),
    ),
    Recipe(
        "granitemoe", _GRANITE_CLASS, GRANITE_SHARED, changes=PERMUTED, rope_tensors=True, when=_granite_attends,
        fixed={"position_embedding_type": "rope"},
    ),
    Recipe(
        "granitehybrid", _GRANITE_CLASS, _GRANITE_FFN, changes=_GRANITE,
        keys={**_GRANITE_KEYS, "feed_forward_length": "shared_intermediate_size"}, when=_granite_dense,
        rope_tensors=True, checks=(steps_unbounded,),
    ),
    Recipe(
        "granitehybrid", _GRANITE_CLASS, GRANITE_SHARED, changes=_GRANITE, rope_tensors=True, keys=_GRANITE_KEYS,
        checks=(steps_unbounded,),
    ),
    Recipe(
        "mamba", ("MambaForCausalLM", "FalconMambaForCausalLM"),
        defaults={**_NO_ATTENTION_DEFAULTS, "layer_norm_epsilon": 1e-5, "expand": 2}, keys=_MAMBA_KEYS,
    ),
    Recipe(
        "mamba", ("MambaLMHeadModel",),
        keys={
            **_NO_ATTENTION, "ssm.conv_kernel": _own_number("d_conv", 4), "ssm.state_size": _own_number("d_state", 16),
            "ssm.inner_size": lambda config: _own_number("expand", 2)(config) * config.width,
            "ssm.time_step_rank": lambda config: _own_number("dt_rank", -(-config.width // 16))(config),
            "ssm.dt_b_c_rms": False,
        },
        defaults={**_NO_ATTENTION_DEFAULTS, "layer_norm_epsilon": 1e-5, "rms_norm": False},
        fixed={"rms_norm": True, "ssm_cfg.layer": "Mamba1"},
    ),
    Recipe(
        "mamba2", ("Mamba2ForCausalLM",), changes=mamba2(product("expand", "hidden_size", "n_groups")),
        checks=(steps_unbounded,),
        defaults={**_NO_ATTENTION_DEFAULTS, "layer_norm_epsilon": 1e-5, "expand": 2, "n_groups": 1},
        keys={
            **_NO_ATTENTION, "ssm.conv_kernel": "conv_kernel", "ssm.inner_size": product("expand", "hidden_size"),
            "ssm.state_size": "state_size", "ssm.time_step_rank": "num_heads", "ssm.group_count": "n_groups",
        },
    ),
    Recipe(
        "jamba", ("JambaForCausalLM",),
        keys={
            "attention.head_count_kv": kv_heads(_every("attn_layer_period", "attn_layer_offset")), **NOT_ROTATED,
            **MAMBA2_KEYS, "ssm.time_step_rank": rank("mamba_dt_rank"), "ssm.group_count": None,
        },
    ),
    Recipe(
        "nemotron_h_moe", ("NemotronHForCausalLM",), _NEMOTRON_H, changes=_NEMOTRON_H_CHANGES,
        defaults=_NEMOTRON_H_DEFAULTS, when=_with_experts,
        keys={
            **_NEMOTRON_H_KEYS, "feed_forward_length": _where("moe", "moe_intermediate_size"),
            "expert_count": "n_routed_experts",
            "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
            "moe_latent_size": integer("moe_latent_size"),
        },
        fixed={"mlp_hidden_act": "relu2"}, checks=(_kinds("mamba", "attention", "moe"), steps_unbounded),
    ),
    Recipe(
        "nemotron_h", ("NemotronHForCausalLM",), _NEMOTRON_H, changes=_NEMOTRON_H_CHANGES,
        defaults=_NEMOTRON_H_DEFAULTS,
        keys={
            **_NEMOTRON_H_KEYS, "feed_forward_length": _where("mlp", "intermediate_size"), "expert_count": None,
            "expert_used_count": None,
        },
        fixed={"mlp_hidden_act": "relu2"}, checks=(_kinds("mamba", "attention", "mlp"), steps_unbounded),
    ),
    Recipe(
        "falcon-h1", ("FalconH1ForCausalLM",), {"ffn_norm.": "pre_ff_layernorm.weight"}, changes=_FALCON_H1,
        keys={**MAMBA2_KEYS, "ssm.inner_size": "mamba_d_ssm"}, checks=(steps_unbounded, _norm_after_gate, _own_output),
    ),
    Recipe(
        "granitehybrid", ("BambaForCausalLM",), changes=_BAMBA,
        keys={"attention.head_count_kv": kv_heads(_bamba_attends), "rope.scaling.finetuned": True, **MAMBA2_KEYS},
        checks=(steps_unbounded,), defaults={"partial_rotary_factor": 0.5, "mamba_d_conv": 4, "mamba_n_groups": 1},
    ),
)  # fmt: skip

"""The architectures that can be converted, one row each: classes in transformers, the source of each GGUF tensor, and
the assumptions of the GGUF architecture, which config.json must meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from localllm.convert import tensor as t
from localllm.convert.errors import ConvertError
from localllm.convert.hf_config import HfConfig
from localllm.convert.tensor import LazyTensor
from localllm.printable import printable


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that tensor conversions depend on."""

    layers: int
    heads: int
    kv_heads: int


Change = Callable[[list[LazyTensor], Sizes], LazyTensor]
Check = Callable[[HfConfig], str | None]  # returns why results would differ from transformers, or None


def _only(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
    return parts[0]


@dataclass(frozen=True, slots=True)
class From:
    """Names below `model.layers.N.`, and the change that combines them to one tensor; `{}` in a name counts from 0.

    The key in the table is a name below `blk.N.`. A key without a suffix means both `.weight` and `.bias`.
    """

    names: tuple[str, ...]
    change: Change = _only


def _from(name: str, change: Change = _only) -> tuple[From, ...]:
    return (From((name,), change),)


def _permuted(heads: Callable[[Sizes], int]) -> Change:
    """Reorder the rows of a head from halves (i, i + n/2), as transformers rotates them, to neighbours (2i, 2i + 1)."""

    def change(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
        rows = parts[0].shape[0]
        if rows % (2 * heads(sizes)):
            name = printable(parts[0].name)
            raise ConvertError(
                f"tensor '{name}' has {rows} rows, which {heads(sizes)} heads cannot share; config.json does not "
                "belong to these weights"
            )
        order = np.arange(rows).reshape(heads(sizes), 2, -1).swapaxes(1, 2).reshape(-1)
        return t.picked(parts[0], order, rows)

    return change


def _stacked(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
    return t.stacked(parts)


def _flat(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
    return t.flattened(parts[0])


def _half(which: int) -> Change:
    """Return the first or second half of the rows of every matrix."""

    def change(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
        rows = parts[0].shape[-2] // 2
        return t.strided(parts[0], which * rows, (which + 1) * rows)

    return change


def _packed(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
    return t.mxfp4(*parts)


def _turned(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
    return t.transposed(parts[0])


def _every_second(first: int, change: Change) -> Change:
    """Return rows first, first + 2, ... of the result of `change`."""

    def then(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
        whole = change(parts, sizes)
        return t.strided(whole, first, whole.shape[-2], 2)

    return then


def _every_second_value(first: int) -> Change:
    return lambda parts, sizes: t.columns(parts[0], first, 2)


def _is(name: str, *allowed: Any) -> Check:
    """Require that a key of config.json, if present, has one of these values."""

    def check(config: HfConfig) -> str | None:
        value = config.get(name)
        if value is None or value in allowed:
            return None
        return f"{name} is {value}; the GGUF architecture has it fixed at {allowed[0]}"

    return check


def _every_fourth_without_rope(config: HfConfig) -> str | None:
    layers = config.needed("num_hidden_layers")
    rotated = config.get("no_rope_layers") or [int((i + 1) % (config.get("no_rope_layer_interval") or 4) != 0)
                                               for i in range(layers)]  # fmt: skip
    if rotated == [int((i + 1) % 4 != 0) for i in range(layers)]:
        return None
    return "no_rope_layers is not every fourth layer; the GGUF architecture has it fixed so"


def _score_scale(wide_layers: int) -> Check:
    """Require scores divided by the root of the head width or, with `wide_layers` layers, of width over heads."""

    def check(config: HfConfig) -> str | None:
        width, heads = config.needed("hidden_size"), config.needed("num_attention_heads")
        wide = config.needed("num_hidden_layers") == wide_layers
        fixed = width // heads if wide else config.integer("head_dim") or width // heads
        value = config.real("query_pre_attn_scalar")
        if value is None or value == fixed:
            return None
        return f"query_pre_attn_scalar is {value:g}; the GGUF architecture has it fixed at {fixed}"

    return check


@dataclass(frozen=True, slots=True)
class Recipe:
    """A row of the table. `defaults` are the values that transformers assumes for missing keys."""

    name: str  # general.architecture
    classes: tuple[str, ...]  # `architectures` in config.json
    layer: Mapping[str, tuple[From, ...]]  # the first whose names exist is used
    norm_offset: float = 0.0  # added to the weights of norms
    rope_tensors: bool = False  # whether the file can store frequency factors
    eps: str = "rms_norm_eps"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, int | str] = field(default_factory=dict)  # other keys: a number, or its name in config.json
    checks: tuple[Check, ...] = ()


Layer = dict[str, tuple[From, ...]]

_NORMS: Layer = {"attn_norm": _from("input_layernorm"), "ffn_norm": _from("post_attention_layernorm")}
_QKV: Layer = {f"attn_{x}": _from(f"self_attn.{x}_proj") for x in "qkv"}
_QKV_PERMUTED: Layer = {
    "attn_q": _from("self_attn.q_proj", _permuted(lambda sizes: sizes.heads)),
    "attn_k": _from("self_attn.k_proj", _permuted(lambda sizes: sizes.kv_heads)),
    "attn_v": _from("self_attn.v_proj"),
}
_OUT: Layer = {"attn_output": _from("self_attn.o_proj")}
_HEAD_NORMS: Layer = {"attn_q_norm": _from("self_attn.q_norm"), "attn_k_norm": _from("self_attn.k_norm")}
_GATED: Layer = {f"ffn_{x}": _from(f"mlp.{x}_proj") for x in ("gate", "up", "down")}
_FUSED: Layer = {"ffn_up": _from("mlp.gate_up_proj"), "ffn_down": _from("mlp.down_proj")}
_FOUR_NORMS: Layer = {
    "attn_norm": _from("input_layernorm"),
    "post_attention_norm": _from("post_attention_layernorm"),
    "ffn_norm": _from("pre_feedforward_layernorm"),
    "post_ffw_norm": _from("post_feedforward_layernorm"),
}
_LLAMA: Layer = {**_NORMS, **_QKV_PERMUTED, **_OUT, **_GATED}
_QWEN: Layer = {**_NORMS, **_QKV, **_OUT, **_GATED}
_GEMMA3: Layer = {**_FOUR_NORMS, **_QKV, **_OUT, **_GATED, **_HEAD_NORMS}


def _experts(gate: str, up: str, down: str) -> Layer:
    """Sources of experts: one matrix per expert or, as newer transformers may save them, one for gate and up of all."""
    fused = gate.split("{}")[0] + "gate_up_proj"
    return {
        "ffn_gate_exps.weight": (From((gate + ".weight",), _stacked), From((fused,), _half(0))),
        "ffn_up_exps.weight": (From((up + ".weight",), _stacked), From((fused,), _half(1))),
        "ffn_down_exps.weight": (From((down + ".weight",), _stacked), From((down.split("{}")[0] + "down_proj",))),
    }


_NUMBERED = _experts("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj")
_MIXTRAL = {
    "ffn_gate_inp": _from("block_sparse_moe.gate"),
    **_experts(*(f"block_sparse_moe.experts.{{}}.{w}" for w in ("w1", "w3", "w2"))),
}
_GPT_OSS: Layer = {
    "attn_norm": _from("input_layernorm"),
    "post_attention_norm": _from("post_attention_layernorm"),
    **_QKV,
    **_OUT,
    "attn_sinks.weight": _from("self_attn.sinks"),
    "ffn_gate_inp": _from("mlp.router"),
    **{
        f"ffn_{part}_exps.weight": (
            From(("mlp.experts.gate_up_proj_blocks", "mlp.experts.gate_up_proj_scales"), _every_second(first, _packed)),
            From(("mlp.experts.gate_up_proj",), _every_second(first, _turned)),
        )
        for first, part in enumerate(("gate", "up"))
    },
    "ffn_down_exps.weight": (
        From(("mlp.experts.down_proj_blocks", "mlp.experts.down_proj_scales"), _packed),
        From(("mlp.experts.down_proj",), _turned),
    ),
    "ffn_gate_exps.bias": _from("mlp.experts.gate_up_proj_bias", _every_second_value(0)),
    "ffn_up_exps.bias": _from("mlp.experts.gate_up_proj_bias", _every_second_value(1)),
    "ffn_down_exps.bias": _from("mlp.experts.down_proj_bias"),
}
_GRANITE_MOE: Layer = {
    **_NORMS,
    **_QKV_PERMUTED,
    **_OUT,
    "ffn_gate_inp": _from("block_sparse_moe.router.layer"),
    "ffn_gate_exps": _from("block_sparse_moe.input_linear", _half(0)),
    "ffn_up_exps": _from("block_sparse_moe.input_linear", _half(1)),
    "ffn_down_exps": _from("block_sparse_moe.output_linear"),
    "ffn_gate_shexp": _from("shared_mlp.input_linear", _half(0)),
    "ffn_up_shexp": _from("shared_mlp.input_linear", _half(1)),
    "ffn_down_shexp": _from("shared_mlp.output_linear"),
}
_OLMO2: Layer = {
    "post_attention_norm": _from("post_attention_layernorm"),
    "post_ffw_norm": _from("post_feedforward_layernorm"),
    **_QKV,
    **_OUT,
    **_HEAD_NORMS,
    **_GATED,
}
_GLM4: Layer = {
    "attn_norm": _from("input_layernorm"),
    "post_attention_norm": _from("post_self_attn_layernorm"),
    "ffn_norm": _from("post_attention_layernorm"),
    "post_ffw_norm": _from("post_mlp_layernorm"),
    **_QKV,
    **_OUT,
    **_FUSED,
}
_GLM4_MOE: Layer = {
    "attn_norm": _from("input_layernorm"),
    "post_attention_norm": _from("post_attention_layernorm"),
    **_QKV,
    **_OUT,
    **_HEAD_NORMS,
    **_GATED,
    "ffn_gate_inp": _from("mlp.gate"),
    "exp_probs_b.bias": _from("mlp.gate.e_score_correction_bias"),
    **_NUMBERED,
    **{f"ffn_{x}_shexp": _from(f"mlp.shared_experts.{x}_proj") for x in ("gate", "up", "down")},
}
_QWEN2_MOE: Layer = {
    **_NORMS,
    **_QKV,
    **_OUT,
    "ffn_gate_inp": _from("mlp.gate"),
    **_NUMBERED,
    **{f"ffn_{x}_shexp": _from(f"mlp.shared_expert.{x}_proj") for x in ("gate", "up", "down")},
    "ffn_gate_inp_shexp": _from("mlp.shared_expert_gate", _flat),
}
_STABLELM: Layer = {
    **_QWEN,
    "attn_q_norm": _from("self_attn.q_layernorm.norms.{}", _stacked),
    "attn_k_norm": _from("self_attn.k_layernorm.norms.{}", _stacked),
}
_STARCODER2: Layer = {
    **_NORMS,
    **_QKV,
    **_OUT,
    "ffn_up": _from("mlp.c_fc"),
    "ffn_down": _from("mlp.c_proj"),
}
_ALL_SPARSE = (_is("decoder_sparse_step", 1), _is("mlp_only_layers", []))
_GEMMA3_DEFAULTS = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window": 4096,
    "query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip

_ROWS = (
    Recipe(
        "llama", ("LlamaForCausalLM", "LLaMAForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"),
        {**_LLAMA, **_MIXTRAL}, rope_tensors=True,
    ),
    Recipe("mistral3", ("Mistral3ForConditionalGeneration", "Ministral3ForCausalLM"), _LLAMA, rope_tensors=True),
    Recipe("gemma", ("GemmaForCausalLM",), _QWEN, norm_offset=1.0),
    Recipe(
        "gemma2", ("Gemma2ForCausalLM",), {**_FOUR_NORMS, **_QKV, **_OUT, **_GATED}, norm_offset=1.0,
        checks=(_score_scale(46),),
    ),
    Recipe(
        "gemma3", ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), _GEMMA3, norm_offset=1.0,
        defaults=_GEMMA3_DEFAULTS, checks=(_score_scale(62), _is("use_bidirectional_attention", False)),
    ),
    Recipe("glm4", ("Glm4ForCausalLM",), _GLM4, defaults={"partial_rotary_factor": 0.5}),
    Recipe(
        "glm4moe", ("Glm4MoeForCausalLM",), _GLM4_MOE, defaults={"partial_rotary_factor": 0.5},
        keys={"expert_gating_func": 2},  # sigmoid
    ),
    Recipe(
        "gpt-oss", ("GptOssForCausalLM",), _GPT_OSS, keys={"expert_feed_forward_length": "intermediate_size"},
        checks=(_is("swiglu_limit", 7.0), _is("swiglu_alpha", 1.702)),
    ),
    Recipe("granite", ("GraniteForCausalLM",), _LLAMA, rope_tensors=True),
    Recipe(
        "granitemoe", ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"), _GRANITE_MOE, rope_tensors=True
    ),
    Recipe("olmo2", ("Olmo2ForCausalLM", "Olmo3ForCausalLM"), _OLMO2),
    Recipe(
        "phi3", ("Phi3ForCausalLM",), {**_NORMS, "attn_qkv": _from("self_attn.qkv_proj"), **_OUT, **_FUSED},
        rope_tensors=True,
    ),
    Recipe("qwen2", ("Qwen2ForCausalLM",), _QWEN),
    Recipe("qwen2moe", ("Qwen2MoeForCausalLM",), _QWEN2_MOE, checks=(_is("norm_topk_prob", False), *_ALL_SPARSE)),
    Recipe("qwen3", ("Qwen3ForCausalLM",), {**_QWEN, **_HEAD_NORMS}),
    Recipe(
        "qwen3moe", ("Qwen3MoeForCausalLM",), {**_NORMS, **_QKV, **_OUT, **_HEAD_NORMS, **_QWEN2_MOE},
        checks=(_is("norm_topk_prob", True), *_ALL_SPARSE),
    ),
    Recipe("smollm3", ("SmolLM3ForCausalLM",), _LLAMA, checks=(_every_fourth_without_rope,)),
    Recipe(
        "stablelm", ("StableLmForCausalLM", "StableLMEpochForCausalLM"), _STABLELM, eps="layer_norm_eps",
        defaults={"partial_rotary_factor": 0.25}, checks=(_is("use_parallel_residual", False),),
    ),
    Recipe("starcoder2", ("Starcoder2ForCausalLM",), _STARCODER2, eps="norm_epsilon"),
)  # fmt: skip

RECIPES: dict[str, Recipe] = {row.name: row for row in _ROWS}
BY_CLASS: dict[str, Recipe] = {name: row for row in _ROWS for name in row.classes}

"""The recipes of models without a family: HRM-Text, Muse Glimmer, Spark X2.5, Talkie.

Models that transformers does not support keep the tensor names of their reference implementation.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from localllm.convert import tensor as t
from localllm.convert.changes import PERMUTED, column, heads, height, numbered, share
from localllm.convert.hf_config import HfConfig, Reader
from localllm.convert.recipe import Change, Layer, Raw, Recipe, Tensors, flag, layers_at, number, real, taken
from localllm.convert.recipes.shared import head_width, rotated_when
from localllm.convert.tensor import LazyTensor
from localllm.models.reading.bounds import MAX_LAYERS

_HRM: Layer = {
    **{
        f"attn_{x}": (f"self_attn.{x}_proj", taken("attn.gqkv_proj", share(which, 4)))
        for which, x in enumerate(("gate", "q", "k", "v"))
    },
    "attn_output": ("self_attn.o_proj", "attn.o_proj"),
    **{
        f"ffn_{x}": (f"mlp.{x}_proj", taken("mlp.gate_up_proj", share(which))) for which, x in enumerate(("gate", "up"))
    },
}


def _hrm_stack(config: HfConfig) -> int:
    """Return the number of layers per stack. `num_hidden_layers` of transformers counts the layers of all passes."""
    layers = config.needed("num_layers_per_stack", "num_hidden_layers")
    if layers > MAX_LAYERS:
        raise config.error("num_layers_per_stack", layers, f"at most {MAX_LAYERS}")
    return layers


def _hrm_passes(config: HfConfig) -> int:
    """Return the total number of passes through both stacks."""
    return config.needed("H_cycles") * (config.needed("L_cycles") + 1)


def _hrm_scale(config: HfConfig) -> float:
    return config.real("embedding_scale") or 1.0 / (config.real("initializer_range") or 0.02)


def _hrm_words(config: HfConfig) -> dict[str, Any]:
    stack = _hrm_stack(config)
    return {"num_layers_per_stack": stack, "num_hidden_layers": 2 * stack}


def _hrm_layers(raw: Raw, config: HfConfig) -> Raw:
    """Number the layers of both stacks, the low stack first."""
    stack = _hrm_stack(config)
    numbers = [(which, layer) for which in "LH" for layer in range(stack)]
    new = {f"model.{which}_module.layers.{layer}": f"model.layers.{i}" for i, (which, layer) in enumerate(numbers)}
    cut = {name: ".".join(name.split(".")[:4]) for name in raw}
    return {new.get(cut[name], cut[name]) + name[len(cut[name]) :]: parts for name, parts in raw.items()}


def _constant(value: Reader[float]) -> Change:
    """Return a change that gives a head norm constant weights: the reference implementation multiplies all values by
    one factor."""

    def change(parts: Tensors, config: HfConfig) -> LazyTensor:
        width = config.needed("head_dim")
        return t.array_tensor(parts[0].name, np.full(width, value(config), np.float32))

    return change


def _muse_kinds(config: HfConfig) -> list[str]:
    layers = config.layers
    return ["sliding_attention" if (layers - 1 - i) % 4 else "full_attention" for i in range(layers)]


def _rotated_in_windows(config: HfConfig) -> str | None:
    """Require rope with a single base in sliding-window layers, and no rope in other layers."""
    bases, kinds = config.get("layer_rope_theta"), config.get("layer_types")
    if bases is None and kinds == _muse_kinds(config):
        return None
    slides = [kind == "sliding_attention" for kind in kinds] if isinstance(kinds, list) else []
    if isinstance(bases, list) and [base != 0 for base in bases] == slides and len({*bases} - {0}) == 1:
        return None
    return (
        "layer_rope_theta is not 0 in layers with full attention and one number in the others; the GGUF architecture "
        "requires it"
    )


_MUSE: Layer = {
    **{f"attn_{x}": taken(f"self_attn.{x}_proj", PERMUTED[f"attn_{x}"]) for x in "qk"},
    "attn_gate": "self_attn.gate_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q_norm.weight": taken(
        "self_attn.q_proj.weight", _constant(lambda config: config.real("qk_scale_factor") or 1.0)
    ),
    "attn_k_norm.weight": taken("self_attn.k_proj.weight", _constant(lambda config: 1.0)),
}


_SPARK: Layer = {"attn_qkv": "self_attn.q_k_v_proj", "attn_gate": "self_attn.g_proj"}
# Epsilon of the norms: PyTorch's default, since the reference implementation sets none.
_FLOAT32_EPS = 2.0**-23


def _turned_back(parts: Tensors, config: HfConfig) -> LazyTensor:
    """Negate the second half of each head's rows: the reference implementation rotates in the opposite direction."""
    rows, width = height(parts[0]), head_width(config)
    numbered(parts[0], rows, config.heads, width)
    return t.scaled(parts[0], np.where(np.arange(rows) % width < width // 2, 1.0, -1.0).astype(np.float32))


_TALKIE: Layer = {
    **{
        f"attn_{x}.weight": taken(f"attn.attn_{name}.weight", _turned_back)
        for x, name in (("q", "query"), ("k", "key"))
    },
    "attn_v": "attn.attn_value",
    "attn_q_norm.weight": taken("attn.head_gain.head_g", column),  # one factor per head
    "attn_output": "attn.attn_resid",
    "attn_output.scale": "attn_gain.a_g",
    **{f"ffn_{x}": f"mlp.mlp_{name}" for x, name in (("gate", "gate"), ("up", "linear"), ("down", "resid"))},
    "ffn_down.scale": "mlp_gain.a_g",
    "layer_output_scale.weight": "embed_skip.a_g",
}


ROWS = (
    Recipe(
        "hrm_text", ("HrmTextForCausalLM",), _HRM, raw=_hrm_layers, words=_hrm_words,
        top={"hrm.z_l_init": "model.z_L_init"},
        keys={
            "block_count": lambda config: _hrm_stack(config) * _hrm_passes(config),
            "attention.head_count_kv": "num_attention_heads", "hrm.layers_per_stack": _hrm_stack,
            "hrm.h_cycles": "H_cycles", "hrm.l_cycles": "L_cycles", "hrm.prefix_lm": flag("prefix_lm"),
            "embedding_scale": _hrm_scale,
        },
        fixed={"attention_bias": False, "mlp_bias": False},
        defaults={"H_cycles": 2, "L_cycles": 3, "head_dim": 128, "prefix_lm": True},
    ),
    Recipe(
        "muse-glimmer", ("MuseGlimmerForConditionalGeneration",), _MUSE, norm_offset=1.0,
        plain_norms=("output_norm", "attn_q_norm", "attn_k_norm"), keys={"logit_scale": real("output_multiplier")},
        fixed={"post_norm_eps": 1e-8, "attention_bias": False}, checks=(_rotated_in_windows,),
        defaults={
            "head_dim": 128, "final_logit_softcapping": 20.0, "qk_scale_factor": 3.87,
            "output_multiplier": 0.19611613513818404, "sliding_window": 2048, "layer_types": _muse_kinds,
        },
    ),
    Recipe(
        "spark2_5", ("Spark2_5ForCausalLM",), _SPARK,
        keys={
            "rope.dimension_count": rotated_when("full_attention"),
            "rope.dimension_count_swa": rotated_when("sliding_attention"),
        },
        fixed={"gate_attn_act_mode": "sigmoid", "headwise_attn_output_gate": True},
        defaults={"gate_attn_act_mode": "", "headwise_attn_output_gate": False},
    ),
    Recipe(
        "talkie", ("TalkieForCausalLM",), _TALKIE, raw=layers_at("model.blocks."), top={"token_embd": "model.embed"},
        keys={"attention.layer_norm_rms_epsilon": _FLOAT32_EPS},
        values=lambda take,
        sizes: {"talkie.logit_scale": number(take, "lm_head_gain.w_g")},
        fixed={"rope_scaling": None, "num_key_value_heads": heads},
        defaults={"rms_norm_eps": _FLOAT32_EPS, "rope_theta": 1e6},
    ),
)  # fmt: skip

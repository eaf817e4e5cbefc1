"""The recipes of RWKV-6 and 7, in RWKV's own layers or in place of attention in Qwen2's layers. transformers supports
none of them, so the tensor names come from the reference implementations and from flash-linear-attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from localllm.convert import tensor as t
from localllm.convert.changes import flat, in_turn, layer_of, turned
from localllm.convert.hf_config import HfConfig, Reader
from localllm.convert.recipe import Change, From, Key, Keys, Layer, Recipe, Sources, Tensors, layers_at, taken
from localllm.convert.recipes.shared import NOT_ROTATED
from localllm.convert.tensor import LazyTensor
from localllm.convert.world_tokens import TEMPLATE

# llama.cpp's context length: the size of the state does not depend on the length of the text.
_LONG = 1 << 20


def _fused(parts: Tensors, config: HfConfig) -> LazyTensor:
    """Return several vectors, or one tensor that holds them all, as (count, 1, 1, width)."""
    rows = t.stacked([t.flattened(part) for part in parts])
    count = rows.nbytes // t.ITEM_BYTES[rows.format] // (width := config.width)
    whole = rows if len(parts) > 1 else t.shaped(t.flattened(rows), width)
    return replace(whole, shape=(count, 1, 1, width))


def _halved(parts: Tensors, config: HfConfig) -> LazyTensor:
    """Halve a matrix once per `rescale_every` preceding layers, since the activations are halved after these layers."""
    every = config.integer("rescale_every") or 0
    factor = 0.5 ** (layer_of(parts[0]) // every) if every else 1.0
    return t.scaled(parts[0], np.full(parts[0].rows, factor, np.float32)) if factor != 1.0 else parts[0]


def _in_order(*order: int) -> Change:
    """Return a change that reorders the equal sections of a matrix's rows, or the matrices of a stack."""

    def change(parts: Tensors, config: HfConfig) -> LazyTensor:
        index = np.arange(parts[0].rows).reshape(len(order), -1)[list(order)].reshape(-1)
        return t.picked(parts[0], index, parts[0].shape[-2])

    return change


def _of_first(parts: Tensors, config: HfConfig) -> LazyTensor:
    """Return the second tensor in layer 0, which does not use the first tensor, and the first tensor in other
    layers."""
    return parts[0] if layer_of(parts[0]) else parts[1]


# -- RWKV-6 ------------------------------------------------------------------------------------------------------------


def _time_mix6(module: str, *reordered: Change) -> Layer:
    """Return the sources of a time mix. `reordered` reorders the sections of the low-rank matrices."""
    return {
        "time_mix_lerp_x.weight": taken(f"{module}.time_maa_x", flat),
        "time_mix_lerp_fused.weight": From(tuple(f"{module}.time_maa_{x}" for x in "wkvrg"), _fused),
        **{f"time_mix_{x}.weight": taken(f"{module}.time_maa_{x}", in_turn(turned, *reordered)) for x in ("w1", "w2")},
        "time_mix_decay.weight": taken(f"{module}.time_decay", flat),
        **{f"time_mix_decay_{x}.weight": taken(f"{module}.time_decay_{x}", turned) for x in ("w1", "w2")},
    }


_RWKV6 = {
    "time_mix_output": _halved,
    "channel_mix_lerp_k": flat,
    "channel_mix_lerp_r": flat,
    "channel_mix_value": _halved,
}
_QWEN6: Layer = {
    **_time_mix6("self_attn", _in_order(3, 1, 2, 0, 4)),  # from r, k, v, w, g to w, k, v, r, g
    "time_mix_first.weight": "self_attn.time_faaaa",
    "time_mix_ln": "self_attn.ln_x",
}


def _extra(config: HfConfig, wide: int) -> int:
    """Return the rank of a low-rank matrix of RWKV-6. config.json lacks it; the value is llama.cpp's."""
    return wide if config.width == 4096 else wide // 2


def _rank(name: str, wide: int) -> Reader[int]:
    return lambda config: config.integer(name) or (wide if config.width >= 4096 else wide // 2)


# -- RWKV-7 ------------------------------------------------------------------------------------------------------------


def _time_mix7(module: str, low_rank: Callable[[str, int], tuple[str, Change]], parts: dict[str, str]) -> Layer:
    """Return the sources of a time mix.

    `low_rank` takes the letter and number of a low-rank matrix (`w`, 1 for `time_mix_w1`). It returns the name in the
    checkpoint and the transform to apply.
    """

    def source(letter: str, number: int) -> Sources:
        name, change = low_rank(letter, number)
        if letter != "v":
            return taken(f"{module}.{name}", change)
        other = f"{module}.{low_rank('a', number)[0]}"  # llama.cpp loads layer 0's tensor without using it
        both = From((f"{module}.{name}", other), lambda tensors, config: change([_of_first(tensors, config)], config))
        return both, From((other,), change)

    ranks = [(letter, number) for letter in "wavg" for number in range(3) if (letter, number) != ("g", 0)]
    return {
        "time_mix_lerp_fused.weight": (
            From((f"{module}.x_x",), _fused),
            From(
                tuple(f"{module}.x_{x}" for x in "grwkva"),
                lambda tensors, config: _fused([*tensors[1:], tensors[0]], config),
            ),
            From(tuple(f"{module}.x_{x}" for x in "rwkva"), _fused),  # source in models without a gate
        ),
        **{f"time_mix_{letter}{number}.weight": source(letter, number) for letter, number in ranks},
        **{f"time_mix_{x}.weight": taken(f"{module}.{x}", flat) for x in ("k_k", "k_a", "r_k")},
        **{f"time_mix_{x}": f"{module}.{name}" for x, name in parts.items()},
    }


def _of_flash(letter: str, number: int) -> tuple[str, Change]:
    """Return the name and change of a low-rank matrix in flash-linear-attention: two layers, the second with a bias."""
    names = {0: "lora.2.bias", 1: "lora.0.weight", 2: "lora.2.weight"}
    return f"{letter}_lora.{names[number]}", lambda parts, config: parts[0]


def _of_program(letter: str, number: int) -> tuple[str, Change]:
    """Return the name and change of a low-rank matrix in RWKV's reference implementation, which multiplies from the
    right."""
    return f"{letter}{number}", turned if number else flat


_RWKV7: Layer = {
    "attn_norm_2": "ffn_norm",
    **_time_mix7(
        "attn",
        _of_flash,
        {"receptance": "r_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj", "ln": "g_norm"},
    ),
    "channel_mix_lerp_k.weight": taken("ffn.x_k", flat),
    **{f"channel_mix_{x}": f"ffn.{x}" for x in ("key", "value")},
}
_QWEN7: Layer = {
    **_time_mix7(
        "self_attn.time_mixer",
        _of_program,
        {**{x: x for x in ("receptance", "key", "value", "output")}, "ln": "ln_x"},
    ),
}


def _low_rank(name: str, older: str, exponent: float, factor: float) -> Reader[int]:
    """Return a reader of a matrix's rank: from config.json, else computed from the model width."""

    def rank(config: HfConfig) -> int:
        found = config.integer(name, older)
        return found or max(1, round(config.width**exponent * factor / 32)) * 32

    return rank


def _inner(share: Callable[[int], int]) -> Key:
    return lambda config: config.integer("intermediate_size") or share(config.width)


def _all_recurrent(config: HfConfig) -> str | None:
    if config.get("attn") is None:
        return None
    return "attn names layers with attention, which the GGUF architecture does not have"


def _head_size(config: HfConfig) -> int:
    return config.integer("head_size", "head_dim") or 64


_KEYS: Keys = {
    "attention.head_count": 0,
    "attention.head_count_kv": None,
    "attention.key_length": None,
    "attention.value_length": None,
    **NOT_ROTATED,
    "wkv.head_size": _head_size,
}
_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": _LONG,
    "num_attention_heads": lambda config: config.width // _head_size(config),
}
_IN_QWEN: Keys = {**_KEYS, "context_length": _LONG, "token_shift_count": 1}

ROWS = (
    Recipe(
        "rwkv6", ("Rwkv6ForCausalLM",), _time_mix6("attention"), raw=layers_at("rwkv.blocks."), changes=_RWKV6,
        defaults=_DEFAULTS,
        keys={
            **_KEYS, "time_mix_extra_dim": lambda config: _extra(config, 64),
            "time_decay_extra_dim": lambda config: _extra(config, 128), "rescale_every_n_layers": "rescale_every",
            "feed_forward_length": _inner(lambda width: int(width * 3.5) // 32 * 32),
        },
        top={"token_embd_norm": "model.layers.0.pre_ln"}, templates={"default": TEMPLATE},
    ),
    Recipe(
        "rwkv6qwen2", ("RWKV6Qwen2ForCausalLM",), _QWEN6, defaults={"num_attention_heads": 1},
        keys={
            **_IN_QWEN, "attention.head_count_kv": "num_key_value_heads",
            "wkv.head_size": lambda config: config.width // config.heads,
            "time_mix_extra_dim": _rank("lora_rank_tokenshift", 64),
            "time_decay_extra_dim": _rank("lora_rank_decay", 128),
        },
    ),
    Recipe(
        "rwkv7", ("RWKV7ForCausalLM", "Rwkv7ForCausalLM"), _RWKV7, defaults=_DEFAULTS,
        keys={
            **_KEYS, "context_length": _LONG, "feed_forward_length": _inner(lambda width: 4 * width),
            "attention.decay_lora_rank": _low_rank("lora_rank_decay", "decay_low_rank_dim", 0.5, 1.8),
            "attention.iclr_lora_rank": _low_rank("lora_rank_iclr", "a_low_rank_dim", 0.5, 1.8),
            "attention.value_residual_mix_lora_rank": _low_rank(
                "lora_rank_value_residual_mix", "v_low_rank_dim", 0.5, 1.3
            ),
            "attention.gate_lora_rank": _low_rank("lora_rank_gate", "gate_low_rank_dim", 0.8, 0.6),
        },
        templates={"default": TEMPLATE}, checks=(_all_recurrent,),
    ),
    Recipe(
        "arwkv7", ("RwkvHybridForCausalLM",), _QWEN7, defaults=_DEFAULTS,
        keys={
            **_IN_QWEN, "attention.decay_lora_rank": 64, "attention.iclr_lora_rank": 64,
            "attention.value_residual_mix_lora_rank": 32,
            "attention.gate_lora_rank": lambda config: 0 if config.flag("wkv_has_gate") is False else 128,
        },
        fixed={"wkv_version": 7},
    ),
)  # fmt: skip

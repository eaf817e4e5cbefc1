"""What a recipe is made of: the sources of tensors, changes to them, and checks of config.json."""

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


def only(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
    return parts[0]


@dataclass(frozen=True, slots=True)
class From:
    """Names below `model.layers.N.`, and the change that combines them to one tensor; `{}` in a name counts from 0.

    The key in the table is a name below `blk.N.`. A key without a suffix means both `.weight` and `.bias`.
    """

    names: tuple[str, ...]
    change: Change = only


def taken(name: str, change: Change = only) -> tuple[From, ...]:
    return (From((name,), change),)


def permuted(heads: Callable[[Sizes], int]) -> Change:
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


def stacked(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
    return t.stacked(parts)


def flat(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
    return t.flattened(parts[0])


def half(which: int) -> Change:
    """Return the first or second half of the rows of every matrix."""

    def change(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
        rows = parts[0].shape[-2] // 2
        return t.strided(parts[0], which * rows, (which + 1) * rows)

    return change


def first_half_turned(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
    """Return the first half of the columns of every matrix, as rows."""
    return half(0)([turned(parts, sizes)], sizes)


def second_half_turned(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
    return half(1)([turned(parts, sizes)], sizes)


def packed(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
    return t.mxfp4(*parts)


def turned(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
    return t.transposed(parts[0])


def every_second(first: int, change: Change) -> Change:
    """Return rows first, first + 2, ... of the result of `change`."""

    def then(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
        whole = change(parts, sizes)
        return t.strided(whole, first, whole.shape[-2], 2)

    return then


def every_second_value(first: int) -> Change:
    return lambda parts, sizes: t.columns(parts[0], first, 2)


def must_be(name: str, *allowed: Any) -> Check:
    """Require that a key of config.json, if present, has one of these values."""

    def check(config: HfConfig) -> str | None:
        value = config.get(name)
        if value is None or value in allowed:
            return None
        return f"{name} is {value}; the GGUF architecture has it fixed at {allowed[0]}"

    return check


def every_fourth_without_rope(config: HfConfig) -> str | None:
    layers = config.needed("num_hidden_layers")
    rotated = config.get("no_rope_layers") or [int((i + 1) % (config.get("no_rope_layer_interval") or 4) != 0)
                                               for i in range(layers)]  # fmt: skip
    if rotated == [int((i + 1) % 4 != 0) for i in range(layers)]:
        return None
    return "no_rope_layers is not every fourth layer; the GGUF architecture has it fixed so"


def slides_at_64_layers(config: HfConfig) -> str | None:
    """Require windows in models of 64 layers, and in no others."""
    slides = config.integer("sliding_window") is not None and "sliding_attention" in (config.get("layer_types") or ())
    if slides == (config.needed("num_hidden_layers") == 64):
        return None
    return "the GGUF architecture has windows in models of 64 layers and no others; layer_types differs"


def score_scale(wide_layers: int) -> Check:
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
    top: Mapping[str, From] = field(default_factory=dict)  # sources of tensors outside of layers, if they differ


Layer = dict[str, tuple[From, ...]]

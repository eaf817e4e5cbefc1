"""What a recipe is made of: the sources of tensors, changes to them, and checks of config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from localllm.convert import tensor as t
from localllm.convert.errors import ConvertError
from localllm.convert.hf_config import HfConfig
from localllm.convert.tensor import LazyTensor
from localllm.printable import printable


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that tensor conversions depend on; those of few architectures are in `config`."""

    layers: int
    heads: int
    kv_heads: int
    config: HfConfig


Change = Callable[[list[LazyTensor], Sizes], LazyTensor]
Key = int | float | str | Callable[[HfConfig], Any] | None  # None: the file gets no such key
TokenizerModel = Literal["", "gemma4", "llama"]
Pieces = Literal["rows", "columns"]
RopeTensors = bool | Literal["whole"]
Check = Callable[[HfConfig], str | None]  # returns why results would differ from transformers, or None


def only(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
    return parts[0]


@dataclass(frozen=True, slots=True)
class From:
    """Names below `model.layers.N.`, and the change that combines them to one tensor; `{}` in a name counts from 0.

    The key in the table is a name below `blk.N.`. A key without a suffix means both `.weight` and `.bias`; one that
    ends with a dot has none.
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


def quarter(which: int) -> Change:
    """Return one of the four quarters of the rows."""

    def change(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
        rows = parts[0].shape[-2] // 4
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
    return lambda parts, sizes: t.columns(parts[0], np.arange(first, parts[0].shape[-1], 2))


def in_turn(*changes: Change) -> Change:
    """Return the change that makes them one after the other."""

    def change(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
        for one in changes:
            parts = [one(parts, sizes)]
        return parts[0]

    return change


def squeezed(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
    return t.squeezed(parts[0])


def column(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
    """Return the numbers one below the other: (n, 1)."""
    return t.column(parts[0])


def shaped(width: Callable[[Sizes], int]) -> Change:
    """Return a vector as rows of equal length."""

    def change(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
        return t.shaped(parts[0], width(sizes))

    return change


def decay(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
    """Return -exp(x): the rates of a recurrence, which transformers saves as logarithms."""
    return t.computed(parts[0], lambda values: -np.exp(values))


def of_groups(layout: Callable[[HfConfig], tuple[int, tuple[int, ...]]], *which: int) -> Change:
    """Return the parts `which` of all groups, part by part. The layout is the number of groups and their parts' rows.

    Rows are values of a vector.
    """

    def change(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
        groups, heights = layout(sizes.config)
        order = numbered(parts[0], height(parts[0]), groups, sum(heights))
        ends = np.cumsum(heights)
        picked = [order[:, ends[i] - heights[i] : ends[i]].reshape(-1) for i in which]
        index = np.concatenate(picked)
        return t.picked(parts[0], index, len(index))

    return change


def key_and_value(config: HfConfig) -> tuple[int, tuple[int, ...]]:
    """Return the heads of latent attention, and the rows of a head's plain keys and of its values."""
    widths = config.needed("qk_nope_head_dim"), config.needed("v_head_dim")
    return config.needed("num_attention_heads"), widths


def of_heads(layout: Callable[[HfConfig], tuple[int, tuple[int, ...]]], part: int) -> Change:
    """Return part `part` of all groups, as a matrix for each group."""

    def change(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
        groups, heights = layout(sizes.config)
        numbered(parts[0], height(parts[0]), groups, sum(heights))
        start = sum(heights[:part])
        return t.strided(t.divided(parts[0], groups), start, start + heights[part])

    return change


def height(tensor: LazyTensor) -> int:
    """Return its rows, or the values of a vector."""
    return tensor.shape[-2 if len(tensor.shape) > 1 else -1]


def numbered(tensor: LazyTensor, count: int, groups: int, each: int) -> NDArray[np.int64]:
    """Return the numbers 0, 1, ... of `count` rows or columns as (groups, each); ConvertError if they do not fit."""
    if count != groups * each:
        raise ConvertError(
            f"tensor '{printable(tensor.name)}': {count} rows or columns are not {groups} groups of {each}; "
            "config.json does not belong to these weights"
        )
    return np.arange(count).reshape(groups, each)


def named(*names: str) -> Callable[[HfConfig], int]:
    """Return the number under the first of these names."""
    return lambda config: config.needed(*names)


def must_be(name: str, *allowed: Any) -> Check:
    """Require that a key of config.json, if present, has one of these values; `outer.name` is in a nested table."""

    def check(config: HfConfig) -> str | None:
        *tables, key = name.split(".")
        for table in tables:
            config = config.below(table, config.table(table))
        value = config.get(key)
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


def untied(tensors: list[LazyTensor], config: HfConfig) -> list[LazyTensor]:
    """Return the tensors without an output that is the embedding again."""
    table = next((tensor for tensor in tensors if tensor.name == "token_embd.weight"), None)
    return [x for x in tensors if x.name != "output.weight" or table is None or not t.alike(x, table)]


@dataclass(frozen=True, slots=True)
class Mapped:
    """What a recipe adds to the gguf package's map from names in a folder to names in a file."""

    prefixes: tuple[str, ...] = ()  # classes with a head put one of these before every other name
    names: Mapping[str, str] = field(default_factory=dict)  # whole names that mean something else here
    skipped: tuple[str, ...] = ()  # beginnings of names without a place in the file
    changes: Mapping[str, Change] = field(default_factory=dict)  # by the name in the file, after `blk.N.`
    output: Callable[[list[LazyTensor], HfConfig], list[LazyTensor]] = untied  # decides on the output matrix


@dataclass(frozen=True, slots=True)
class Parts:
    """Where the text model is in a folder that holds more, and what is left out beside the usual names."""

    inside: str = ""  # what its tensors begin with, unless it is saved alone
    others: tuple[str, ...] = ()  # what tensors for images or audio begin with


@dataclass(frozen=True, slots=True)
class Recipe:
    """A row of the table. `defaults` are the values that transformers assumes for missing keys, or functions."""

    name: str  # general.architecture
    classes: tuple[str, ...]  # `architectures` in config.json
    layer: Mapping[str, tuple[From, ...]]  # the first whose names exist is used
    norm_offset: float = 0.0  # added to the weights of norms
    plain_norms: tuple[str, ...] = ()  # but of these
    rope_tensors: RopeTensors = False  # whether the file can store frequency factors; whole: for heads rotated in part
    eps: str = "rms_norm_eps"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Key] = field(default_factory=dict)  # other keys: a number, or where it is from
    checks: tuple[Check, ...] = ()
    head_dim: Callable[[HfConfig], int] | None = None  # width of the heads that see everything, if it differs
    when: Callable[[HfConfig], bool] | None = None  # of several recipes for a class, the first for which this holds
    words: Callable[[HfConfig], Mapping[str, Any]] | None = None  # values in the words of transformers, for others
    # sources outside of layers, if they differ
    top: Mapping[str, From | tuple[From, ...]] = field(default_factory=dict)
    unread: Callable[[str, HfConfig], bool] | None = None  # tensors of the folder that no model reads
    tokenizer: TokenizerModel = ""  # `tokenizer.ggml.model` where tokenizer.json cannot tell it
    templates: Mapping[str, str] = field(default_factory=dict)  # further templates, for files whose folder has none
    whole_keys: Mapping[str, Any] = field(
        default_factory=dict
    )  # without the architecture's prefix; None takes one away
    tokens: Callable[[HfConfig], Mapping[int, str]] | None = None  # that config.json has, and no file of the tokenizer
    zeros_unused: bool = False  # special tokens whose embedding is zero were never trained: no answer contains them
    numbers: Mapping[str, str] = field(default_factory=dict)  # whole keys: the tensors of layers with a number for each
    number: Mapping[str, str] = field(default_factory=dict)  # whole keys: tensors outside of layers with one number
    integers: Mapping[str, str] = field(default_factory=dict)  # whole keys: tensors of integers that one layer has
    # ends of names: how the pieces fit that a checkpoint has, one for each of several cards
    pieces: Mapping[str, Pieces] = field(default_factory=dict)
    pooling: int | None = None  # GGUF's number of the pooling, for a folder that tells none
    lone: Mapping[str, tuple[From, ...]] = field(default_factory=dict)  # tensors of the file that one layer has
    layers: Callable[[HfConfig], list[str]] | None = None  # what their tensors' names begin with; None: model.layers.N.
    parts: Parts = field(default_factory=Parts)  # what the folder holds beside the text model
    # codes in FP8 and their scales: the numbers, or None where the scales are those of blocks
    scaled: Callable[[LazyTensor, LazyTensor, HfConfig], LazyTensor | None] = lambda codes, scales, config: None
    mapped: Mapped | None = None  # tensors have the gguf package's names, instead of `layer` and `top`

    def assumed(self, config: HfConfig) -> dict[str, Any]:
        """Return the defaults for this config.json."""
        return _values(self.defaults, config)

    def whole(self, config: HfConfig) -> dict[str, Any]:
        """Return the whole keys for this config.json."""
        return _values(self.whole_keys, config)

    def said(self, config: HfConfig) -> HfConfig:
        """Return config.json in the words of transformers, with the defaults."""
        values = {**config.values, **self.words(config)} if self.words is not None else config.values
        return HfConfig(config.path, values, self.assumed(config))

    def prefixes(self, sizes: Sizes) -> list[str]:
        """Return what the names of a layer's tensors begin with, in the order of the file's layers."""
        if self.layers is not None:
            return self.layers(sizes.config)
        return [f"model.layers.{layer}." for layer in range(sizes.layers)]


def _values(table: Mapping[str, Any], config: HfConfig) -> dict[str, Any]:
    return {key: value(config) if callable(value) else value for key, value in table.items()}


Layer = dict[str, tuple[From, ...]]

"""The building blocks of recipes: sources of tensors, conversions of tensors, and checks of config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from localllm.base.printable import printable
from localllm.convert import tensor as t
from localllm.convert.errors import ConvertError
from localllm.convert.hf_config import HfConfig
from localllm.convert.tensor import LazyTensor


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that tensor conversions need. Conversions read rarely used sizes from `config`."""

    layers: int
    heads: int
    kv_heads: int
    config: HfConfig


Change = Callable[[list[LazyTensor], Sizes], LazyTensor]
Key = int | float | str | Callable[[HfConfig], Any] | None  # None: the key is not written
TokenizerModel = Literal["", "gemma4", "llama"]
Pieces = Literal["rows", "columns"]
RopeTensors = bool | Literal["whole"]
Check = Callable[[HfConfig], str | None]  # returns why the results would differ from transformers, or None


def only(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
    return parts[0]


@dataclass(frozen=True, slots=True)
class From:
    """The names of source tensors below `model.layers.N.`, and the change that combines them; `{}` in a name counts
    from 0.

    The key in the recipe's table is a name below `blk.N.`. A key without a suffix means both `.weight` and `.bias`. A
    key that ends with a dot has no suffix in the GGUF file.
    """

    names: tuple[str, ...]
    change: Change = only


def taken(name: str, change: Change = only) -> tuple[From, ...]:
    return (From((name,), change),)


def permuted(heads: Callable[[Sizes], int]) -> Change:
    """Reorder each head's rows from half-split rope (i, i + n/2), as in transformers, to interleaved (2i, 2i + 1)."""

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


def take_half(which: int) -> Change:
    """Return a change that picks the first or second half of the rows of every matrix."""

    def change(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
        rows = parts[0].shape[-2] // 2
        return t.strided(parts[0], which * rows, (which + 1) * rows)

    return change


def quarter(which: int) -> Change:
    """Return a change that picks one of the four quarters of the rows of every matrix."""

    def change(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
        rows = parts[0].shape[-2] // 4
        return t.strided(parts[0], which * rows, (which + 1) * rows)

    return change


def first_half_turned(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
    """Return the first half of the columns of each matrix, transposed to rows."""
    return take_half(0)([turned(parts, sizes)], sizes)


def second_half_turned(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
    return take_half(1)([turned(parts, sizes)], sizes)


def packed(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
    return t.mxfp4(*parts)


def turned(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
    return t.transposed(parts[0])


def every_second(first: int, change: Change) -> Change:
    """Return a change that applies `change` and keeps rows first, first + 2, ... of its result."""

    def then(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
        whole = change(parts, sizes)
        return t.strided(whole, first, whole.shape[-2], 2)

    return then


def every_second_value(first: int) -> Change:
    return lambda parts, sizes: t.picked_columns(parts[0], np.arange(first, parts[0].shape[-1], 2))


def in_turn(*changes: Change) -> Change:
    """Return a change that applies these changes one after the other."""

    def change(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
        for one in changes:
            parts = [one(parts, sizes)]
        return parts[0]

    return change


def squeezed(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
    return t.squeezed(parts[0])


def column(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
    """Return the values as a column (n, 1)."""
    return t.column(parts[0])


def shaped(width: Callable[[Sizes], int]) -> Change:
    """Return a change that reshapes a vector to rows of equal width."""

    def change(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
        return t.shaped(parts[0], width(sizes))

    return change


def decay(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
    """Return -exp(x): the decay rates of a recurrence, which transformers stores as logarithms."""
    return t.computed(parts[0], lambda values: -np.exp(values))


def of_groups(layout: Callable[[HfConfig], tuple[int, tuple[int, ...]]], *which: int) -> Change:
    """Return a change that picks the parts `which` of all groups, part by part. `layout` returns the number of groups
    and the number of rows of each part of a group.

    For a vector, a row is one value.
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
    """Return the number of heads in latent attention, and the rows per head of the keys without rope and of the
    values."""
    widths = config.needed("qk_nope_head_dim"), config.needed("v_head_dim")
    return config.needed("num_attention_heads"), widths


def of_heads(layout: Callable[[HfConfig], tuple[int, tuple[int, ...]]], part: int) -> Change:
    """Return a change that picks one part of every group and returns it as one matrix per group."""

    def change(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
        groups, heights = layout(sizes.config)
        numbered(parts[0], height(parts[0]), groups, sum(heights))
        start = sum(heights[:part])
        return t.strided(t.divided(parts[0], groups), start, start + heights[part])

    return change


def height(tensor: LazyTensor) -> int:
    """Return the number of rows, or the number of values of a vector."""
    return tensor.shape[-2 if len(tensor.shape) > 1 else -1]


def numbered(tensor: LazyTensor, count: int, groups: int, each: int) -> NDArray[np.int64]:
    """Return the indices 0, 1, ... of `count` rows or columns as an array (groups, each); raise ConvertError if `count`
    differs from groups * each.
    """
    if count != groups * each:
        raise ConvertError(
            f"tensor '{printable(tensor.name)}': {count} rows or columns are not {groups} groups of {each}; "
            "config.json does not belong to these weights"
        )
    return np.arange(count).reshape(groups, each)


def by_name(*names: str) -> Callable[[HfConfig], int]:
    """Return a reader that looks up several names in config.json and returns the first value found."""
    return lambda config: config.needed(*names)


def must_be(name: str, *allowed: Any) -> Check:
    """Return a check that a key of config.json, if present, has an allowed value. `outer.name` is a key in a nested
    table."""

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
    """Require sliding-window attention in models with 64 layers, and in no others."""
    slides = config.integer("sliding_window") is not None and "sliding_attention" in (config.get("layer_types") or ())
    if slides == (config.needed("num_hidden_layers") == 64):
        return None
    return "the GGUF architecture has windows in models of 64 layers and no others; layer_types differs"


def score_scale(wide_layers: int) -> Check:
    """Require attention scores scaled by 1/sqrt(head width) or, in models with `wide_layers` layers, by
    1/sqrt(width/heads)."""

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
    """Drop an output matrix that equals the token embedding."""
    table = next((tensor for tensor in tensors if tensor.name == "token_embd.weight"), None)
    return [x for x in tensors if x.name != "output.weight" or table is None or not t.alike(x, table)]


@dataclass(frozen=True, slots=True)
class Mapped:
    """A recipe's additions to the gguf package's map from checkpoint tensor names to GGUF tensor names."""

    prefixes: tuple[str, ...] = ()  # prefixes that model classes with a head add to all other names
    names: Mapping[str, str] = field(default_factory=dict)  # full names that have another meaning in this architecture
    skipped: tuple[str, ...] = ()  # prefixes of names to skip
    changes: Mapping[str, Change] = field(default_factory=dict)  # keys are GGUF names below `blk.N.`
    output: Callable[[list[LazyTensor], HfConfig], list[LazyTensor]] = untied  # chooses the output matrix


@dataclass(frozen=True, slots=True)
class Parts:
    """The place of the text model in a multimodal checkpoint, and the other tensors, which are skipped."""

    inside: str = ""  # prefix of the text model's tensors, unless it is saved alone
    others: tuple[str, ...] = ()  # prefixes of image and audio tensors


@dataclass(frozen=True, slots=True)
class Recipe:
    """One architecture in the table. `defaults` are the values that transformers assumes for missing keys, or functions
    that compute them."""

    name: str  # general.architecture
    classes: tuple[str, ...]  # `architectures` in config.json
    layer: Mapping[str, tuple[From, ...]]  # the first source whose tensors exist is used
    norm_offset: float = 0.0  # added to the weights of norms
    plain_norms: tuple[str, ...] = ()  # norms to which `norm_offset` is not added
    rope_tensors: RopeTensors = False  # whether GGUFs store frequency factors; "whole": padded to the whole head
    eps: str = "rms_norm_eps"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Key] = field(default_factory=dict)  # values of other metadata keys, or their sources
    checks: tuple[Check, ...] = ()
    head_dim: Callable[[HfConfig], int] | None = None  # head width of full-attention layers, if it differs
    when: Callable[[HfConfig], bool] | None = None  # chooses among recipes of one class; the first match is used
    words: Callable[[HfConfig], Mapping[str, Any]] | None = None  # returns config values by transformers' key names
    # sources of tensors outside layers that differ from the default
    top: Mapping[str, From | tuple[From, ...]] = field(default_factory=dict)
    unread: Callable[[str, HfConfig], bool] | None = None  # tensors of the checkpoint that no model reads
    tokenizer: TokenizerModel = ""  # `tokenizer.ggml.model`, if tokenizer.json does not determine it
    templates: Mapping[str, str] = field(default_factory=dict)  # templates added to checkpoints without them
    whole_keys: Mapping[str, Any] = field(default_factory=dict)  # keys without a prefix; None removes a key
    tokens: Callable[[HfConfig], Mapping[int, str]] | None = None  # tokens defined in config.json only
    zeros_unused: bool = False  # suppress special tokens with a zero embedding, which were never trained
    numbers: Mapping[str, str] = field(default_factory=dict)  # full key -> name of each layer's one-element tensor
    number: Mapping[str, str] = field(default_factory=dict)  # full key -> name of a one-element tensor outside layers
    integers: Mapping[str, str] = field(default_factory=dict)  # full key -> name of an integer tensor in one layer
    # Tensor name suffix -> axis along which to concatenate the shards of a tensor-parallel checkpoint.
    pieces: Mapping[str, Pieces] = field(default_factory=dict)
    pooling: int | None = None  # GGUF pooling type, if the checkpoint sets none
    lone: Mapping[str, tuple[From, ...]] = field(default_factory=dict)  # top-level tensors whose source is in one layer
    layers: Callable[[HfConfig], list[str]] | None = None  # name prefixes of the layers; None: model.layers.N.
    parts: Parts = field(default_factory=Parts)  # non-text parts of the checkpoint
    # Dequantizes FP8 tensors whose scales are not in regular blocks. None: the default method.
    scaled: Callable[[LazyTensor, LazyTensor, HfConfig], LazyTensor | None] = lambda codes, scales, config: None
    mapped: Mapped | None = None  # use the gguf package's tensor names instead of `layer` and `top`

    def assumed(self, config: HfConfig) -> dict[str, Any]:
        """Return the defaults for this config.json."""
        return _values(self.defaults, config)

    def whole(self, config: HfConfig) -> dict[str, Any]:
        """Return the keys without an architecture prefix for this config.json."""
        return _values(self.whole_keys, config)

    def said(self, config: HfConfig) -> HfConfig:
        """Return config.json with transformers' key names, and defaults for missing keys."""
        values = {**config.values, **self.words(config)} if self.words is not None else config.values
        return HfConfig(config.path, values, self.assumed(config))

    def prefixes(self, sizes: Sizes) -> list[str]:
        """Return the name prefix of each layer's tensors, in the layer order of the GGUF file."""
        if self.layers is not None:
            return self.layers(sizes.config)
        return [f"model.layers.{layer}." for layer in range(sizes.layers)]


def _values(table: Mapping[str, Any], config: HfConfig) -> dict[str, Any]:
    return {key: value(config) if callable(value) else value for key, value in table.items()}


Layer = dict[str, tuple[From, ...]]

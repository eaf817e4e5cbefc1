"""Changes of tensors that recipes share: each takes the parts that a tensor is made of, and the sizes of the model."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from localllm.base.printable import printable
from localllm.convert import tensor as t
from localllm.convert.errors import ConvertError
from localllm.convert.hf_config import HfConfig, Reader
from localllm.convert.recipe import Change, Layer, Tensors, taken
from localllm.convert.tensor import LazyTensor

_LAYER = re.compile(r"\.(\d+)\.")
Groups = tuple[int, tuple[int, ...]]
Layout = Reader[Groups]  # the number of groups, and the rows of each part of a group


def of_one(function: Callable[[LazyTensor], LazyTensor]) -> Change:
    """Return a change of a single tensor that needs no sizes."""
    return lambda parts, config: function(parts[0])


def of_all(function: Callable[[Tensors], LazyTensor]) -> Change:
    """Return a change that makes one tensor of all parts and needs no sizes."""
    return lambda parts, config: function(parts)


flat, turned = of_one(t.flattened), of_one(t.transposed)
# Without a dimension of 1; values as a column (n, 1).
squeezed, column = of_one(t.squeezed), of_one(t.column)
stacked, joined = of_all(t.stacked), of_all(t.concatenated)
# Rates, from their logarithms.
decay = of_one(lambda tensor: t.computed(tensor, lambda values: -np.exp(values)))


def plus(number: float) -> Change:
    """Return a change that adds a constant, as a model's program adds it to the weights of a norm."""
    return of_one(lambda tensor: t.as_float32(tensor, number))


def times(factor: Reader[float]) -> Change:
    """Return a change that multiplies a tensor by a number of config.json, and keeps its format."""
    return lambda parts, config: t.scaled(parts[0], np.full(parts[0].rows, factor(config), np.float32))


def layer_of(tensor: LazyTensor) -> int:
    """Return the number of a tensor's layer."""
    found = _LAYER.search(tensor.name)
    assert found is not None, f"{tensor.name}: not in a layer"
    return int(found[1])


def heads(config: HfConfig) -> int:
    return config.heads


def kv_heads(config: HfConfig) -> int:
    return config.integer("num_key_value_heads") or config.heads


def permuted(heads: Reader[int]) -> Change:
    """Reorder each head's rows from half-split rope (i, i + n/2), as in transformers, to interleaved (2i, 2i + 1)."""

    def change(parts: Tensors, config: HfConfig) -> LazyTensor:
        rows = parts[0].shape[0]
        if rows % (2 * heads(config)):
            name = printable(parts[0].name)
            raise ConvertError(
                f"tensor '{name}' has {rows} rows, not a multiple of {heads(config)} heads; config.json does not "
                "match these weights"
            )
        order = np.arange(rows).reshape(heads(config), 2, -1).swapaxes(1, 2).reshape(-1)
        return t.picked(parts[0], order, rows)

    return change


PERMUTED = {"attn_q": permuted(heads), "attn_k": permuted(kv_heads)}


def share(which: int, count: int = 2) -> Change:
    """Return a change that picks one of `count` equal shares of the rows of every matrix."""

    def change(parts: Tensors, config: HfConfig) -> LazyTensor:
        rows = height(parts[0]) // count
        return t.strided(parts[0], which * rows, (which + 1) * rows)

    return change


def halves(name: str, end: str = "") -> Layer:
    """Return the sources of gate and up, which are the two halves of one tensor."""
    return {f"ffn_{x}{end}": taken(name, share(which)) for which, x in enumerate(("gate", "up"))}


def in_turn(*changes: Change) -> Change:
    """Return a change that applies these changes one after the other."""

    def change(parts: Tensors, config: HfConfig) -> LazyTensor:
        for one in changes:
            parts = [one(parts, config)]
        return parts[0]

    return change


def shaped(width: Reader[int]) -> Change:
    """Return a change that reshapes a vector to rows of equal width."""

    def change(parts: Tensors, config: HfConfig) -> LazyTensor:
        return t.shaped(parts[0], width(config))

    return change


def of_groups(layout: Layout, *which: int) -> Change:
    """Return a change that picks the parts `which` of all groups, part by part. For a vector, a row is one value."""

    def change(parts: Tensors, config: HfConfig) -> LazyTensor:
        groups, heights = layout(config)
        order = numbered(parts[0], height(parts[0]), groups, sum(heights))
        ends = np.cumsum(heights)
        picked = [order[:, ends[i] - heights[i] : ends[i]].reshape(-1) for i in which]
        index = np.concatenate(picked)
        return t.picked(parts[0], index, len(index))

    return change


def of_heads(layout: Layout, part: int) -> Change:
    """Return a change that picks one part of every group and returns it as one matrix per group."""

    def change(parts: Tensors, config: HfConfig) -> LazyTensor:
        groups, heights = layout(config)
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
            "config.json does not match these weights"
        )
    return np.arange(count).reshape(groups, each)


def second(parts: Tensors, config: HfConfig) -> LazyTensor:
    """Return the second tensor. Both kinds of layers have it; the first tensor only identifies the kind of the
    layer."""
    return parts[1]

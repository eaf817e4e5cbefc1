"""Parts of recipes that several families share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.convert.changes import Groups, Layout, heads, height, in_turn, kv_heads, numbered, of_groups, permuted
from localllm.convert.hf_config import HfConfig, Reader
from localllm.convert.recipe import Change, Keys, Layer, Tensors, taken
from localllm.convert.rope_scaling import rope_of
from localllm.convert.tensor import LazyTensor, picked

NORMED_SPARSE = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}  # experts in all layers


def leading(
    config: HfConfig,
    name: str = "mlp_layer_types",
    first: Any = "dense",
    rest: Any = "sparse",
    expected: str = "dense layers first, then sparse layers",
) -> int:
    """Return the number of leading layers of the first kind, dense ones by default."""
    kinds, layers = config.get(name), config.layers
    count = kinds.count(first) if isinstance(kinds, list) else 0
    if kinds != [first] * count + [rest] * (layers - count):
        raise config.error(name, kinds, f"{expected}, {layers} in all")
    return count


def dense_layers(config: HfConfig) -> int:
    """Return the number of leading dense layers."""
    if config.get("mlp_layer_types") is None:
        return config.integer("first_k_dense_replace") or 0
    return leading(config)


def slides_of(config: HfConfig) -> list[bool]:
    """Return which layers use sliding-window attention."""
    kinds = config.per_layer("layer_types", "the kinds of {} layers", lambda kind: True)
    return [kind == "sliding_attention" for kind in kinds]


def named_kinds(slides: list[bool]) -> list[str]:
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


NOT_ROTATED: Keys = {"rope.dimension_count": None, "rope.freq_base": None}


def head_width(config: HfConfig) -> int:
    return config.integer("head_dim") or config.width // config.heads


def rotated_when(kind: str) -> Reader[int]:
    """Return a reader of the number of rotated values per head in layers of this kind."""

    def width(config: HfConfig) -> int:
        share = config.inner("rope_parameters").inner(kind).real("partial_rotary_factor")
        return int(config.needed("head_dim") * (1.0 if share is None else share))

    return width


def either(name: str, table: str, older: str) -> Reader[int]:
    """Return a reader of a size under transformers' key, or under its older key in a nested table."""
    return lambda config: config.integer(name) or config.inner(table).needed(older)


def by_head(config: HfConfig) -> Groups:
    """Return the number of heads, and the rows of a head: equal numbers of queries, keys and values."""
    return config.heads, (config.width // config.heads,) * 3


def one_after_other(config: HfConfig) -> Groups:
    """Return a single group: the rows of all queries, all keys and all values."""
    width, keys = head_width(config), kv_heads(config)
    return 1, (config.heads * width, keys * width, keys * width)


def neighbours(name: str, layout: Layout) -> Layer:
    """Return the sources of Q, K and V in one fused matrix, reordered from half-split to interleaved rope."""
    return {
        "attn_q": taken(name, in_turn(of_groups(layout, 0), permuted(heads))),
        "attn_k": taken(name, in_turn(of_groups(layout, 1), permuted(kv_heads))),
        "attn_v": taken(name, of_groups(layout, 2)),
    }


def rotated_of(config: HfConfig) -> int:
    """Return the number of rotated values per head."""
    count: int = rope_of(config, head_width(config), True).keys["rope.dimension_count"]
    return count


def reordered(heads: Reader[int], ranks: Callable[[int], NDArray[np.int64]]) -> Change:
    """Reorder the rotated rows of each head, which come first. `ranks` gives their new order."""

    def change(parts: Tensors, config: HfConfig) -> LazyTensor:
        rows, count, rotated = height(parts[0]), heads(config), rotated_of(config)
        index = numbered(parts[0], rows, count, rows // count)
        index[:, :rotated] = index[:, ranks(rotated)]
        return picked(parts[0], index.reshape(-1), rows)

    return change


def queries_and_keys(ranks: Callable[[int], NDArray[np.int64]]) -> dict[str, Change]:
    return {
        "attn_q": reordered(heads, ranks), "attn_k": reordered(kv_heads, ranks),
    }  # fmt: skip

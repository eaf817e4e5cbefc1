"""Parts of recipes that several families share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from localllm.convert.changes import Layout, height, in_turn, numbered, of_groups, permuted
from localllm.convert.hf_config import HfConfig
from localllm.convert.recipe import Change, Keys, Layer, Sizes, taken
from localllm.convert.rope_scaling import rope_of
from localllm.convert.tensor import LazyTensor, picked

EARLY_NORMS = "attn_output attn_q_norm attn_k_norm"  # in the order of tensors
EARLY_BIAS = "ffn_gate_inp exp_probs_b"
SIGMOID: Keys = {"expert_gating_func": 2, "expert_weights_norm": True}


def kinds_of(config: HfConfig) -> list[str]:
    """Return "dense" or "sparse" for each layer."""
    kinds, layers = config.get("mlp_layer_types"), config.needed("num_hidden_layers")
    known = isinstance(kinds, list) and len(kinds) == layers and all(kind in ("dense", "sparse") for kind in kinds)
    if not known:
        raise config.error("mlp_layer_types", kinds, f"dense or sparse, {layers} times")
    return list(kinds)


def leading(config: HfConfig) -> int:
    """Return the number of leading dense layers."""
    kinds = kinds_of(config)
    count = kinds.index("sparse") if "sparse" in kinds else len(kinds)
    if "dense" in kinds[count:]:
        raise config.error("mlp_layer_types", ", ".join(kinds), "dense layers before all sparse ones")
    return count


def slides_of(config: HfConfig) -> list[bool]:
    """Return which layers use sliding-window attention."""
    kinds, layers = config.get("layer_types"), config.needed("num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise config.error("layer_types", kinds, f"the kinds of {layers} layers")
    return [kind == "sliding_attention" for kind in kinds]


def named_kinds(slides: list[bool]) -> list[str]:
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


NOT_ROTATED: Keys = {"rope.dimension_count": None, "rope.freq_base": None}


def head_width(config: HfConfig) -> int:
    return config.integer("head_dim") or config.needed("hidden_size") // config.needed("num_attention_heads")


def kv_heads(config: HfConfig) -> int:
    return config.integer("num_key_value_heads") or config.needed("num_attention_heads")


def one_after_other(config: HfConfig) -> tuple[int, tuple[int, ...]]:
    """Return a single group: the rows of all queries, all keys and all values."""
    width, keys = head_width(config), kv_heads(config)
    return 1, (config.needed("num_attention_heads") * width, keys * width, keys * width)


def neighbours(name: str, layout: Layout) -> Layer:
    """Return the sources of Q, K and V in one fused matrix, reordered from half-split to interleaved rope."""
    return {
        "attn_q": taken(name, in_turn(of_groups(layout, 0), permuted(lambda sizes: sizes.heads))),
        "attn_k": taken(name, in_turn(of_groups(layout, 1), permuted(lambda sizes: sizes.kv_heads))),
        "attn_v": taken(name, of_groups(layout, 2)),
    }


def as_many_keys(config: HfConfig) -> str | None:
    """Require one KV head per query head: the reference implementation supports nothing else."""
    heads, keys = config.needed("num_attention_heads"), kv_heads(config)
    return None if heads == keys else f"num_key_value_heads is {keys} of {heads} heads; the model's program has all"


def rotated_of(config: HfConfig) -> int:
    """Return the number of rotated values per head."""
    count: int = rope_of(config, head_width(config), True).keys["rope.dimension_count"]
    return count


def reordered(heads: Callable[[Sizes], int], ranks: Callable[[int], NDArray[np.int64]]) -> Change:
    """Reorder the rotated rows of each head, which come first. `ranks` gives their new order."""

    def change(parts: list[LazyTensor], sizes: Sizes) -> LazyTensor:
        rows, count, rotated = height(parts[0]), heads(sizes), rotated_of(sizes.config)
        index = numbered(parts[0], rows, count, rows // count)
        index[:, :rotated] = index[:, ranks(rotated)]
        return picked(parts[0], index.reshape(-1), rows)

    return change


def queries_and_keys(ranks: Callable[[int], NDArray[np.int64]]) -> dict[str, Change]:
    return {
        "attn_q": reordered(lambda sizes: sizes.heads, ranks), "attn_k": reordered(lambda sizes: sizes.kv_heads, ranks),
    }  # fmt: skip

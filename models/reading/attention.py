"""Attention metadata keys: heads and their widths, sliding windows, shared KV caches, and the scale of scores."""

from __future__ import annotations

import math

from localllm.models.config import LatentConfig
from localllm.models.errors import ModelError
from localllm.models.properties import Properties
from localllm.models.reading.bounds import (
    MAX_CONTEXT,
    MAX_FACTOR,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYOUTS,
    MIN_HEAD_DIM,
    REASON,
)
from localllm.models.reading.keys import Keys


def check_layouts(keys: Keys, heads: tuple[int, ...], kv_heads: tuple[int, ...], windows: tuple[int, ...]) -> None:
    found = len({(many, few, window > 0) for many, few, window in zip(heads, kv_heads, windows, strict=False)})
    if found > MAX_LAYOUTS:
        raise ModelError(
            f"{keys.prefix}attention.head_count: expected at most {MAX_LAYOUTS} different layouts of heads in all "
            f"layers (kernels are compiled for each, and no known model comes near), found {found}"
        )


def read_heads(keys: Keys, row: Properties, blocks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the numbers of query heads and of KV heads, per layer."""
    fewest = 0 if row.recurrent is not None else 1
    heads = keys.per_layer("attention.head_count", blocks, fewest, MAX_HEADS, reason=REASON)
    kv_heads = keys.per_layer("attention.head_count_kv", blocks, fewest, MAX_HEADS, default=heads, reason=REASON)
    for layer, (many, few) in enumerate(zip(heads, kv_heads, strict=True)):
        if many % few if few else many and row.recurrent is None:
            raise ModelError(
                f"{keys.prefix}attention.head_count_kv: {many} heads are not a multiple of {few} key-value heads "
                f"(layer {layer})"
            )
    return heads, kv_heads


def read_windows(keys: Keys, row: Properties, layers: int) -> tuple[int, ...]:
    if row.sliding is None:
        return (0,) * layers
    window = keys.integer("attention.sliding_window", 0, MAX_CONTEXT, default=row.sliding.window)
    slides = keys.periodic("attention.sliding_window_pattern", layers, row.sliding.period, row.sliding.first)
    return tuple(window if slide else 0 for slide in slides)


def read_alibi(keys: Keys, default: float | None) -> float:
    """Return the maximum ALiBi bias; `default` None means no ALiBi."""
    return 0.0 if default is None else keys.real("attention.max_alibi_bias", 0.0, MAX_FACTOR, default) or default


def read_attention_scale(keys: Keys, row: Properties, head_dim: int) -> float:
    if row.score_scale:
        return row.score_scale
    scale = keys.real("attention.scale", 0.0, MAX_FACTOR, default=0.0) if row.attention_scale else 0.0
    return scale or 1.0 / math.sqrt(head_dim)


def read_head_dims(
    keys: Keys, width: int, heads: tuple[int, ...], row: Properties
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the key and value widths of full-attention layers, and of sliding-window layers."""
    most = max(heads)
    share = width // most if most and width % most == 0 else None
    if row.latent:  # keys without `_mla` give latent widths, except in GGUFs whose matrices are not absorbed
        suffix = "_mla" if keys.integer("attention.key_length_mla", 0, MAX_HEAD_DIM, default=0) else ""
        own = _key_and_value(keys, suffix, None, share)
        return own, _key_and_value(keys, suffix + "_swa", *own) if row.sliding else own
    of_full = _key_and_value(keys, "", share if most else MIN_HEAD_DIM, None)
    return of_full, _key_and_value(keys, "_swa", *of_full) if row.sliding else of_full


def _key_and_value(keys: Keys, suffix: str, key: int | None, value: int | None) -> tuple[int, int]:
    """Return the widths of a key and of a value, with defaults; the value width defaults to the key width."""
    key = keys.integer(f"attention.key_length{suffix}", 1, MAX_HEAD_DIM, default=key, reason=REASON)
    name = f"attention.value_length{suffix}"
    return key, keys.integer(name, 1, MAX_HEAD_DIM, default=value or key, reason=REASON)


def read_latent(keys: Keys, rotated: int, key: int, value: int, suffix: str = "") -> LatentConfig:
    """Read the widths of latent attention.

    The widths must be even, as in all known models, because kernels read activations in pairs. `suffix` selects the
    keys of sliding-window layers.
    """
    of_rank = f"attention.kv_lora_rank{suffix}"
    rank = keys.integer(of_rank, 2, MAX_HEAD_DIM - rotated, reason=REASON)
    mla = "_mla" if keys.metadata.get(keys.prefix + "attention.key_length_mla") else ""
    for name, width in ((of_rank, rank), (f"attention.key_length{mla}{suffix}", key)):
        if width % 2:
            raise ModelError(f"{keys.prefix}{name}: expected an even number, found {width}")
    return LatentConfig(rank, key - rotated, rotated, value)

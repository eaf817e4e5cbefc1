"""Attention metadata keys: heads and their widths, sliding windows, shared KV caches, and the scale of scores."""

from __future__ import annotations

import math

from localllm.models.architecture import Architecture
from localllm.models.config import LatentConfig
from localllm.models.errors import ModelError
from localllm.models.reading.bounds import MAX_CONTEXT, MAX_FACTOR, MAX_HEAD_DIM, MAX_LAYOUTS, MIN_HEAD_DIM, REASON
from localllm.models.reading.keys import Keys


def check_layouts(keys: Keys, heads: tuple[int, ...], kv_heads: tuple[int, ...], windows: tuple[int, ...]) -> None:
    found = len({(many, few, window > 0) for many, few, window in zip(heads, kv_heads, windows, strict=False)})
    if found > MAX_LAYOUTS:
        raise ModelError(
            f"{keys.prefix}attention.head_count: expected at most {MAX_LAYOUTS} different layouts of heads in all "
            f"layers (kernels are compiled for each, and no known model comes near), found {found}"
        )


def read_windows(keys: Keys, row: Architecture, layers: int) -> tuple[int, ...]:
    if row.sliding is None:
        return (0,) * layers
    window = keys.integer("attention.sliding_window", 0, MAX_CONTEXT, default=row.sliding.window)
    slides = keys.periodic("attention.sliding_window_pattern", layers, row.sliding.period, row.sliding.first)
    return tuple(window if slide else 0 for slide in slides)


def read_kv_layers(
    keys: Keys, row: Architecture, kv_heads: tuple[int, ...], windows: tuple[int, ...]
) -> tuple[int, ...]:
    """Return, per layer, the layer whose KV cache it reads.

    The last layers reuse the KV cache of the last earlier layer of the same kind (sliding-window or full attention).
    """
    layers = len(windows)
    if row.kv_layers is None:
        return tuple(range(layers))
    key = "attention.shared_kv_layers"
    own = layers - keys.integer(key, 0, layers - 1, default=max(layers - row.kv_layers, 0) if row.kv_layers else 0)
    last = {windows[layer]: layer for layer in range(own)}
    for layer in range(own, layers):
        read = last.get(windows[layer])
        if read is None or kv_heads[read] != kv_heads[layer]:
            problem = "none of its kind" if read is None else f"{kv_heads[read]} key-value heads"
            raise ModelError(
                f"{keys.prefix}{key}: layer {layer} has {kv_heads[layer]} key-value heads and shares those of an "
                f"earlier layer, found {problem} in the first {own} layers"
            )
    return (*range(own), *(last[window] for window in windows[own:]))


def read_alibi(keys: Keys, row: Architecture, layers: int) -> float:
    if row.alibi is None or row.alibi_depth not in (0, layers):
        return 0.0
    return keys.real("attention.max_alibi_bias", 0.0, MAX_FACTOR, default=row.alibi) or row.alibi


def read_attention_scale(keys: Keys, row: Architecture, layers: int, head_dim: int, share: int) -> float:
    if row.score_scale:
        return row.score_scale
    if layers == row.wide_scores:
        return 1.0 / math.sqrt(share)
    scale = keys.real(row.score_scale_key, 0.0, MAX_FACTOR, default=0.0) if row.attention_scale else 0.0
    return scale or 1.0 / (head_dim if row.scores_by_width else math.sqrt(head_dim))


def read_head_dims(
    keys: Keys, width: int, heads: tuple[int, ...], row: Architecture
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

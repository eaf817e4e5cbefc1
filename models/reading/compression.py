"""Metadata keys of compressed attention: how many positions are compressed into one, and how they are rotated."""

from __future__ import annotations

from dataclasses import replace

from localllm.models.config import CompressionConfig, RopeConfig
from localllm.models.errors import ModelError
from localllm.models.reading.bounds import MAX_CONTEXT, MAX_HEAD_DIM, MAX_HEADS, MAX_WIDTH
from localllm.models.reading.keys import Keys

OVERLAPPING = 4  # the ratio whose pools overlap and are selected by an indexer
RATIOS = (0, OVERLAPPING, 128)


def read_compression(
    keys: Keys, heads: tuple[int, ...], kv_heads: tuple[int, ...], windows: tuple[int, ...], widths: tuple[int, ...]
) -> CompressionConfig:
    """Read the compression config; `widths` are the widths of a key, a value and the rotated part."""
    key, layers = "attention.compress_ratios", len(heads)
    ratios = keys.per_layer(key, layers, 0, MAX_CONTEXT, longer=True)
    for layer, ratio in enumerate(ratios):
        if ratio not in RATIOS:
            raise ModelError(f"{keys.prefix}{key}: supported are 0, 4 and 128, found {ratio} (layer {layer})")
    groups = keys.integer("attention.output_group_count", 1, MAX_HEADS)
    for layer, (of_layer, shared) in enumerate(zip(heads, kv_heads, strict=True)):
        if of_layer % groups:
            key = "attention.output_group_count"
            raise ModelError(f"{keys.prefix}{key}: expected a divisor of {of_layer}, found {groups} (layer {layer})")
        if shared != 1:
            raise ModelError(f"{keys.prefix}attention.head_count_kv: expected 1, found {shared} (layer {layer})")
    if not all(windows):
        raise ModelError(f"{keys.prefix}attention.sliding_window: expected a window for every layer, found 0")
    head_dim, value_dim, rotated = widths
    if value_dim != head_dim:
        key = "attention.value_length"
        raise ModelError(f"{keys.prefix}{key}: expected {head_dim}, the width of a key, found {value_dim}")
    if rotated > head_dim:
        raise ModelError(f"{keys.prefix}rope.dimension_count: expected at most {head_dim}, found {rotated}")
    keys.integer("attention.indexer.key_length", rotated, MAX_HEAD_DIM)
    return CompressionConfig(
        ratios, groups, keys.integer("attention.output_lora_rank", 2, MAX_WIDTH),
        keys.integer("hash_layer_count", 0, layers, default=0),
    )  # fmt: skip


def compressed_rope(keys: Keys, rope: RopeConfig) -> RopeConfig:
    """Return the RoPE config of layers with compressed attention, with its own base and magnitude 1."""
    base = keys.real("attention.compress_rope_freq_base", 1.001, 1e30)
    return replace(rope, base=base, attention_factor=1.0, multiplier=0.0, log_multiplier=0.0)

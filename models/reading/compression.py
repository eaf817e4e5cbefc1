"""Keys of compressed rows: how many positions become one row, and how rows are rotated."""

from __future__ import annotations

from dataclasses import replace

from localllm.models.architecture import Architecture
from localllm.models.config import CompressionConfig, RopeConfig
from localllm.models.errors import ModelError
from localllm.models.reading.bounds import MAX_HEADS, MAX_WIDTH
from localllm.models.reading.keys import Keys

OVERLAPPING = 4  # the ratio whose pools overlap, and are chosen by an indexer
RATIOS = (0, OVERLAPPING, 128)


def read_compression(keys: Keys, row: Architecture, heads: tuple[int, ...]) -> CompressionConfig:
    key = "attention.compress_ratios"
    ratios = keys.per_layer(key, len(heads), 0, max(RATIOS))
    for layer, ratio in enumerate(ratios):
        if ratio not in RATIOS:
            raise ModelError(f"{keys.prefix}{key}: supported are 0, 4 and 128, found {ratio} (layer {layer})")
    groups = keys.integer("attention.output_group_count", 1, MAX_HEADS)
    if heads[0] % groups:
        raise ModelError(f"{keys.prefix}attention.output_group_count: expected a divisor of {heads[0]}, found {groups}")
    return CompressionConfig(ratios, groups, keys.integer("attention.output_lora_rank", 2, MAX_WIDTH))


def compressed_rope(keys: Keys, rope: RopeConfig) -> RopeConfig:
    """The rotation of layers with compressed rows, which does not make numbers larger."""
    base = keys.real("attention.compress_rope_freq_base", 1.001, 1e30)
    return replace(rope, base=base, attention_factor=1.0, multiplier=0.0, log_multiplier=0.0)

"""Decides how the CPU stores a layer's KV cache: in panels or in rows, and with or without separate values."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.backends.base import CacheTypes
from localllm.backends.cpu.cache import CACHE, GROUP, Floats
from localllm.backends.cpu.cache_rows import head_bytes
from localllm.plan import CacheLayer


@dataclass(frozen=True, slots=True)
class Layout:
    """How the cache blocks of a layer are stored."""

    rows: bool  # one row per position (`backends.cpu.cache_rows`); otherwise panels (`backends.cpu.cache`)
    once: bool  # values are the first dimensions of the keys, and are not stored again


def layout_of(layer: CacheLayer, cache: CacheTypes) -> Layout:
    """Return the layout of a layer.

    Layers that read selected positions or pools one by one use rows; layers that read whole blocks use panels. Values
    that equal the first dimensions of the keys are stored separately if their stored bytes would differ: in another
    cache type, or in a type with rotation, which depends on the head dimension.
    """
    rows, keys = layer.gathered and not layer.whole, CACHE[cache.keys]
    same = isinstance(keys, Floats) or (keys.integer_bits == 8 and not keys.type.rotated)
    same &= cache.keys == cache.values and layer.value_dim % GROUP == 0
    return Layout(rows, rows and layer.prefix and same)


def cache_bytes(layer: CacheLayer, cache: CacheTypes) -> tuple[int, int]:
    """Return the bytes of keys and of values in a cache block."""
    keys, values, layout = CACHE[cache.keys], CACHE[cache.values], layout_of(layer, cache)
    key, value = head_bytes(keys, values, layer.head_dim, layer.value_dim, layout.rows, layer.every)
    return layer.kv_heads * key, 0 if layout.once else layer.kv_heads * value

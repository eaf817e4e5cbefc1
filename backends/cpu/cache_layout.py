"""How the cache of a layer is stored on the CPU: in panels or in rows, and whether values need memory of their own."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.backends.base import CacheTypes
from localllm.backends.cpu.cache import CACHE, GROUP, Floats
from localllm.backends.cpu.cache_rows import head_bytes
from localllm.plan import CacheLayer


@dataclass(frozen=True, slots=True)
class Layout:
    """How blocks of a layer are stored."""

    rows: bool  # a row per position (`backends.cpu.cache_rows`); else panels (`backends.cpu.cache`)
    once: bool  # values are the first numbers of the keys, and stored there alone


def layout_of(layer: CacheLayer, cache: CacheTypes) -> Layout:
    """Selected positions and pools are read row by row, whole blocks as they are.

    Values that begin the keys are stored twice where the stored numbers differ: in another type, or in types that
    rotate heads by their width.
    """
    rows, keys = layer.gathered and not layer.whole, CACHE[cache.keys]
    same = isinstance(keys, Floats) or (keys.integer_bits == 8 and not keys.type.rotated)
    same &= cache.keys == cache.values and layer.value_dim % GROUP == 0
    return Layout(rows, rows and layer.prefix and same)


def cache_bytes(layer: CacheLayer, cache: CacheTypes) -> tuple[int, int]:
    """Bytes of keys and of values in a cache block."""
    keys, values, layout = CACHE[cache.keys], CACHE[cache.values], layout_of(layer, cache)
    key, value = head_bytes(keys, values, layer.head_dim, layer.value_dim, layout.rows, layer.every)
    return layer.kv_heads * key, 0 if layout.once else layer.kv_heads * value

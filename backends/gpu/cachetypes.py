"""The layout of cache blocks on a device, by cache type.

Keys are stored with positions innermost, so that neighbouring work-items read neighbouring words. Values are stored row
by row. Layout of one head in one block (64 positions or the pools that end in them, W words per position, G groups of
32 values):

  keys    words (W, 64 positions), scales (G, 64 positions)
  values  words (64 positions, W), scales (64 positions, G)

If every row has its own list of positions, keys are stored like values, so that one row can serve as both. A position
has the same bytes as in `backends.cache.store`. Floats are padded to whole words. The scale of q8_0, q5_0 and q4_0 is
an f16 in `scales`; q5_1 and q4_1 store scale and minimum in the first word of a group, and have no `scales`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import CacheTypes
from localllm.backends.cache import CACHE_TYPES, CacheType
from localllm.plan import BLOCK, CacheLayer, Plan, Store, rows_of_block

GROUP = 32  # values of a head that share a scale


@dataclass(frozen=True, slots=True)
class CacheRow:
    """A cache type, with the number that identifies it in kernels."""

    type: CacheType
    number: int
    values: int  # values per unit; kernels always read whole units
    infinite: int = 0  # bits that are all set only in infinity and NaN, in halves (f32: words); 0: the type has neither

    @property
    def scaled(self) -> bool:
        """Whether scales are stored separately from the words of values."""
        return self.type.blocks and not self.minimum

    @property
    def minimum(self) -> bool:
        return self.type.name.endswith("_1")

    def size(self, head_dim: int) -> int:
        """Return the number of values of a head, including zero padding."""
        unit = GROUP if self.type.blocks else self.values
        return -(-head_dim // unit) * unit

    def words(self, head_dim: int) -> int:
        """Return the number of words per position, excluding separately stored scales."""
        size = self.size(head_dim)
        return (self.type.head_bytes(size) - 2 * self.scaled * (size // GROUP)) // 4

    def bytes(self, head_dim: int, count: int = BLOCK) -> int:
        """Return the bytes of one head in a cache block of `count` rows, rounded up to whole words."""
        return -(-count * self.type.head_bytes(self.size(head_dim)) // 4) * 4

    def finite(self, content: np.ndarray, head_dim: int, keys: bool, count: int = BLOCK) -> bool:
        """Return whether the block content uint8 (n, bytes) is free of infinity and NaN.

        FP8 content is always finite, because kernels read FP8 NaN as 480.
        """
        rows = np.ascontiguousarray(content).reshape(-1, self.bytes(head_dim, count))
        halves: NDArray[np.unsignedinteger] = rows.view(np.uint32 if self.values == 1 else np.uint16)
        words = 2 * count * self.words(head_dim)  # 16-bit halves of the words
        if self.scaled:
            # exclude the padding of the last word
            halves = halves[:, words : words + count * self.size(head_dim) // GROUP]
        elif self.minimum:
            of_group = words // count // (self.size(head_dim) // GROUP)  # halves per position and group
            halves = halves.reshape(-1, of_group // 2, count, 2)[:, 0] if keys else halves.reshape(-1, of_group)[:, :2]
        return not self.infinite or not bool(((halves & self.infinite) == self.infinite).any())


CACHE: dict[str, CacheRow] = {
    row.type.name: row
    for row in (
        CacheRow(CACHE_TYPES["f32"], 0, 1, 0x7F800000),
        CacheRow(CACHE_TYPES["f16"], 1, 2, 0x7C00),
        CacheRow(CACHE_TYPES["bf16"], 2, 2, 0x7F80),
        CacheRow(CACHE_TYPES["fp8"], 3, 4),
        CacheRow(CACHE_TYPES["q8_0"], 4, 4, 0x7C00),
        CacheRow(CACHE_TYPES["q5_1"], 5, 8, 0x7C00),
        CacheRow(CACHE_TYPES["q5_0"], 6, 8, 0x7C00),
        CacheRow(CACHE_TYPES["q4_1"], 7, 8, 0x7C00),
        CacheRow(CACHE_TYPES["q4_0"], 8, 8, 0x7C00),
    )
}


def stored_once(layer: CacheLayer, cache: CacheTypes) -> bool:
    """Whether the values are read from the keys, because they equal the first dimensions of the keys.

    This requires one cache type for both, without rotation, which depends on the head dimension, and keys stored row by
    row.
    """
    row, same = CACHE[cache.values], cache.keys == cache.values and not CACHE[cache.keys].type.rotated
    return layer.gathered and layer.prefix and same and row.size(layer.value_dim) == layer.value_dim


def part_bytes(layer: Store, cache: CacheTypes) -> tuple[int, int]:
    """Return the bytes of keys and of values in one cache block.

    For a recurrent layer, these are its rows and its state.
    """
    if not isinstance(layer, CacheLayer):
        return 4 * BLOCK * layer.row, 4 * layer.state
    rows = rows_of_block(layer.every)
    keys, values = CACHE[cache.keys].bytes(layer.head_dim, rows), CACHE[cache.values].bytes(layer.value_dim, rows)
    return layer.kv_heads * keys, 0 if stored_once(layer, cache) else layer.kv_heads * values


def block_bytes(plan: Plan, cache: CacheTypes) -> tuple[int, ...]:
    """Return the bytes of one cache block for each layer."""
    return tuple(sum(part_bytes(layer, cache)) for layer in plan.layers)

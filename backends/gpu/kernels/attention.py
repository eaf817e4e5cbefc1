"""Declarations of the kernels of the KV cache, of attention, and of the indexer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

import numpy as np

from localllm.backends.base import BackendError, CacheTypes, Limits
from localllm.backends.cache import rotation
from localllm.backends.gpu.cachetypes import CACHE, stored_once
from localllm.backends.gpu.kernels.kernel import Factor, Flag, Kernel, Macros, Shape
from localllm.backends.gpu.kernels.rowwise import Delivered
from localllm.base.notices import Notice, Setting
from localllm.plan import BLOCK, CacheLayer, rows_of_block

K = TypeVar("K", bound=Kernel)

PARTITION = 256  # positions per work-group of attention
GROUPED = 8  # query heads per work-group
TILE_ROWS = 32  # rows per tile in prefill attention
# Largest head dimension -> (rows, keys) per work-group of prefill attention. The first is for devices with 48 KiB of
# local memory per work-group, the second for devices with only the 32 KiB that OpenCL guarantees.
TILES: dict[int, tuple[tuple[int, int], ...]] = {
    64: ((32, 64), (32, 32)), 128: ((32, 32), (32, 16)), 192: ((16, 32), (16, 16)), 256: ((16, 16), (16, 8)),
    512: ((8, 8), (8, 4)), 640: ((8, 8), (8, 4)),
}  # fmt: skip
TILE_STEP = 16  # work-items that share the dimensions of a value


def partitions(limits: Limits) -> int:
    """Return the maximum number of attention partitions of a row."""
    return -(-limits.positions // PARTITION)


def grouped(group: int) -> int:
    """Return the number of query heads per work-group, a power of two. `group` query heads share a KV head."""
    return min(1 << (group - 1).bit_length(), GROUPED)


def that_fits(kernels: Iterable[K], local_memory: int) -> K:
    """Return the first kernel that needs at most this many bytes of local memory, or the last kernel if none fits."""
    for kernel in kernels:
        if kernel.local_bytes <= local_memory:
            break
    return kernel


class CacheShape(Macros):
    """The KV cache of a layer.

    Types are `CacheRow.number`. Sizes are values per head, words per position, or bytes per head. A block has
    BLOCK_ROWS rows for its BLOCK_TOKENS positions: one per position, or one per pool of EVERY positions. HEAD and
    VALUE_HEAD are the dimensions of keys and of values, without zero padding. ROTATION is the factor of the Hadamard
    rotation.
    """

    HEAD: Shape
    KV_HEADS: Shape
    BLOCK_TOKENS: int
    BLOCK_ROWS: Shape
    EVERY: Shape
    KEY_TYPE: Shape
    KEY_SIZE: Shape
    KEY_WORDS: Shape
    KEY_BYTES: Shape
    KEY_ROTATION: Factor
    KEY_ROWS: Flag
    VALUE_HEAD: Shape
    VALUE_TYPE: Shape
    VALUE_SIZE: Shape
    VALUE_WORDS: Shape
    VALUE_BYTES: Shape
    VALUE_ROTATION: Factor

    @property
    def largest(self) -> int:
        """The larger of the key size and the value size per head."""
        return max(self.KEY_SIZE, self.VALUE_SIZE)


def cache_shape(cache: CacheTypes, layer: CacheLayer) -> CacheShape:
    head, value, keys, values = layer.head_dim, layer.value_dim, CACHE[cache.keys], CACHE[cache.values]
    rows = rows_of_block(layer.every)
    of_key = keys.bytes(head, rows)
    return CacheShape(
        HEAD=head, KV_HEADS=layer.kv_heads, BLOCK_TOKENS=BLOCK, BLOCK_ROWS=rows, EVERY=layer.every,
        KEY_TYPE=keys.number, KEY_SIZE=keys.size(head), KEY_WORDS=keys.words(head), KEY_BYTES=of_key,
        KEY_ROTATION=_rotation(head), KEY_ROWS=layer.gathered,
        VALUE_HEAD=value, VALUE_TYPE=values.number, VALUE_SIZE=values.size(value),
        VALUE_WORDS=values.words(value), VALUE_BYTES=of_key if stored_once(layer, cache) else values.bytes(value, rows),
        VALUE_ROTATION=_rotation(value),
    )  # fmt: skip


def _rotation(head_dim: int) -> float:
    """Return the factor of the Hadamard rotation, or 1 for an indexer, which has no values."""
    return float(np.float32(rotation(head_dim) ** -0.5)) if head_dim else 1.0


# -- keys, values and queries ------------------------------------------------------------------------------------------


class AppendHeads(Kernel):
    """Write keys and values to the cache. SLOTS_AT is the offset of the slots in the step buffer."""

    name, parts = "append", "blocks cache"
    MAX_ROWS: Shape
    cache: CacheShape
    ROTATED: bool = False
    SLOTS_AT: Shape

    @property
    def local_floats(self) -> int:
        return 128 + self.cache.largest


class AppendRotated(AppendHeads):
    """Write keys and values to the cache, and apply RoPE to keys and queries. With NORMED, first normalize them."""

    parts = "rotate blocks cache"
    ROTATED: bool = True
    Q_STRIDE: Shape
    N_ROT: Shape
    NEOX: bool
    AXES: bool | None = None
    NORMED: bool | None = None
    EPS: Factor | None = None


class PrepareQueries(Kernel):
    """Prepare queries for keys in block formats: rotate them if the keys are rotated, and quantize them to int8."""

    name, parts = "prepare_queries", "blocks cache"
    HEAD: Shape
    HEADS: Shape
    Q_STRIDE: Shape
    KEY_TYPE: Shape
    KEY_SIZE: Shape
    KEY_ROTATION: Factor

    @property
    def local_floats(self) -> int:
        return 128 + self.KEY_SIZE


# -- attention ---------------------------------------------------------------------------------------------------------


class AttentionShape(Macros):
    """Parameters that the kernels of an attention share.

    TABLE_STRIDE_AT is the offset of the block table's width in the step buffer.
    """

    MAX_ROWS: Shape
    PARTITION: int = PARTITION
    PARTITIONS: Shape
    cache: CacheShape
    HEADS: Shape
    Q_STRIDE: Shape
    FACTOR: Factor
    WINDOW: Shape
    CHUNKED: Flag
    CAUSAL: Flag
    HAS_SOFTCAP: Flag
    SOFTCAP: Factor
    HAS_SINKS: Flag
    HAS_SLOPES: Flag
    AFTER: Flag
    SPANS: Flag
    REACH: Shape
    TABLE_STRIDE_AT: Shape


class AttendPartition(Kernel):
    """Compute the attention of a row over one partition of its positions."""

    name, parts = "attend_partition", "blocks cache attention"
    shape: AttentionShape
    GROUPED: int

    @property
    def local_floats(self) -> int:
        return 128 + self.GROUPED * (PARTITION + self.shape.cache.largest)


class AttendCombine(Kernel):
    """Combine the partitions of a row."""

    name, parts = "attend_combine", "blocks cache attention"
    shape: AttentionShape
    delivered: Delivered

    @property
    def local_floats(self) -> int:
        return 128 + self.shape.cache.largest


class AttendTile(Kernel):
    """Compute prefill attention: TILE_ROWS rows of a sequence, OWN_ROWS of them per work-group."""

    name, parts = "attend_tile", "blocks cache attention"
    shape: AttentionShape
    TILE_ROWS: int = TILE_ROWS
    OWN_ROWS: int
    TILE_KEYS: int
    DIMENSIONS_EACH: int

    @property
    def local_floats(self) -> int:
        rows, keys, size = self.OWN_ROWS, self.TILE_KEYS, self.shape.cache.largest
        return 128 + (rows + keys) * (size + 1) + rows * (keys + 4)


def attend_tile(shape: AttentionShape, local_memory: int) -> AttendTile:
    """Return the kernel with the largest tile that fits the local memory.

    Raises BackendError if the heads are too wide.
    """
    largest = shape.cache.largest
    width = next((most for most in TILES if largest <= most), None)
    if width is None:
        problem = f"heads of {largest} values do not fit on the GPU, at most {max(TILES)} do"
        raise BackendError(Notice(problem, "; use ", Setting("backend", "cpu")))
    each = -(-width // TILE_STEP)
    tiles = [AttendTile(shape=shape, OWN_ROWS=r, TILE_KEYS=k, DIMENSIONS_EACH=each) for r, k in TILES[width]]
    return that_fits(tiles, local_memory)


# -- attention to selected positions -----------------------------------------------------------------------------------


class AttendSelected(Kernel):
    """Compute a row's attention over the selected positions, or over a sliding window and pools.

    SELECTED is the maximum number of selected positions, 0 without a selection. POOL is the number of positions per
    pool, 0 without pools. POOL_ROWS and the byte counts describe the cache blocks of the layer that holds pools. With
    ONCE, values are read from the keys.
    """

    name, parts = "attend_selected", "blocks cache attention selected"
    shape: AttentionShape
    GROUPED: int
    SELECTED: Shape
    SLICES: Shape
    POOL: Shape
    POOL_ROWS: Shape
    POOL_KEY_BYTES: Shape
    POOL_VALUE_BYTES: Shape
    ONCE: Flag

    @property
    def local_floats(self) -> int:
        cache = self.shape.cache
        return 128 + self.GROUPED * (cache.KEY_SIZE + 128 + cache.VALUE_SIZE + 3)


def attend_selected(first: AttendSelected, local_memory: int) -> AttendSelected:
    """Return the kernel with the most query heads per work-group, at most `first`'s, that fits the local memory."""
    counts = [first.GROUPED >> n for n in range(first.GROUPED.bit_length())]
    return that_fits([replace(first, GROUPED=count) for count in counts], local_memory)


# -- the indexer, which selects the positions for top-k attention ------------------------------------------------------


class IndexerShape(Macros):
    """Parameters that the two kernels of an indexer share."""

    MAX_ROWS: Shape
    cache: CacheShape
    HEADS: Shape
    Q_STRIDE: Shape
    WEIGHTED: Flag
    COUNT: Shape
    BLOCK: Shape
    LOCAL_BLOCKS: Shape
    POOLED: Flag
    POSITIONS: Shape


class IndexScores(Kernel):
    """Compute the scores of 128 positions of a row."""

    name, parts = "index_scores", "blocks cache indexer"
    shape: IndexerShape
    GROUPED: int

    @property
    def local_floats(self) -> int:
        return self.GROUPED * self.shape.cache.KEY_SIZE


class IndexerTopKRows(Kernel):
    """Select positions of a row by their scores."""

    name, parts = "select_positions", "blocks cache indexer"
    shape: IndexerShape

    @property
    def local_floats(self) -> int:
        return 3 * 128

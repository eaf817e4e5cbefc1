"""The KV cache memory on the CPU: blocks of keys and of values by layer, in the layouts of `backends.cpu.cache`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import CacheTypes, Limits
from localllm.backends.cpu import budget
from localllm.backends.cpu.cache import CACHE, FOUR
from localllm.backends.cpu.cache_layout import layout_of
from localllm.backends.cpu.cache_rows import finite_rows
from localllm.backends.cpu.memory import Arena, aligned
from localllm.backends.cpu.places import CacheOf
from localllm.backends.cpu.simd import LANES
from localllm.plan import CacheLayer, Plan

U8 = NDArray[np.uint8]


class CacheBlocks:
    """The keys and values of each layer: uint8 (blocks, bytes per block)."""

    def __init__(self, plan: Plan, limits: Limits, cache: CacheTypes) -> None:
        self._layers = plan.layers
        self._types = CACHE[cache.keys], CACHE[cache.values]
        self._layouts = [layout_of(layer, cache) if isinstance(layer, CacheLayer) else None for layer in plan.layers]
        rows, once = (any(own and getattr(own, name) for own in self._layouts) for name in ("rows", "once"))
        # the block layouts of backends.cpu.cache, or with `rows` of backends.cpu.cache_rows
        self.layout = f"cpu {cache.keys} {cache.values} {LANES}x{FOUR}{' rows' * rows}{' once' * once}"
        parts = [
            (place, limits.blocks_of(layer), size)
            for number, (layer, sizes) in enumerate(zip(plan.layers, budget.block_bytes(plan, cache), strict=True))
            for place, size in zip((CacheOf(number, "keys"), CacheOf(number, "values")), sizes, strict=True)
        ]
        arena = Arena(sum(aligned(blocks * size) for _, blocks, size in parts), "the cache")
        self.addresses: dict[CacheOf, int] = {}
        self._arrays: list[U8] = []  # for each layer the keys, then the values
        for place, blocks, size in parts:
            self.addresses[place] = at = arena.take(blocks * size)
            self._arrays.append(arena.view(at, blocks * size).reshape(blocks, size))
        sizes = [array.shape[1] for array in self._arrays]
        self.block_bytes = tuple(k + v for k, v in zip(sizes[::2], sizes[1::2], strict=True))

    def copy(self, layer: int, source: NDArray[np.int32], target: NDArray[np.int32]) -> None:
        for array in self._of(layer):
            array[target] = array[source]

    def read(self, layer: int, numbers: NDArray[np.int32]) -> U8:
        keys, values = self._of(layer)
        return np.concatenate([keys[numbers], values[numbers]], axis=1)

    def write(self, layer: int, numbers: NDArray[np.int32], content: U8) -> None:
        keys, values = self._of(layer)
        keys[numbers], values[numbers] = content[:, : keys.shape[1]], content[:, keys.shape[1] :]

    def finite(self, layer: int, content: U8) -> bool:
        own, size = self._layers[layer], self._of(layer)[0].shape[1]
        if not isinstance(own, CacheLayer):
            return bool(np.isfinite(np.ascontiguousarray(content).view(np.float32)).all())
        keys, values = self._types
        layout = self._layouts[layer]
        if layout is not None and layout.rows:
            return finite_rows(keys, content[:, :size]) and finite_rows(values, content[:, size:])
        return keys.finite_keys(content[:, :size]) and values.finite_values(content[:, size:])

    def free(self) -> None:
        self._arrays = []

    def _of(self, layer: int) -> tuple[U8, U8]:
        keys, values = self._arrays[2 * layer : 2 * layer + 2]
        return keys, values

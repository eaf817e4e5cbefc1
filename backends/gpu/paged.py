"""The KV cache in device memory: blocks of keys and blocks of values, by layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import CacheTypes
from localllm.backends.gpu.cachetypes import CACHE, block_bytes, part_bytes, stored_once
from localllm.backends.gpu.device import Device
from localllm.backends.gpu.memory import DeviceMemory
from localllm.backends.gpu.references import CacheOf
from localllm.plan import BLOCK, CacheLayer, Plan, rows_of_block

U8 = NDArray[np.uint8]
Numbers = NDArray[np.int32]  # cache block numbers


class PagedCache:
    """The keys and values of every layer, in device memory."""

    def __init__(self, device: Device, plan: Plan, cache: CacheTypes, memory: DeviceMemory) -> None:
        self._device, self._layers, self._memory = device, plan.layers, memory
        self._rows = CACHE[cache.keys], CACHE[cache.values]
        self._part_bytes = [part_bytes(layer, cache) for layer in plan.layers]
        self.block_bytes = block_bytes(plan, cache)
        once = any(isinstance(layer, CacheLayer) and stored_once(layer, cache) for layer in plan.layers)
        # Block layout as in `cachetypes`: keys of all heads, then values.
        self.layout = f"gpu {cache.keys} {cache.values} {BLOCK}{' once' * once}"

    def _parts(self, layer: int) -> Iterator[tuple[Any, slice, int]]:
        """Yield (buffer, offset in the block's content, bytes per block) for keys and for values."""
        keys, values = self._part_bytes[layer]
        yield self._memory[CacheOf(layer, "keys")], slice(0, keys), keys
        if values:
            yield self._memory[CacheOf(layer, "values")], slice(keys, keys + values), values

    def copy(self, layer: int, source: Numbers, target: Numbers) -> None:
        for buffer, _, size in self._parts(layer):
            for s, t in zip(source.tolist(), target.tolist(), strict=True):
                if s != t:
                    self._device.copy(buffer, s * size, buffer, t * size, size)

    def read(self, layer: int, numbers: Numbers) -> U8:
        found = np.empty((len(numbers), self.block_bytes[layer]), np.uint8)
        for i, number in enumerate(numbers.tolist()):
            for buffer, place, size in self._parts(layer):
                self._device.download(buffer, number * size, found[i, place])
        return found

    def write(self, layer: int, numbers: Numbers, content: U8) -> None:
        content = np.ascontiguousarray(content)
        for i, number in enumerate(numbers.tolist()):
            for buffer, place, size in self._parts(layer):
                self._device.upload(buffer, number * size, content[i, place])

    def finite(self, layer: int, content: U8) -> bool:
        own = self._layers[layer]
        if not isinstance(own, CacheLayer):
            return bool(np.isfinite(np.ascontiguousarray(content).view(np.float32)).all())
        lanes, count = (not own.gathered, False), rows_of_block(own.every)  # lanes: whether positions are innermost
        sizes = own.head_dim, own.value_dim
        parts = zip(self._parts(layer), self._rows, sizes, lanes, strict=False)  # an indexer has no values
        return all(row.finite(content[:, place], width, keys, count) for (_, place, _), row, width, keys in parts)

"""The paged cache in a device's memory: blocks of keys and of values by layer, copied, taken out and put back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from localllm.backends.base import CacheTypes, Limits
from localllm.backends.checks import check_blocks, check_content, check_copy, not_finite
from localllm.backends.gpu.cachetypes import CACHE, block_bytes, part_bytes
from localllm.backends.gpu.device import Device
from localllm.backends.gpu.program import has_own_blocks
from localllm.plan import BLOCK, Plan

PARTS = ("keys", "values")


class PagedCache:
    """The buffers `keys:N` and `values:N` of every layer."""

    def __init__(
        self, device: Device, plan: Plan, limits: Limits, cache: CacheTypes, buffers: Mapping[str | int, Any]
    ) -> None:
        self._device, self._plan, self._limits, self._buffers = device, plan, limits, buffers
        self._rows = CACHE[cache.keys], CACHE[cache.values]
        self._part_bytes = [part_bytes(layer, cache) for layer in plan.layers]
        self.block_bytes = block_bytes(plan, cache)
        self.layout = f"gpu {cache.keys} {cache.values} {BLOCK}"  # as `cachetypes` says, heads of keys, then of values

    def _parts(self, layer: int) -> Iterator[tuple[Any, slice, int]]:
        """Buffer, place in the content of a block, and bytes of a block, of the keys and of the values."""
        keys, values = self._part_bytes[layer]
        for part, place in zip(PARTS, (slice(0, keys), slice(keys, keys + values)), strict=True):
            yield self._buffers[f"{part}:{layer}"], place, place.stop - place.start

    def copy(self, source: np.ndarray, target: np.ndarray, windowed: bool) -> None:
        check_copy(source, target, self._limits.window_blocks if windowed else self._limits.blocks)
        for number, layer in enumerate(self._plan.layers):
            if has_own_blocks(layer, self._limits) == windowed:
                for buffer, _, size in self._parts(number):
                    for s, t in zip(source.tolist(), target.tolist(), strict=True):
                        if s != t:
                            self._device.copy(buffer, s * size, buffer, t * size, size)

    def read(self, layer: int, numbers: np.ndarray) -> np.ndarray:
        check_blocks("read_blocks: numbers", numbers, self._limits.blocks_of(self._plan.layers[layer]))
        found = np.empty((len(numbers), self.block_bytes[layer]), np.uint8)
        for i, number in enumerate(numbers.tolist()):
            for buffer, place, size in self._parts(layer):
                self._device.download(buffer, number * size, found[i, place])
        return found

    def write(self, layer: int, numbers: np.ndarray, content: np.ndarray) -> None:
        check_blocks("write_blocks: numbers", numbers, self._limits.blocks_of(self._plan.layers[layer]))
        check_content(content, len(numbers), self.block_bytes[layer])
        content = np.ascontiguousarray(content)
        head = self._plan.layers[layer].head_dim
        for (_, place, _), row, keys in zip(self._parts(layer), self._rows, (True, False), strict=True):
            if not row.finite(content[:, place], head, keys):
                raise not_finite()
        for i, number in enumerate(numbers.tolist()):
            for buffer, place, size in self._parts(layer):
                self._device.upload(buffer, number * size, content[i, place])

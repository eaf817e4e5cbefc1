"""The paged cache in a device's memory: blocks of keys and of values by layer, copied, taken out and put back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from backends.base import Limits
from backends.checks import check_blocks, check_content, check_copy, not_finite
from backends.gpu.device import Device
from backends.gpu.program import block_bytes, has_own_blocks
from backends.plan import BLOCK, Plan

PARTS = ("keys", "values")


class PagedCache:
    """The buffers `keys:N` and `values:N` of every layer."""

    layout = f"gpu f16 {BLOCK}"  # (heads, BLOCK, head_dim) of keys, then of values

    def __init__(self, device: Device, plan: Plan, limits: Limits, buffers: Mapping[str | int, Any]) -> None:
        self._device, self._plan, self._limits, self._buffers = device, plan, limits, buffers
        self.block_bytes = block_bytes(plan)

    def copy(self, source: np.ndarray, target: np.ndarray, windowed: bool) -> None:
        check_copy(source, target, self._limits.window_blocks if windowed else self._limits.blocks)
        for number, (layer, size) in enumerate(zip(self._plan.layers, self.block_bytes, strict=True)):
            if has_own_blocks(layer, self._limits) == windowed:
                for part in PARTS:
                    buffer = self._buffers[f"{part}:{number}"]
                    for s, t in zip(source.tolist(), target.tolist(), strict=True):
                        if s != t:
                            self._device.copy(buffer, s * size // 2, buffer, t * size // 2, size // 2)

    def read(self, layer: int, numbers: np.ndarray) -> np.ndarray:
        check_blocks("read_blocks: numbers", numbers, self._limits.blocks_of(self._plan.layers[layer]))
        half = self.block_bytes[layer] // 2
        found = np.empty((len(numbers), 2, half), np.uint8)
        for i, number in enumerate(numbers.tolist()):
            for j, part in enumerate(PARTS):
                self._device.download(self._buffers[f"{part}:{layer}"], number * half, found[i, j])
        return found.reshape(len(numbers), -1)

    def write(self, layer: int, numbers: np.ndarray, content: np.ndarray) -> None:
        check_blocks("write_blocks: numbers", numbers, self._limits.blocks_of(self._plan.layers[layer]))
        check_content(content, len(numbers), self.block_bytes[layer])
        parts = np.ascontiguousarray(content).reshape(len(numbers), 2, -1)
        if ((parts.view(np.uint16) & 0x7C00) == 0x7C00).any():
            raise not_finite()
        half = self.block_bytes[layer] // 2
        for i, number in enumerate(numbers.tolist()):
            for j, part in enumerate(PARTS):
                self._device.upload(self._buffers[f"{part}:{layer}"], number * half, parts[i, j])

"""The state of one step on the reference backend. The operations read and write it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.backends import cache
from localllm.backends.base import Routing
from localllm.plan import F32, Batch, Value, Weight

F64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ReferenceState:
    """State of one step: the batch, the values so far by index, dequantized weights by name, the cache by layer."""

    batch: Batch
    values: dict[int, F32]
    weights: dict[str, F32]
    cache_keys: list[NDArray[np.uint8]]  # each layer: (slots, kv_heads, bytes per head)
    cache_values: list[NDArray[np.uint8]]
    key_type: cache.CacheType
    value_type: cache.CacheType
    stores: list[F32]  # stores of recurrent layers: (blocks, floats per block)
    windowed: frozenset[int]  # sliding-window layers with separate cache blocks
    every: list[int]  # positions per cache row, by cache layer
    routings: dict[int, Routing] = field(default_factory=dict)  # expert routings, by index of the experts' output
    crossing: list[F32] = field(default_factory=list)  # values that cross a stage boundary

    def rows(self, value: Value) -> Batch:
        """Return the batch for the rows of the value: all rows, or only rows whose logits are requested."""
        return self.batch if value.rows == "batch" else self.batch.wanted()

    def read(self, value: Value) -> F64:
        return self.values[value.index].astype(np.float64)

    def slots(self, layer: int) -> NDArray[np.int32]:
        slots = self.batch.window_slots if layer in self.windowed else self.batch.slots
        assert slots is not None
        return slots

    def tables(self, layer: int) -> NDArray[np.int32]:
        tables = self.batch.window_tables if layer in self.windowed else self.batch.tables
        assert tables is not None
        return tables

    def weight(self, weight: Weight) -> F64:
        return self.weights[weight.name].astype(np.float64)

    def write(self, out: Value, result: NDArray[Any]) -> None:
        rows = len(self.batch.tokens if out.rows == "batch" else self.batch.logit_rows)
        assert result.shape == (rows, out.width), f"{out.name}: {result.shape} instead of {(rows, out.width)}"
        self.values[out.index] = result.astype(np.float32)

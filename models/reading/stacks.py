"""Keys of two stacks of layers that run in turn."""

from __future__ import annotations

from localllm.models.config import StackConfig
from localllm.models.errors import ModelError
from localllm.models.reading.bounds import MAX_LAYERS
from localllm.models.reading.keys import Keys


def read_stacks(keys: Keys, layers: int) -> StackConfig:
    """`layers` are those of all passes, each of which has a cache of its own."""
    own, high, low = (keys.integer(f"hrm.{key}", 1, MAX_LAYERS) for key in ("layers_per_stack", "h_cycles", "l_cycles"))
    if own * high * (low + 1) != layers:
        raise ModelError(
            f"{keys.prefix}block_count: expected hrm.layers_per_stack {own} * hrm.h_cycles {high} * (hrm.l_cycles "
            f"{low} + 1) = {own * high * (low + 1)} layers of all passes, found {layers}"
        )
    return StackConfig(own, low)

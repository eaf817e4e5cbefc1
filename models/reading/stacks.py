"""Metadata keys of layers that run several times: two alternating stacks, or all layers."""

from __future__ import annotations

from localllm.models.config import LoopConfig, StackConfig
from localllm.models.errors import ModelError
from localllm.models.reading.bounds import MAX_LAYERS
from localllm.models.reading.keys import Keys


def read_stacks(keys: Keys, layers: int) -> StackConfig:
    """Read the stack config; `layers` counts all passes, and each pass has its own KV cache."""
    own, high, low = (keys.integer(f"hrm.{key}", 1, MAX_LAYERS) for key in ("layers_per_stack", "h_cycles", "l_cycles"))
    if own * high * (low + 1) != layers:
        raise ModelError(
            f"{keys.prefix}block_count: expected hrm.layers_per_stack {own} * hrm.h_cycles {high} * (hrm.l_cycles "
            f"{low} + 1) = {own * high * (low + 1)} layers of all passes, found {layers}"
        )
    return StackConfig(own, low)


def read_passes(keys: Keys, blocks: int) -> int:
    """Return how many times all layers run."""
    return keys.integer("num_loops", 1, MAX_LAYERS // blocks, default=1)


def read_loops(keys: Keys, layers: int, passes: int) -> LoopConfig | None:
    """Return the loop config, or None for a single pass; `layers` counts all passes."""
    if passes == 1:
        return None
    return LoopConfig(layers // passes, not keys.flag("skip_loop_final_norm", False))

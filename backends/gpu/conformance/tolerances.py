"""The largest error that a segment may have on a device. `running` compares errors with it."""

from __future__ import annotations

from localllm.backends.base import CacheTypes
from localllm.backends.gpu.conformance.segments import Segment
from localllm.plan import (
    Convolve,
    Experts,
    GaussianTopK,
    LinearAttention,
    Pool,
    SelectiveScan,
    Wkv,
    flattened,
)

# Limits of the error: root mean square over a row, divided by the root mean square of the exact row. A single value may
# have PEAK times this error. Sums differ in their order; int8 products have half a percent of error on rows that int8
# cannot hold exactly. Some operations subtract nearly equal values.
CLOSE, DIFFERENCES, ROUNDED, TWICE_ROUNDED = 2e-5, 1e-3, 0.1, 0.2
# Limits of the error of stored keys and values, by cache type. A value halfway between two representable ones may round
# either way.
STORED = {"f32": 2e-5, "f16": 1e-3, "bf16": 4e-3, "fp8": 1e-2}
STORED_IN_BLOCKS = 3e-2
PEAK = 16.0
NARROW = 32  # values per row; a narrower row may be a sum that cancels
SMALL = 1e-3  # minimum row magnitude in the relative error, as a share of the root mean square of all rows


def limit_of(segment: Segment, cache: CacheTypes) -> float:
    """Return the largest error that is allowed for a segment."""
    flat = flattened(segment.operations)
    if segment.rounds and any(isinstance(op, Experts) for op in flat):  # experts round input and hidden states
        return TWICE_ROUNDED
    if segment.rounds:
        return ROUNDED
    if any(isinstance(op, LinearAttention | SelectiveScan | Wkv | Pool | Convolve | GaussianTopK) for op in flat):
        return DIFFERENCES
    return max(STORED.get(name, STORED_IN_BLOCKS) for name in (cache.keys, cache.values)) if segment.stored else CLOSE

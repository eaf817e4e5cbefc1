"""Chooses KV cache types: the requested types unless known to be harmful, and the types for `auto`.

Measured by `benchmarks/cache_quality.py` (`benchmarks/results/cache_quality.jsonl`): q4_0 increases perplexity by
0.5 % with head size 64, by 62 % with head size 8. Attention sinks made no difference in the tested model, which has
random weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from localllm.backends.base import CacheTypes, Limits
from localllm.backends.cache import CACHE_TYPES, QUERY_BLOCK
from localllm.base.errors import LocalLLMError
from localllm.base.notices import Notice, Setting
from localllm.plan import BLOCK, CacheLayer, Plan, Store, rows_of_block

AUTO = "auto"
SMALL = "q8_0"  # measured KL divergence from f16: at most 0.0005 for head sizes 16 and 64, 0.0018 for head size 8
WORTH = 0.1  # minimum ratio of cache size to weight size for which a smaller type is worthwhile


@dataclass(frozen=True, slots=True)
class CacheChoice:
    """The cache types, and a note that explains the choice of `auto`; "" if the user gave both types."""

    types: CacheTypes
    note: str


def cache_bytes(plan: Plan, limits: Limits, types: CacheTypes) -> int:
    """Return the KV cache size in bytes without the backend's padding."""
    return sum(layer_bytes(layer, limits, types) for layer in plan.layers)


def layer_bytes(layer: Store, limits: Limits, types: CacheTypes) -> int:
    """Return the size of a cache layer in bytes. Sliding-window layers store little more than their window."""
    keys, values = CACHE_TYPES[types.keys], CACHE_TYPES[types.values]
    if not isinstance(layer, CacheLayer):
        return limits.blocks_of(layer) * 4 * (BLOCK * layer.row + layer.state)
    heads = keys.head_bytes(layer.head_dim) + values.head_bytes(layer.value_dim)
    return limits.blocks_of(layer) * rows_of_block(layer.every) * layer.kv_heads * heads


def harm(name: str, plan: Plan) -> str:
    """Return why this cache type is harmful for the model, or "". The module docstring gives the measurements."""
    type_ = CACHE_TYPES.get(name)
    if type_ is None or not type_.blocks:
        return ""
    widths = [width for layer in plan.attention_layers for width in (layer.head_dim, layer.value_dim) if width]
    least = min(widths, default=QUERY_BLOCK)  # an indexer caches only keys
    if type_.head_bytes(least) >= CACHE_TYPES["f16"].head_bytes(least):
        return f"heads of {least} values do not fill its blocks of {QUERY_BLOCK}: it would take more memory than f16"
    if type_.rotated and least < QUERY_BLOCK:
        return f"heads of {least} values are too short for the rotation that spreads the error of {type_.format.name}"
    return ""


def choose_types(asked: CacheTypes, plan: Plan, limits: Limits, weight_bytes: int, any_type: bool) -> CacheChoice:
    """Return the types to bind; raise LocalLLMError for a type known to be harmful, unless `any_type` is given."""
    for setting in asked.settings:
        reason = harm(setting.value, plan)
        if reason and not any_type:
            advice = ("; use f16 or q8_0, or ", Setting("force"), " it")
            raise LocalLLMError(Notice(setting, f": {reason}", *advice))
    if AUTO not in (asked.keys, asked.values):
        return CacheChoice(asked, "")
    share = cache_bytes(plan, limits, CacheTypes()) / max(weight_bytes, 1)
    reason = harm(SMALL, plan)
    best = SMALL if share >= WORTH and not reason else "f16"
    types = CacheTypes(*(best if name == AUTO else name for name in (asked.keys, asked.values)))
    why = reason or f"f16 would take {share:.0%} of the weights' size; from {WORTH:.0%}, a smaller type is worth it"
    return CacheChoice(types, f"cache: keys {types.keys}, values {types.values} ({why})")

"""Which formats the cache of a model gets: what was asked for, unless it is known to harm, and what `auto` stands for.

What `benchmarks/cache_quality.py` found (`benchmarks/results/cache_quality.jsonl`): q4_0 costs 1 to 2 % of perplexity
with heads of 64, 62 % with heads of 8; attention sinks, on the random model that has them, changed nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from localllm.backends.base import CacheTypes, Limits
from localllm.backends.cache import CACHE_TYPES, QUERY_BLOCK
from localllm.errors import LocalLLMError
from localllm.plan import BLOCK, Plan

AUTO = "auto"
SMALL = "q8_0"  # measured: KL divergence from f16 of 0.0003 and less with heads of 16 and 64, 0.0018 with heads of 8
WORTH = 0.1  # share of the weights from which on a cache is worth making smaller


@dataclass(frozen=True, slots=True)
class Choice:
    """The types, and one line that says how `auto` came to them; "" where all was asked for."""

    types: CacheTypes
    note: str


def cache_bytes(plan: Plan, limits: Limits, types: CacheTypes) -> int:
    """Bytes of the cache before a backend's padding; layers with a window keep little more than it."""
    pair = CACHE_TYPES[types.keys], CACHE_TYPES[types.values]
    return sum(
        layer.kv_heads * sum(t.head_bytes(layer.head_dim) for t in pair) * limits.blocks_of(layer) * BLOCK
        for layer in plan.layers
    )


def harm(name: str, plan: Plan) -> str:
    """Why a type must not be used with a model, or "": measured, see the module."""
    type_ = CACHE_TYPES.get(name)
    if type_ is None or not type_.blocks:
        return ""
    least = min((layer.head_dim for layer in plan.layers), default=QUERY_BLOCK)
    if type_.head_bytes(least) >= CACHE_TYPES["f16"].head_bytes(least):
        return f"heads of {least} values do not fill its blocks of {QUERY_BLOCK}: it would take more bytes than f16"
    if type_.rotated and least < QUERY_BLOCK:
        return f"heads of {least} values are too few to spread the error of {type_.format.name} over"
    return ""


def choose(asked: CacheTypes, plan: Plan, limits: Limits, weight_bytes: int, force: bool) -> Choice:
    """What to bind. LocalLLMError where a type that was asked for is known to harm and `force` is not given."""
    for option, name in (("-ctk", asked.keys), ("-ctv", asked.values)):
        reason = harm(name, plan)
        if reason and not force:
            raise LocalLLMError(f"{option} {name}: {reason}; take f16 or q8_0, or --force it")
    if AUTO not in (asked.keys, asked.values):
        return Choice(asked, "")
    share = cache_bytes(plan, limits, CacheTypes()) / max(weight_bytes, 1)
    reason = harm(SMALL, plan)
    best = SMALL if share >= WORTH and not reason else "f16"
    types = CacheTypes(*(best if name == AUTO else name for name in (asked.keys, asked.values)))
    why = (
        reason or f"in f16 it takes {share:.0%} of what the weights do, from {WORTH:.0%} on a smaller type is worth it"
    )
    return Choice(types, f"cache: keys {types.keys}, values {types.values} ({why})")

"""Metadata keys of indexers, which select the positions for sparse attention."""

from __future__ import annotations

from dataclasses import replace

from localllm.models.config import IndexerConfig
from localllm.models.errors import ModelError
from localllm.models.properties import Indexer, Properties
from localllm.models.reading.bounds import MAX_CONTEXT, MAX_HEAD_DIM, MAX_HEADS, REASON
from localllm.models.reading.keys import Keys

# context length of GLM 5.2, whose first GGUFs do not mark the layers with an indexer; GLM 5's is shorter
_LONG = 1 << 20
_EVERY = 4  # in GLM 5.2, every 4th layer after the first two has an indexer


def read_indexer(
    keys: Keys, row: Properties, windows: tuple[int, ...], context_length: int, attends: tuple[bool, ...], head: int
) -> IndexerConfig | None:
    """Read the keys of an indexer; the last `head` layers are multi-token-prediction heads."""
    if row.indexer is None or row.indexer.layers == "own":
        return None
    own = (True,) * len(windows)
    if row.indexer.layers == "types":
        own = _types(keys, attends, context_length, head)
    elif row.indexer.layers == "full":
        own = tuple([not window for window in windows])
    return read_chooser(keys, row.indexer, own, shares=row.indexer.layers == "types")


def read_chooser(keys: Keys, row: Indexer, own: tuple[bool, ...], shares: bool = False) -> IndexerConfig:
    """Read the sizes of an indexer. `own` marks the layers that have one; with `shares`, later layers use it too."""
    key = "attention.indexer."
    last = [max((n for n in range(layer + 1) if own[n]), default=-1) for layer in range(len(own))]
    return IndexerConfig(
        heads=keys.integer(key + "head_count", 1, MAX_HEADS, reason=REASON),
        head_dim=keys.integer(key + "key_length", 2, MAX_HEAD_DIM, reason=REASON),
        count=keys.integer(key + "top_k", 1, MAX_CONTEXT),
        eps=_eps(keys, row.eps),
        chooses=tuple([choice if shares or choice == layer else -1 for layer, choice in enumerate(last)]),
    )


def with_pools(keys: Keys, own: IndexerConfig, key: str, pool: int) -> IndexerConfig:
    """Return an indexer that selects pools of `pool` positions, the value of `key`, instead of single positions."""
    if own.count % pool:
        raise ModelError(f"{keys.prefix}{key}: expected a divisor of attention.indexer.top_k {own.count}, found {pool}")
    return replace(own, count=own.count // pool, block=pool)


def _eps(keys: Keys, eps: float | str) -> float:
    if not isinstance(eps, str):
        return eps
    return keys.real("attention.layer_norm_rms_epsilon" if eps == "rms" else "attention.layer_norm_epsilon", 0.0, 1.0)


def _types(keys: Keys, attends: tuple[bool, ...], context_length: int, head: int) -> tuple[bool, ...]:
    """Return whether each layer has an indexer. Multi-token-prediction heads, which the key omits, always have one."""
    key, layers = "attention.indexer.types", len(attends)
    if keys.metadata.get(keys.prefix + key) is not None:
        own = keys.flags(key, layers - head, True) + (True,) * head
    else:
        first = 2  # number of leading layers that always have an indexer
        own = tuple([context_length < _LONG or n < first or (n - first) % _EVERY == 0 for n in range(layers)])
    first = attends.index(True) if any(attends) else 0
    if not own[first]:
        raise ModelError(f"{keys.prefix}{key}: expected 1 for layer {first}, which none comes before, found 0")
    return tuple([chooses and sees for chooses, sees in zip(own, attends, strict=True)])

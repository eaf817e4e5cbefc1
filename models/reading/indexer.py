"""Metadata keys of indexers, which select the positions for sparse attention."""

from __future__ import annotations

from localllm.models.architecture import Architecture
from localllm.models.config import IndexerConfig
from localllm.models.errors import ModelError
from localllm.models.reading.bounds import MAX_CONTEXT, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, REASON
from localllm.models.reading.compression import OVERLAPPING
from localllm.models.reading.keys import Keys
from localllm.plan import BLOCK

RATIOS = "attention.compress_ratios"
# context length of GLM 5.2, whose first GGUFs do not mark the layers with an indexer; GLM 5's is shorter
_LONG = 1 << 20
_EVERY = 4  # in GLM 5.2, every 4th layer after the first two has an indexer


def read_indexer(
    keys: Keys,
    row: Architecture,
    windows: tuple[int, ...],
    kv_heads: tuple[int, ...],
    context_length: int,
    attends: tuple[bool, ...],
    head: int = 0,
) -> IndexerConfig | None:
    """Read the keys of an indexer; the last `head` layers are multi-token-prediction heads."""
    if row.indexer is None:
        return None
    if row.indexer.optional and not keys.integer("attention.indexer.top_k", 0, MAX_CONTEXT, default=0):
        return None
    blocks, layers = row.indexer.layers == "routed", range(len(windows))
    key = "attention.indexer."
    if row.indexer.layers == "types":
        own = _types(keys, attends, context_length, head)
    elif row.indexer.layers == "ratios":
        own = tuple([sees and ratio > 0 for sees, ratio in zip(attends, _ratios(keys, len(attends)), strict=True)])
        if not any(own):
            return None
    elif row.indexer.layers == "full":
        own = tuple([not window for window in windows])
    elif blocks:
        lead = keys.integer("leading_dense_block_count", 0, MAX_LAYERS, default=0)
        own = tuple([layer >= lead for layer in layers])
    else:
        own = (True,) * len(windows)
    pool = OVERLAPPING if row.indexer.compressed else _pool(keys, row, attends) if row.indexer.pooled else 1
    shares = row.indexer.layers == "types"
    chooses = [max((n for n in range(layer + 1) if own[n]), default=-1) for layer in layers]
    heads = keys.integer(key + "head_count", 1, MAX_HEADS, reason=REASON)
    if blocks and {heads} != {few for few, own_one in zip(kv_heads, own, strict=True) if own_one} | {heads}:
        raise ModelError(
            f"{keys.prefix}{key}head_count: expected as many as key-value heads in every layer with experts, "
            f"{max(kv_heads)}, found {heads}"
        )
    return IndexerConfig(
        heads=heads,
        head_dim=keys.integer(key + "key_length", 2, MAX_HEAD_DIM, reason=REASON),
        count=keys.integer(key + "top_k", 1, MAX_CONTEXT) // (1 if row.indexer.compressed else pool),
        block=keys.integer(key + "block_size", 1, MAX_CONTEXT) if blocks else pool,
        eps=_eps(keys, row.indexer.eps),
        local=keys.integer(key + "local_blocks", 0, MAX_CONTEXT) if blocks else 0,
        chooses=tuple([choice if shares or choice == layer else -1 for layer, choice in enumerate(chooses)]),
    )


def _ratios(keys: Keys, layers: int) -> tuple[int, ...]:
    """Return the positions per pool, per layer; 0 for a layer with dense attention."""
    return keys.per_layer(RATIOS, layers, 0, BLOCK)


def _pool(keys: Keys, row: Architecture, attends: tuple[bool, ...]) -> int:
    """Return the positions per pool, which must divide the number of selected positions."""
    key, chosen = "attention.indexer.kpool", keys.integer("attention.indexer.top_k", 1, MAX_CONTEXT)
    if row.indexer is not None and row.indexer.layers == "ratios":
        key, found = RATIOS, {n for n, sees in zip(_ratios(keys, len(attends)), attends, strict=True) if sees and n}
        if len(found) > 1:
            raise ModelError(f"{keys.prefix}{key}: expected one size of pools for all layers, found {sorted(found)}")
        if chosen % (pool := found.pop()):
            raise ModelError(
                f"{keys.prefix}{key}: expected a divisor of attention.indexer.top_k {chosen}, found {pool}"
            )
        return pool
    pool = keys.integer(key, 2, BLOCK)
    if chosen % pool:
        raise ModelError(f"{keys.prefix}{key}: expected a divisor of attention.indexer.top_k {chosen}, found {pool}")
    if not keys.flag(key + "_select_tail", True):
        raise ModelError(f"{keys.prefix}{key}_select_tail: only true is supported, found false")
    return pool


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

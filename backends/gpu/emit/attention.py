"""Emitters of attention, and of appending to the KV cache."""

from __future__ import annotations

from dataclasses import replace

from localllm.backends.allocation import Buffer
from localllm.backends.gpu.cachetypes import CACHE, stored_once
from localllm.backends.gpu.emit.rowwise import elements
from localllm.backends.gpu.kernels import attention as kernels
from localllm.backends.gpu.kernels.kernel import FEW_ROWS, Grid, by_row
from localllm.backends.gpu.lowering import Delivery, Lowering
from localllm.backends.gpu.references import CacheOf, Fixed, Reference, RopeTableOf
from localllm.backends.gpu.steps import TILES
from localllm.plan import BLOCK, Append, Attention, HeadsAppend, IndexerTopK, Rows


def append(low: Lowering, op: Append) -> None:
    layer, k = low.plan.attention_layer(op.layer), low.floats(op.k)
    keys_alone = op.v is None or stored_once(layer, low.cache)
    v, values = (k, Fixed.NOTHING) if op.v is None or keys_alone else (low.floats(op.v), CacheOf(op.layer, "values"))
    kernel = kernels.AppendHeads(
        MAX_ROWS=low.limits.rows, cache=kernels.cache_shape(low.cache, layer), SLOTS_AT=low.tables(op.layer).slots_at
    )
    groups = layer.kv_heads if keys_alone else 2 * layer.kv_heads
    launch = kernel.launch(by_row(groups, "batch"), k=k, v=v, keys=CacheOf(op.layer, "keys"), values=values)
    low.dispatch("append", "batch", [launch])


def heads_append(low: Lowering, op: HeadsAppend) -> None:
    """Append keys and values. The same kernel normalizes queries and keys, and applies RoPE."""
    query, key, number = op.query, op.key, op.append.layer
    assert op.append.v is not None, "attention reads values"
    layer, v = low.plan.attention_layer(number), low.floats(op.append.v)
    assert not stored_once(layer, low.cache), "keys that are also values are not rotated when stored"
    q, k, rope = low.floats(query.x), low.floats(key.x), key.rotation.rope
    low.program.ropes |= {query.rotation.rope, rope}
    weights = [low.vector(heads.norm.weight if heads.norm else None) for heads in (key, query)]
    kernel = kernels.AppendRotated(
        MAX_ROWS=low.limits.rows, cache=kernels.cache_shape(low.cache, layer), SLOTS_AT=low.tables(number).slots_at,
        Q_STRIDE=q.stride, N_ROT=rope.n_rot, NEOX=rope.style == "neox",
        AXES=bool(rope.axes) or None, NORMED=None if key.norm is None else True,
        EPS=None if key.norm is None else float(key.norm.eps),
    )  # fmt: skip
    launch = kernel.launch(
        by_row(2 * layer.kv_heads + query.x.width // layer.head_dim, "batch"), k=k, v=v,
        keys=CacheOf(number, "keys"), values=CacheOf(number, "values"), q=q, key_table=RopeTableOf(rope),
        query_table=RopeTableOf(query.rotation.rope), key_weight=weights[0], query_weight=weights[1],
        queries=low.make(query.rotation.out),
    )  # fmt: skip
    low.dispatch("append", "batch", [launch])


def indexer_top_k(low: Lowering, op: IndexerTopK) -> None:
    q, layer, rows = low.floats(op.q), low.plan.attention_layer(op.layer), op.q.rows
    positions = -(-low.limits.positions // BLOCK) * BLOCK
    shape = kernels.IndexerShape(
        MAX_ROWS=low.rows[rows], cache=kernels.cache_shape(low.cache, layer),
        HEADS=op.heads, Q_STRIDE=q.stride, WEIGHTED=op.weights is not None, COUNT=op.count, BLOCK=op.block,
        LOCAL_BLOCKS=op.local, POOLED=op.pooled, POSITIONS=positions,
    )  # fmt: skip
    room = low.rows[rows] * op.groups * 2 * positions * 4
    low.program.scratch[Fixed.SCORES] = max(low.program.scratch.get(Fixed.SCORES, 0), room)
    step, y = low.step(rows), low.make(op.out)
    queries = _prepared(low, q, rows, op.heads, shape.cache)
    scored = kernels.PARTITION // 128  # work-groups per partition
    launches = [
        kernels.IndexScores(shape=shape, GROUPED=kernels.grouped(op.heads)).launch(
            (("partitions", 1, scored), (rows, 1, 1), 1), q=queries, weights=low.optional(op.weights), step=step,
            tables=Fixed.TABLES, keys=CacheOf(op.layer, "keys"), scores=Fixed.SCORES,
        ),
        kernels.IndexerTopKRows(shape=shape).launch(by_row(op.groups, rows), step=step, scores=Fixed.SCORES, y=y),
    ]  # fmt: skip
    low.dispatch("indexer", rows, launches)


def _prepared(low: Lowering, q: Buffer, rows: Rows, heads: int, cache: kernels.CacheShape) -> Buffer:
    """Return queries quantized for keys in block formats, in a buffer already marked free.

    Otherwise return q itself.
    """
    if not CACHE[low.cache.keys].type.blocks:
        return q
    queries = low.take(rows, heads * cache.KEY_SIZE * 5 // 16)  # int8 values, and two floats per 32 values
    prepare = kernels.PrepareQueries(
        HEAD=cache.HEAD, HEADS=heads, Q_STRIDE=q.stride, KEY_TYPE=cache.KEY_TYPE, KEY_SIZE=cache.KEY_SIZE,
        KEY_ROTATION=cache.KEY_ROTATION,
    )  # fmt: skip
    low.dispatch("queries", rows, [prepare.launch(by_row(heads, rows), q=q, y=queries)])
    low.give(queries)
    return queries


def attention(low: Lowering, op: Attention) -> None:
    q, layer, rows = low.floats(op.q), low.plan.attention_layer(op.layer), op.q.rows
    step = low.step(rows)
    tables, group = low.tables(op.layer), op.heads // layer.kv_heads
    grouped = kernels.grouped(group)
    to = low.deliver(op.out) if layer.value_dim % 32 == 0 else Delivery(low.make(op.out))
    tiled = to.floats or low.take(rows, op.out.width)  # tile kernels write only floats
    window = op.window if op.causal or not op.window else op.window // 2 + 1
    shape = kernels.AttentionShape(
        MAX_ROWS=low.rows[rows], PARTITIONS=kernels.partitions(low.limits),
        cache=kernels.cache_shape(low.cache, layer), HEADS=op.heads, Q_STRIDE=q.stride, FACTOR=float(op.scale),
        WINDOW=window, CHUNKED=op.chunked, CAUSAL=op.causal, HAS_SOFTCAP=op.softcap > 0.0, SOFTCAP=float(op.softcap),
        HAS_SINKS=op.sinks is not None, HAS_SLOPES=op.slopes is not None, AFTER=op.after,
        SPANS=op.spans, REACH=op.reach,
        TABLE_STRIDE_AT=tables.stride_at,
    )  # fmt: skip
    partial = FEW_ROWS * op.heads * shape.PARTITIONS * (layer.value_dim + 2) * 4
    low.program.scratch[Fixed.PARTIAL] = max(low.program.scratch.get(Fixed.PARTIAL, 0), partial)
    keys, once = CacheOf(op.layer, "keys"), stored_once(layer, low.cache)
    values = keys if once else CacheOf(op.layer, "values")
    sinks, slopes = low.vector(op.sinks), low.vector(op.distances or op.slopes)
    queries = _prepared(low, q, rows, op.heads, shape.cache)
    cached: dict[str, Reference] = {"q": queries, "step": step, "keys": keys, "values": values}
    cached["tables"] = tables.reference
    tile = kernels.attend_tile(shape, low.local_memory)  # raises an error if heads are too wide
    blocks = [elements(rows, "a", tiled, tiled, op.out.width, replace(to, floats=None))] if to.blocks else []
    if layer.gathered:
        far = op.layer if op.pools is None else op.pools
        pools = kernels.cache_shape(low.cache, low.plan.attention_layer(far))
        room = 0 if op.selection is None else op.selection.width // op.slices - 1
        selected = kernels.AttendSelected(
            shape=shape, GROUPED=grouped, SELECTED=room, SLICES=op.slices, POOL=0 if op.pools is None else pools.EVERY,
            POOL_ROWS=pools.BLOCK_ROWS, POOL_KEY_BYTES=pools.KEY_BYTES, POOL_VALUE_BYTES=pools.VALUE_BYTES,
            ONCE=once,
        )  # fmt: skip
        selected = kernels.attend_selected(selected, low.local_memory)
        grid = by_row(layer.kv_heads * -(-group // selected.GROUPED), rows)
        launch = selected.launch(
            grid, **cached, pool_tables=Fixed.TABLES, pool_keys=CacheOf(far, "keys"),
            pool_values=CacheOf(far, "keys" if once else "values"), sinks=sinks, selection=low.optional(op.selection),
            y=tiled,
        )  # fmt: skip
        low.dispatch("attention", rows, [launch, *blocks])
    else:
        of_row: Grid = layer.kv_heads * -(-group // grouped), ("partitions", 1, 1), (rows, 1, 1)
        partition = kernels.AttendPartition(shape=shape, GROUPED=grouped)
        combine = kernels.AttendCombine(shape=shape, delivered=to.delivered)
        few = [
            partition.launch(of_row, **cached, slopes=slopes, partial=Fixed.PARTIAL),
            combine.launch(
                by_row(op.heads, rows), partial=Fixed.PARTIAL, step=step, sinks=sinks, y=to.y, blocks=to.y_blocks
            ),
        ]
        of_tile: Grid = op.heads, (TILES[rows], 1, kernels.TILE_ROWS // tile.OWN_ROWS), 1
        many = tile.launch(of_tile, **cached, sinks=sinks, slopes=slopes, y=tiled)
        low.dispatch("attention", rows, few, [many, *blocks])
    if to.floats is None:
        low.give(tiled)

"""Attention, and the keys and values that it reads."""

from __future__ import annotations

from dataclasses import replace

from localllm.backends.gpu.cachetypes import CACHE
from localllm.backends.gpu.emit.rowwise import elements
from localllm.backends.gpu.kernels import attention as kernels
from localllm.backends.gpu.kernels.kernel import FEW_ROWS, Grid
from localllm.backends.gpu.lowering import Delivery, Lowering
from localllm.backends.gpu.references import CacheOf, Fixed, RopeTableOf
from localllm.backends.gpu.steps import TILES
from localllm.plan import Append, Attention, CacheLayer, HeadsAppend


def append(low: Lowering, op: Append) -> None:
    layer, k, v = low.plan.attention_layer(op.layer), low.floats(op.k), low.floats(op.v)
    kernel = kernels.AppendHeads(
        MAX_ROWS=low.limits.rows, cache=kernels.cache_shape(low.cache, layer), SLOTS_AT=_slots_at(low, layer),
    )  # fmt: skip
    buffers = kernels.AppendHeadsBuffers(k=k, v=v, keys=CacheOf(op.layer, "keys"), values=CacheOf(op.layer, "values"))
    low.dispatch("append", "batch", [kernel.launch((2 * layer.kv_heads, ("batch", 1, 1), 1), buffers)])


def heads_append(low: Lowering, op: HeadsAppend) -> None:
    """Append keys and values; norm and rotate queries and keys in the same kernel."""
    query, key, number = op.query, op.key, op.append.layer
    layer, v = low.plan.attention_layer(number), low.floats(op.append.v)
    q, k, rope = low.floats(query.x), low.floats(key.x), key.rotation.rope
    low.program.ropes |= {query.rotation.rope, rope}
    weights = [low.vector(heads.norm.weight if heads.norm else None) for heads in (key, query)]
    kernel = kernels.AppendRotated(
        MAX_ROWS=low.limits.rows, cache=kernels.cache_shape(low.cache, layer), SLOTS_AT=_slots_at(low, layer),
        Q_STRIDE=q.stride, N_ROT=rope.n_rot, NEOX=rope.style == "neox",
        NORMED=None if key.norm is None else True, EPS=None if key.norm is None else float(key.norm.eps),
    )  # fmt: skip
    buffers = kernels.AppendRotatedBuffers(
        k=k, v=v, keys=CacheOf(number, "keys"), values=CacheOf(number, "values"), q=q, key_table=RopeTableOf(rope),
        query_table=RopeTableOf(query.rotation.rope), key_weight=weights[0], query_weight=weights[1],
        queries=low.make(query.rotation.out),
    )  # fmt: skip
    groups = 2 * layer.kv_heads + query.x.width // layer.head_dim
    low.dispatch("append", "batch", [kernel.launch((groups, ("batch", 1, 1), 1), buffers)])


def _slots_at(low: Lowering, layer: CacheLayer) -> int:
    return 6 if low.limits.own_blocks(layer) else 2


def attention(low: Lowering, op: Attention) -> None:
    q, layer, rows = low.floats(op.q), low.plan.attention_layer(op.layer), op.q.rows
    step = low.step(rows)
    own_blocks, group = low.limits.own_blocks(layer), op.heads // layer.kv_heads
    to = low.deliver(op.out) if layer.value_dim % 32 == 0 else Delivery(low.make(op.out))
    tiled = to.floats or low.take(rows, op.out.width)  # tiles make floats only
    window = op.window if op.causal or not op.window else op.window // 2 + 1
    shape = kernels.AttentionShape(
        MAX_ROWS=low.rows[rows], PARTITIONS=kernels.partitions(low.limits), GROUPED=kernels.grouped(group),
        cache=kernels.cache_shape(low.cache, layer), HEADS=op.heads, Q_STRIDE=q.stride, FACTOR=float(op.scale),
        WINDOW=window, CHUNKED=op.chunked, CAUSAL=op.causal, HAS_SOFTCAP=op.softcap > 0.0, SOFTCAP=float(op.softcap),
        HAS_SINKS=op.sinks is not None, HAS_SLOPES=op.slopes is not None, AFTER=op.after, REACH=op.reach,
        TABLE_STRIDE_AT=3 if own_blocks else 2,
    )  # fmt: skip
    partial = FEW_ROWS * op.heads * shape.PARTITIONS * (layer.value_dim + 2) * 4
    low.program.scratch[Fixed.PARTIAL] = max(low.program.scratch.get(Fixed.PARTIAL, 0), partial)
    keys, values = CacheOf(op.layer, "keys"), CacheOf(op.layer, "values")
    sinks, slopes = low.vector(op.sinks), low.vector(op.distances or op.slopes)
    tables = Fixed.WINDOW_TABLES if own_blocks else Fixed.TABLES
    queries = q
    if CACHE[low.cache.keys].type.blocks:
        queries = low.take(rows, op.heads * shape.cache.KEY_SIZE * 5 // 16)  # bytes, two numbers per 32
        prepare = kernels.PrepareQueries(
            HEAD=shape.cache.HEAD, HEADS=op.heads, Q_STRIDE=q.stride, KEY_TYPE=shape.cache.KEY_TYPE,
            KEY_SIZE=shape.cache.KEY_SIZE, KEY_ROTATION=shape.cache.KEY_ROTATION,
        )  # fmt: skip
        launch = prepare.launch((op.heads, (rows, 1, 1), 1), kernels.PrepareQueriesBuffers(q=q, y=queries))
        low.dispatch("queries", rows, [launch])
        low.give(queries)
    of_row: Grid = layer.kv_heads * -(-group // shape.GROUPED), ("partitions", 1, 1), (rows, 1, 1)
    few = [
        kernels.AttendPartition(shape=shape).launch(
            of_row,
            kernels.AttendPartitionBuffers(
                q=queries, step=step, tables=tables, keys=keys, values=values, slopes=slopes
            ),
        ),
        kernels.AttendCombine(shape=shape, delivered=to.delivered).launch(
            (op.heads, (rows, 1, 1), 1),
            kernels.AttendCombineBuffers(step=step, sinks=sinks, y=to.y, blocks=to.y_blocks),
        ),
    ]
    tile = kernels.attend_tile(shape)
    buffers = kernels.AttendTileBuffers(
        q=queries, step=step, tables=tables, keys=keys, values=values, sinks=sinks, slopes=slopes, y=tiled
    )
    many = [tile.launch((op.heads, (TILES[rows], 1, kernels.TILE_ROWS // tile.OWN_ROWS), 1), buffers)]
    if to.blocks is not None:
        many.append(elements(rows, "a", tiled, tiled, op.out.width, replace(to, floats=None)))
    low.dispatch("attention", rows, few, many)
    if to.floats is None:
        low.give(tiled)

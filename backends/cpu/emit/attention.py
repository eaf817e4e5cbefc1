"""Emitter of attention: divides a step into tasks, and merges the partial results of split tasks."""

from __future__ import annotations

from localllm.backends.cpu.arguments import RowsOrNone
from localllm.backends.cpu.kernels import attention as kernels
from localllm.backends.cpu.kernels import indexer
from localllm.backends.cpu.lowering import Lowering, index_shape_of, shape_of, vector_of
from localllm.backends.cpu.places import (
    COUNTER,
    PARTIALS,
    BufferOf,
    CacheOf,
    EdgedOf,
    ScoresOf,
    StepOf,
    WorkOf,
    output_to,
    rows_in,
)
from localllm.plan import Attention, IndexerTopK, Value


def attention(low: Lowering, op: Attention) -> None:
    q, y = low.floats(op.q), low.make(op.out)
    shape, rows = shape_of(low.plan, op, low.cache), op.q.rows
    step = StepOf(low.limits.own_blocks(low.plan.attention_layer(op.layer)), rows)
    window = op.window if op.causal else op.window // 2 + 1
    chosen = low.floats(op.selection) if op.selection is not None else None
    selection = (
        RowsOrNone(address=BufferOf(chosen), stride=chosen.stride) if chosen else RowsOrNone(address=0, stride=0)
    )
    far = op.layer if op.pools is None else op.pools
    work, sinks, scratch = WorkOf(shape, op.window, rows), vector_of(op.sinks), low.scratch_rows["attention"]
    arguments = kernels.AttentionArguments(
        step=step, q=rows_in(q), y=output_to(y), k_cache=CacheOf(op.layer, "keys"),
        v_cache=CacheOf(op.layer, "keys" if shape.once else "values"), scale=op.scale, counter=COUNTER,
        scratch=scratch, work=work,
        window=window, softcap=op.softcap, sinks=sinks, selection=selection, slopes=vector_of(op.slopes),
        partials=PARTIALS, distances=EdgedOf(op.distances, kernels.EDGE) if op.distances else 0,
        pools_step=StepOf(low.limits.own_blocks(low.plan.attention_layer(far)), rows),
        pool_keys=CacheOf(far, "keys"), pool_values=CacheOf(far, "keys" if shape.once else "values"),
    )  # fmt: skip
    merging = kernels.MergeArguments(
        step=step, y=output_to(y), counter=COUNTER, scratch=scratch, work=work, window=window, sinks=sinks,
        selection=selection, partials=PARTIALS,
    )  # fmt: skip
    low.call(kernels.attention(shape), arguments, "tasks", "attention")
    low.call(kernels.merge(shape), merging, "tasks", "attention")


def indexer_top_k(low: Lowering, op: IndexerTopK) -> None:
    q, y, layer = low.floats(op.q), low.make(op.out), low.plan.attention_layer(op.layer)
    shape = index_shape_of(low.plan, op, low.cache)
    arguments = indexer.IndexerArguments(
        step=StepOf(low.limits.own_blocks(layer), op.q.rows), q=rows_in(q), weights=_rows_or_none(low, op.weights),
        k_cache=CacheOf(op.layer, "keys"), y=output_to(y), counter=COUNTER, scratch=low.scratch_rows["indexer"],
        scores=ScoresOf(indexer.shared_bytes(shape, low.limits, op.q.rows)),
        room=shape.room(low.limits.positions),
    )  # fmt: skip
    low.call(indexer.score(shape), arguments, "tasks", "indexer")
    low.call(indexer.choose_positions(shape), arguments, "tasks", "indexer")


def _rows_or_none(low: Lowering, value: Value | None) -> RowsOrNone:
    if value is None:
        return RowsOrNone(address=0, stride=0)
    buffer = low.floats(value)
    return RowsOrNone(address=BufferOf(buffer), stride=buffer.stride)

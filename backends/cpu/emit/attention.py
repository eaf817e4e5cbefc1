"""Emitter of attention: the tasks of a step, and the merge of those that are split."""

from __future__ import annotations

from localllm.backends.cpu.kernels import attention as kernels
from localllm.backends.cpu.lowering import Lowering, shape_of, vector
from localllm.backends.cpu.places import COUNTER, PARTIALS, CacheOf, EdgedOf, StepOf, WorkOf, output_to, rows_in
from localllm.plan import Attention


def attention(low: Lowering, op: Attention) -> None:
    q, y = low.floats(op.q), low.make(op.out)
    shape, rows = shape_of(low.plan, op, low.cache), op.q.rows
    step = StepOf(low.limits.own_blocks(low.plan.attention_layer(op.layer)), rows)
    window = op.window if op.causal else op.window // 2 + 1
    work, sinks, scratch = WorkOf(shape, op.window, rows), vector(op.sinks), low.scratch_rows["attention"]
    arguments = kernels.AttentionArguments(
        step=step, q=rows_in(q), y=output_to(y), k_cache=CacheOf(op.layer, "keys"),
        v_cache=CacheOf(op.layer, "values"), scale=op.scale, counter=COUNTER, scratch=scratch, work=work,
        window=window, softcap=op.softcap, sinks=sinks, slopes=vector(op.slopes), partials=PARTIALS,
        distances=EdgedOf(op.distances, kernels.EDGE) if op.distances else 0,
    )  # fmt: skip
    merging = kernels.MergeArguments(
        step=step, y=output_to(y), counter=COUNTER, scratch=scratch, work=work, window=window, sinks=sinks,
        partials=PARTIALS,
    )  # fmt: skip
    low.call(kernels.attention(shape), arguments, "tasks", "attention")
    low.call(kernels.merge(shape), merging, "tasks", "attention")

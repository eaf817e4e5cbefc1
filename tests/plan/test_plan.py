"""Summaries of a plan: the weights, the weight bytes that one token reads, and the number of uses of a value."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from localllm.plan import Plan, Receive, Recorder, Send
from tests.models.support import MemoryWeight
from tests.plan.support import MODELS, tiny_plan

TABLE = MemoryWeight.of("table", np.ones((50, 16)))
NORM = MemoryWeight.of("norm", np.ones(16))


def tied() -> Plan:
    """Build logits = (x + norm(x)) @ table.T."""
    r = Recorder()
    x = r.embed(TABLE)
    return r.finish(r.linear(r.add(x, r.rms_norm(x, NORM, 1e-5)), TABLE))


def test_weights_are_listed_once_in_order_of_use() -> None:
    assert list(tied().weights) == ["table", "norm"]
    assert list(tied().matrices) == ["table"]
    assert list(tiny_plan("llama plain").matrices)[:3] == [
        "token_embd.weight", "blk.0.attn_q.weight", "blk.0.attn_k.weight",
    ]  # fmt: skip


def test_parts_of_a_tensor_are_weights_of_their_own() -> None:
    parts = [w for w in tiny_plan("llama fused qkv").weights.values() if w.tensor == "blk.0.attn_qkv.weight"]
    assert [(w.first, w.shape[0]) for w in parts] == [(0, 32), (32, 16), (48, 16)]


def test_reads_follow_the_operations() -> None:
    """One token reads a row of the table, the norm, and the whole table as the output matrix."""
    assert [(r.weight.name, r.used, r.of) for r in tied().reads] == [("table", 1, 50), ("norm", 1, 1), ("table", 1, 1)]


def test_uses_count_readers_and_the_caller() -> None:
    x, normed, summed, logits = tied().values
    assert tied().uses == {x.index: 2, normed.index: 1, summed.index: 1, logits.index: 1}


def test_a_stage_ends_with_a_send_or_with_the_plan() -> None:
    plan = tied()
    x, normed, *_ = plan.values
    assert plan.stages == (range(4),)
    first, second = plan.operations[:2], plan.operations[2:]
    middle = replace(plan, operations=(*first, Send((x, normed)), Receive((normed,)), *second))
    assert middle.stages == (range(3), range(3, 6))
    assert middle.uses[x.index] == 3
    assert replace(plan, operations=(*first, Send((x,)))).stages == (range(3),)


def test_values_are_used_after_they_are_made() -> None:
    for name in MODELS:
        made: set[int] = set()
        for op in tiny_plan(name).operations:
            assert {value.index for value in op.inputs} <= made
            made |= {value.index for value in op.outputs}
        assert made == {value.index for value in tiny_plan(name).values}


def test_tokens_that_can_be_embedded() -> None:
    assert tied().input_vocabulary == 50
    assert replace(tied(), operations=tied().operations[1:]).input_vocabulary == 1 << 31

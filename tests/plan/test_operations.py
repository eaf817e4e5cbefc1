"""Operations declare exactly the reads and writes that the reference backend, which defines them, performs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from localllm.backends.cache import CACHE_TYPES
from localllm.backends.reference import _dequantize
from localllm.backends.reference_operations import OPERATIONS
from localllm.backends.reference_state import ReferenceState
from localllm.plan import (
    BLOCK,
    Append,
    Batch,
    CacheLayer,
    Experts,
    HeadLinear,
    Linear,
    Operation,
    Plan,
    Recorder,
    Value,
)  # fmt: skip
from tests.models.support import EVERY_OPERATION, MemoryWeight, stack
from tests.plan.support import MODELS, RECORDED, tiny_plan

ROWS = 3
PLANS = [*MODELS, *RECORDED]
EXACT = CACHE_TYPES["f32"]  # no rounding beyond float32


class Touched(dict[Any, Any]):
    """A dictionary that records which keys were read and which were written."""

    def __init__(self, *items: Any) -> None:
        super().__init__(*items)
        self.read: set[Any] = set()
        self.written: set[Any] = set()

    def __getitem__(self, key: Any) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.written.add(key)
        super().__setitem__(key, value)


def touched(plan: Plan) -> list[tuple[Operation, Touched, Touched, Touched]]:
    """Run every operation of a plan. Return each operation with the values, weights and KV cache layers that
    it accessed.
    """
    numbers = np.arange(ROWS, dtype=np.int32)
    tables, texts = np.zeros((1, 1), np.int32), [numbers.tolist()]
    batch = Batch(numbers, numbers, numbers, 0 * numbers, tables, numbers[:2], histories=texts)
    values: dict[int, Any] = {}
    weights = _dequantize(plan, lambda what, done, total: None)
    layers = list(enumerate(plan.layers))
    keys, kept = (
        {
            number: np.zeros((BLOCK, layer.kv_heads, EXACT.head_bytes(getattr(layer, width))), np.uint8)
            for number, layer in layers
            if isinstance(layer, CacheLayer)
        }
        for width in ("head_dim", "value_dim")
    )
    stores = {
        number: np.zeros((1, BLOCK * layer.row + layer.state), np.float32)
        for number, layer in layers
        if not isinstance(layer, CacheLayer)
    }
    every, found = [layer.every if isinstance(layer, CacheLayer) else 1 for layer in plan.layers], []
    for op in plan.operations:
        own = Touched(values), Touched(weights), Touched({**keys, **stores})
        state = ReferenceState(batch, own[0], own[1], own[2], kept, EXACT, EXACT, own[2], frozenset(), every)  # type: ignore[arg-type]
        OPERATIONS[type(op)](state, op)
        values = dict(own[0])
        found.append((op, *own))
    return found


@pytest.mark.parametrize("name", PLANS)
def test_an_operation_knows_what_it_touches(name: str) -> None:
    for op, values, weights, layers in touched(tiny_plan(name)):
        assert values.read == {value.index for value in op.inputs}, op
        assert values.written == {value.index for value in op.outputs}, op
        assert weights.read == {weight.name for weight in (*op.matrices, *op.vectors)}, op
        assert layers.read == set(op.state), op


def test_the_plans_hold_every_operation() -> None:
    assert {type(op) for name in PLANS for op in tiny_plan(name).operations} == EVERY_OPERATION


@pytest.mark.parametrize("name", PLANS)
def test_products_are_of_inputs_and_matrices(name: str) -> None:
    for op in tiny_plan(name).operations:
        assert {value for value, _ in op.products} <= set(op.inputs)
        for value, weight in op.products:
            assert weight in op.matrices
            assert value.width == weight.shape[-1]
        assert bool(op.products) == isinstance(op, Linear | Experts)
        assert bool(op.flops) == isinstance(op, Linear | Experts | HeadLinear)


def weight(*shape: int) -> MemoryWeight:
    return MemoryWeight.of(f"w{shape}", np.ones(shape))


def recorded() -> tuple[Recorder, Value]:
    r = Recorder()
    return r, r.embed(weight(100, 16))


def test_a_row_reads_a_row_of_the_table_and_all_of_a_matrix() -> None:
    r, x = recorded()
    embed, linear = r.finish(r.linear(x, weight(24, 16), weight(24))).operations
    assert [(read.weight.shape, read.used, read.of) for read in embed.reads] == [((100, 16), 1, 100)]
    assert [(read.weight.shape, read.share(1000)) for read in linear.reads] == [((24, 16), 1000), ((24,), 1000)]
    assert (embed.flops, linear.flops) == (0, 2 * 24 * 16)


def test_a_row_reads_the_experts_that_it_is_sent_to() -> None:
    r, x = recorded()
    up, down = (stack(weight(8, *shape), weight(8), weight(8, shape[0])) for shape in ((24, 16), (16, 24)))
    gate = stack(MemoryWeight.of("gate", np.ones((8, 24, 16))), weight(8), weight(8, 24))
    out = r.experts(x, r.linear(x, weight(8, 16)), gate, up, down, 2, "softmax", True, 1.0, "silu", weight(8))
    op = r.finish(out).operations[-1]
    assert [read.share(1000) for read in op.reads] == [250] * 9 + [1000]
    assert {read.weight for read in op.reads} == {*op.matrices, *op.vectors}
    assert op.flops == 3 * 2 * 2 * 24 * 16
    assert isinstance(op, Experts)
    assert op.stacks == (gate, up, down)
    one = replace(op, gate=up)  # squared ReLU: the matrix product is computed once
    assert one.stacks == (up, down)
    assert one.flops == 2 * 2 * 2 * 24 * 16


def test_attention_counts_more_for_every_position_it_sees() -> None:
    """Scores and weighted sums take four operations per element of the queries and position. A sliding window
    limits the number of positions.
    """
    for window, more in ((0, 4 * 64), (8, 0)):
        r = Recorder()
        x = r.embed(weight(100, 64))
        r.append(x, x, 4)
        attention = r.finish(r.attention(x, 0, 4, 1.0, window)).operations[-1]
        assert attention.flops_per_position == more
        assert attention.flops == 0
    assert {op.flops_per_position for op in r.finish(x).operations if isinstance(op, Append)} == {0}


@pytest.mark.parametrize("weighted", [True, False])
def test_pools_are_chosen_by_their_scores_alone(weighted: bool) -> None:
    """The position of a pool does not affect its selection in any model, so `indexer_top_k` refuses such a rule."""
    r, x = recorded()
    weights = r.slice(x, 0, 2) if weighted else None
    layer = r.append_index(r.slice(x, 0, 8))
    with pytest.raises(AssertionError, match="pools are selected only by scores, not 1 by their place"):
        r.indexer_top_k(x, weights, layer, 2, 3, 4, 1, pooled=True)
    r.indexer_top_k(x, weights, layer, 2, 3, 4, 0, pooled=True)
    r.indexer_top_k(x, weights, layer, 2, 3, 4, 1)

"""A fused plan gives the same bits as the original plan on the reference backend, and declares the same reads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from localllm.backends.base import Limits
from localllm.backends.reference import ReferenceBackend
from localllm.plan import (
    BLOCK,
    Add,
    Batch,
    Fused,
    Glu,
    HeadsAppend,
    Linear,
    LinearAdd,
    LinearGlu,
    LinearGroup,
    Plan,
    Recorder,
    Rope,
    Rotate,
    Value,
    flattened,
)  # fmt: skip
from localllm.plan.rewrites.fusion import fuse, fuse_additions, fuse_ends, fuse_heads, fuse_linears
from tests.models.support import MemoryWeight
from tests.plan.support import MODELS, tiny_plan

PASSES = (fuse_additions, fuse_linears, fuse_heads, fuse_ends)
ROWS = 5


def logits(plan: Plan) -> np.ndarray:
    executable = ReferenceBackend().bind(plan, Limits(ROWS, ROWS, 2, 2 * BLOCK))
    numbers = np.arange(ROWS, dtype=np.int32)
    try:
        tables, texts = np.zeros((1, 2), np.int32), [numbers.tolist()]
        return executable.step(Batch(numbers, numbers, numbers, 0 * numbers, tables, numbers, histories=texts))
    finally:
        executable.close()


@pytest.mark.parametrize("name", MODELS)
def test_a_fused_plan_has_the_same_bits(name: str) -> None:
    plan = tiny_plan(name)
    fused = fuse(plan, PASSES)
    assert any(isinstance(op, Fused) for op in fused.operations)
    assert {*flattened(fused.operations)} == {*plan.operations}
    assert np.array_equal(logits(plan).view(np.int32), logits(fused).view(np.int32))


@pytest.mark.parametrize("name", MODELS)
def test_a_fused_plan_reads_and_counts_the_same(name: str) -> None:
    plan = tiny_plan(name)
    fused = fuse(plan, PASSES)
    assert sum(op.flops for op in fused.operations) == sum(op.flops for op in plan.operations)
    assert sum(op.flops_per_position for op in fused.operations) == sum(op.flops_per_position for op in plan.operations)
    assert {read.weight.name for read in fused.reads} == {read.weight.name for read in plan.reads}
    assert len(fused.reads) == len(plan.reads)
    assert fused.weights.keys() == plan.weights.keys()
    for op in fused.operations:
        for x, weight in op.products:
            assert x in op.inputs
            assert weight in op.matrices


@pytest.mark.parametrize("name", MODELS)
def test_values_are_made_before_they_are_read_and_layers_begin_where_they_did(name: str) -> None:
    plan = tiny_plan(name)
    fused = fuse(plan, PASSES)
    made: set[int] = set()
    for op in fused.operations:
        assert {value.index for value in op.inputs} <= made
        assert not {value.index for value in op.outputs} & made
        made |= {value.index for value in op.outputs}
    assert len(fused.starts) == len(plan.starts)
    for old, new in zip(plan.starts, fused.starts, strict=True):
        # An operation that was fused into an earlier operation runs before its own layer starts.
        before = {id(op) for op in flattened(fused.operations[:new])}
        assert {id(op) for op in plan.operations[:old]} - before == set()


def matrix(rows: int, columns: int, format: str = "F32", name: str = "w") -> MemoryWeight:
    values = np.random.default_rng(rows * columns).standard_normal((rows, columns)).astype(np.float32)
    return MemoryWeight.of(f"{name}{rows}x{columns}{format}", values, format)


Built = Callable[[Recorder, Value], Value]
X = 32


def kinds(build: Built, keep: Callable[[Plan], list[Value]] = lambda plan: []) -> list[str]:
    """Return the names of the operations after the embedding, with all fusion passes applied."""
    r = Recorder()
    plan = r.finish(build(r, r.embed(matrix(8, X))))
    return [type(op).__name__ for op in fuse(plan, PASSES, keep(plan)).operations[1:]]


def outputs_of(kind: type) -> Callable[[Plan], list[Value]]:
    return lambda plan: [value for op in plan.operations if type(op) is kind for value in op.outputs]


def test_ends_of_heads_are_rotated_in_one_go_unless_a_part_is_read_again() -> None:
    rope = Rope("interleaved", 4, (1.0, 0.5))

    def cut(r: Recorder, x: Value, groups: int = 4, start: int = 4, head: int = 4) -> tuple[Value, Value]:
        ends = r.rotate(r.slice(x, start, 32 // groups, groups), head, rope)
        return r.slice(x, 0, start, groups), ends

    def once(r: Recorder, x: Value) -> Value:
        return r.concat(*cut(r, x), 4)

    def again(r: Recorder, x: Value) -> Value:
        others, ends = cut(r, x)
        return r.concat(r.concat(others, ends, 4), ends)

    def swapped(r: Recorder, x: Value) -> Value:
        return r.concat(*cut(r, x)[::-1], 4)

    def of_others(r: Recorder, x: Value) -> Value:
        return r.concat(cut(r, r.scale(x, 2.0))[0], cut(r, x)[1], 4)

    def some(r: Recorder, x: Value) -> Value:
        ends = r.rotate(r.slice(x, 4, 8, 4), 4, rope)
        return r.concat(r.slice(x, 0, 3, 4), ends, 4)

    def two_to_a_head(r: Recorder, x: Value) -> Value:
        return r.concat(*cut(r, x, 2, 8), 2)

    def in_other_slices(r: Recorder, x: Value) -> Value:
        return r.concat(*cut(r, x), 2)

    apart = ["Slice", "Rotate", "Slice", "Concat"]
    assert kinds(once) == ["RotateEnds"]
    assert kinds(once, outputs_of(Rotate)) == apart
    assert sorted(kinds(again)) == sorted([*apart, "Concat"])
    assert [sorted(kinds(build)) for build in (swapped, some, two_to_a_head, in_other_slices)] == [sorted(apart)] * 4
    assert "RotateEnds" not in kinds(of_others)


def test_an_addition_stays_where_the_product_is_read_again_or_kept() -> None:
    def once(r: Recorder, x: Value) -> Value:
        return r.add(r.linear(x, matrix(X, X)), x)

    def again(r: Recorder, x: Value) -> Value:
        y = r.linear(x, matrix(X, X))
        return r.add(r.add(y, x), y)

    def twice(r: Recorder, x: Value) -> Value:
        y = r.linear(x, matrix(X, X))
        return r.add(y, y)

    def younger(r: Recorder, x: Value) -> Value:
        y = r.linear(x, matrix(X, X))
        return r.add(y, r.scale(x, 2.0))

    assert kinds(once) == ["LinearAdd"]
    assert kinds(once, outputs_of(Linear)) == ["Linear", "Add"]
    assert kinds(once, outputs_of(Add)) == ["LinearAdd"]
    assert kinds(again) == ["Linear", "Add", "Add"]
    assert kinds(twice) == ["Linear", "Add"]
    assert kinds(younger) == ["Linear", "Scale", "Add"]


def test_linears_group_by_format_and_three_at_most() -> None:
    def many(*formats: str) -> Built:
        def build(r: Recorder, x: Value) -> Value:
            made = [r.linear(x, matrix(X + 32 * i, X, format)) for i, format in enumerate(formats)]
            return made[-1]

        return build

    assert kinds(many("F32")) == ["Linear"]
    assert kinds(many("F32", "F32")) == ["LinearGroup"]
    assert kinds(many("F32", "F32", "F32")) == ["LinearGroup"]
    assert kinds(many(*["F32"] * 4)) == ["LinearGroup", "Linear"]
    assert kinds(many(*["F32"] * 5)) == ["LinearGroup", "LinearGroup"]
    assert kinds(many("F32", "Q8_0", "F32")) == ["LinearGroup", "Linear"]
    assert kinds(many("F32", "Q8_0")) == ["Linear", "Linear"]


def test_a_glu_joins_two_products_that_it_alone_reads() -> None:
    def feed_forward(r: Recorder, x: Value) -> Value:
        return r.glu(r.linear(x, matrix(64, X)), r.linear(x, matrix(64, X, name="up")), "silu")

    def read_again(r: Recorder, x: Value) -> Value:
        gate, up = r.linear(x, matrix(64, X)), r.linear(x, matrix(64, X, name="up"))
        return r.add(r.glu(gate, up, "silu"), up)

    assert kinds(feed_forward) == ["LinearGlu"]
    assert kinds(feed_forward, outputs_of(Linear)) == ["LinearGroup", "Glu"]
    assert kinds(feed_forward, outputs_of(Glu)) == ["LinearGlu"]
    assert kinds(read_again) == ["LinearGroup", "Glu", "Add"]


@pytest.mark.parametrize("order", [0, 1])
def test_the_gate_is_found_in_either_order(order: int) -> None:
    r = Recorder()
    x = r.embed(matrix(8, X))
    both = [r.linear(x, matrix(64, X)), r.linear(x, matrix(64, X, name="up"))]
    plan = r.finish(r.glu(both[order], both[1 - order], "silu"))
    fused = fuse(plan, PASSES).operations[-1]
    assert isinstance(fused, LinearGlu)
    assert (fused.gate.out, fused.up.out) == (both[order], both[1 - order])
    assert fused.inputs == (x,)
    assert fused.outputs == (plan.logits,)


def test_heads_are_prepared_with_the_append_unless_rotated_keys_are_kept() -> None:
    plan = tiny_plan("qwen3")
    rotated = outputs_of(Rotate)(plan)
    assert sum(isinstance(op, HeadsAppend) for op in fuse(plan, PASSES).operations) == len(plan.layers)
    assert not any(isinstance(op, HeadsAppend) for op in fuse(plan, PASSES, rotated).operations)
    for op in fuse(plan, PASSES).operations:
        if isinstance(op, HeadsAppend):
            assert op.outputs == (op.query.rotation.out,)
            assert op.inputs == (op.query.x, op.key.x, op.append.v)
            assert op.state == (op.append.layer,)


def test_queries_of_a_later_layer_stay_out_of_the_append_that_they_read() -> None:
    """Only the first attention over a KV cache layer is fused with the append."""

    def shared(r: Recorder, x: Value) -> Value:
        rope = Rope("neox", 8, (1.0, 0.5, 0.25, 0.125))
        q, k, later = (r.rotate(r.scale(x, factor), 8, rope) for factor in (2.0, 3.0, 4.0))
        r.append(k, x, 4)
        first = r.attention(q, 0, 4, 1.0)
        return r.add(first, r.attention(later, 0, 4, 1.0))

    found = kinds(shared)
    assert found == ["Scale", "Scale", "Scale", "Rotate", "HeadsAppend", "Attention", "Attention", "Add"]


def test_each_pass_finds_its_operations_in_every_layer() -> None:
    plan = tiny_plan("qwen2")
    layers = len(plan.layers)
    found = [type(op) for op in fuse(plan, PASSES).operations]
    assert [found.count(kind) for kind in (LinearAdd, LinearGroup, LinearGlu, HeadsAppend)] == [
        2 * layers, layers, layers, layers
    ]  # fmt: skip
    assert fuse(plan, ()) == plan

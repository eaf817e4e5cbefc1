"""The parts of a split plan have all operations and give the same bits. Every value is received before it is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np
import pytest

from localllm.backends.base import Limits
from localllm.backends.reference import ReferenceBackend
from localllm.plan import BLOCK, Append, Attention, Batch, Experts, Plan, Receive, Send
from localllm.plan.rewrites.fusion import Pass, fuse, fuse_additions, fuse_heads, fuse_linears
from localllm.plan.rewrites.split import split
from tests.models.support import BOUNDARIES
from tests.plan.support import MODELS, tiny_plan

LIMITS = Limits(16, 16, 2, 2 * BLOCK)


def by_layer(plan: Plan, places: Sequence[Hashable]) -> list[Hashable]:
    """Return `places`, with all operations on a KV cache layer, or on layers that are read together, moved to
    one place.
    """
    found, layers = list(places), dict[int, Hashable]()
    first = {layer: op.state[0] for op in plan.operations for layer in op.state if len(op.state) > 1}
    for number, op in enumerate(plan.operations):
        for layer in op.state:
            found[number] = layers.setdefault(first.get(layer, layer), found[number])
    return found


def in_order(plan: Plan, count: int) -> list[Hashable]:
    """Assign operations to `count` consecutive places, as in a pipeline of machines."""
    size = len(plan.operations)
    return by_layer(plan, [number * count // size for number in range(size)])


def in_turn(plan: Plan, count: int, period: int) -> list[Hashable]:
    """Assign operations to `count` places in turn, `period` operations at a time."""
    return by_layer(plan, [number // period % count for number in range(len(plan.operations))])


def experts_apart(plan: Plan) -> list[Hashable]:
    return ["host" if isinstance(op, Experts) else "card" for op in plan.operations]


def splits(plan: Plan) -> list[list[Hashable]]:
    pipelines, rings = ([in_order(plan, n) for n in (1, 2, 3, 5)], [in_turn(plan, 3, n) for n in (1, 2, 7)])
    return [*pipelines, *rings, experts_apart(plan)]


@pytest.mark.parametrize("passes", [(), (fuse_additions, fuse_linears, fuse_heads)], ids=["plain", "fused"])
@pytest.mark.parametrize("name", MODELS)
def test_the_stages_in_turn_have_the_bits_of_the_whole_plan(name: str, passes: Sequence[Pass]) -> None:
    """Running the parts gives the bits of the whole plan, even if each place's plan is fused afterwards."""
    plan = tiny_plan(name)
    rows = np.arange(9, dtype=np.int32)
    blocks, text = np.array([[0, 1]], np.int32), [*range(3, 12), 0]
    batches = [
        Batch(rows + 3, rows, rows, 0 * rows, blocks, rows[[2, 8]], histories=[text]),
        Batch(rows[:1], rows[:1] + 9, rows[:1] + 9, 0 * rows[:1], blocks, rows[:1], histories=[text]),
    ]
    whole = ReferenceBackend().bind(plan, LIMITS)
    truth = [whole.step(batch) for batch in batches]
    for places in splits(plan):
        own = split(plan, places)
        bound = {place: ReferenceBackend().bind(fuse(side, passes), LIMITS) for place, side in own.plans.items()}
        for batch, expected in zip(batches, truth, strict=True):
            for executable in bound.values():
                executable.begin(batch)
            crossing: list[np.ndarray] = []
            for place in own.order:
                crossing = bound[place].run(crossing)
            np.testing.assert_array_equal(bound[own.order[-1]].result(), expected)
        for layer, (place, number) in enumerate(own.layers):
            theirs, ours = (e.read_blocks(n, np.array([0])) for e, n in ((whole, layer), (bound[place], number)))
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", MODELS)
def test_every_operation_goes_where_it_belongs_and_every_value_is_there_in_time(name: str) -> None:
    plan = tiny_plan(name)
    for places in splits(plan):
        own = split(plan, places)
        assert list(own.plans) == list(dict.fromkeys(places))
        expected = Counter((place, type(op)) for place, op in zip(places, plan.operations, strict=True))
        found = Counter(
            (place, type(op))
            for place, side in own.plans.items()
            for op in side.operations
            if type(op) not in BOUNDARIES
        )
        assert found == expected
        known: dict[Hashable, set[int]] = {place: set() for place in own.plans}
        stages = {place: iter(side.stages) for place, side in own.plans.items()}
        sent: tuple[int, ...] = ()
        for at, place in enumerate(own.order):
            side = own.plans[place]
            first, *operations = [side.operations[number] for number in next(stages[place])]
            if at:
                assert isinstance(first, Receive)
                assert tuple(value.index for value in first.values) == sent
            for op in [first, *operations]:
                assert {value.index for value in op.inputs} <= known[place]
                known[place] |= {value.index for value in op.outputs}
                if isinstance(op, Append | Attention):
                    assert op.layer < len(side.layers)
            last = [first, *operations][-1]
            assert isinstance(last, Send) == (at + 1 < len(own.order))
            sent = tuple(value.index for value in last.values) if isinstance(last, Send) else ()
        assert all(next(rest, None) is None for rest in stages.values())


def crossings(plan: Plan, places: Sequence[Hashable]) -> Counter[int]:
    """Return how often each value is sent from one place to another."""
    sides = split(plan, places).plans.values()
    return Counter(
        value.index for side in sides for op in side.operations if isinstance(op, Send) for value in op.values
    )


@pytest.mark.parametrize("name", ["llama plain", "qwen2moe", "gpt-oss"])
def test_between_two_places_a_value_crosses_once(name: str) -> None:
    plan = tiny_plan(name)
    for places in (in_order(plan, 2), experts_apart(plan), in_turn(plan, 2, 1)):
        assert set(crossings(plan, places).values()) <= {1}


def test_a_value_passes_through_the_places_between_its_maker_and_its_reader() -> None:
    """Place 0 computes the embedding. Place 1 normalizes it, and passes it on to place 2, which adds to it."""
    plan = tiny_plan("llama plain")
    embedding = plan.operations[0].outputs[0]
    places = by_layer(plan, [0, 1, *[2] * (len(plan.operations) - 2)])
    assert crossings(plan, places) == {embedding.index: 2, plan.operations[1].outputs[0].index: 1}
    assert crossings(plan, [0] * len(places)) == {}


def test_a_cache_layer_cannot_be_at_two_places() -> None:
    plan = tiny_plan("llama plain")
    with pytest.raises(AssertionError, match="cache layer 0 is on two devices"):
        split(plan, ["here" if isinstance(op, Append) else "there" for op in plan.operations])

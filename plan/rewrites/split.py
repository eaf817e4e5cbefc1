"""Splits a plan over several devices, such as a GPU and the CPU: each device gets a separate plan.

Consecutive operations on one device form a stage. Every stage except the first begins with a Receive, every stage
except the last ends with a Send, and a stage receives the values that the previous stage sends. A stage also forwards
values that a later stage on another device reads and has not received. With two devices, every value is transferred at
most once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Generic, TypeVar

from localllm.plan.attention import Append, Attention, IndexerTopK
from localllm.plan.fused import Fused
from localllm.plan.operation import Operation
from localllm.plan.operations import Receive, Send
from localllm.plan.plan import Plan
from localllm.plan.pooling import Pool
from localllm.plan.recurrence import Convolve, LinearAttention, SelectiveScan
from localllm.plan.values import Value
from localllm.plan.wkv import Wkv

Place = TypeVar("Place", bound=Hashable)
# Operations with a cache layer.
Layered = Append | IndexerTopK | Attention | Convolve | LinearAttention | SelectiveScan | Wkv | Pool


@dataclass(frozen=True, slots=True)
class Split(Generic[Place]):
    """The result of a split: a plan for every device with operations, and the device of every stage in order.

    `layers` gives, for every cache layer of the whole plan, its device and its index there.
    """

    plans: dict[Place, Plan]
    order: tuple[Place, ...]
    layers: tuple[tuple[Place, int], ...]


@dataclass(frozen=True, slots=True)
class _Stage(Generic[Place]):
    place: Place
    operations: tuple[Operation, ...]


def split(plan: Plan, places: Sequence[Place]) -> Split[Place]:
    """Split `plan`: operation i goes to `places[i]`. All operations of a cache layer must go to one device.

    Split before fusing: fuse the plans of the devices afterwards. Heads for drafting go to the device of the last
    operation as further stages, which are not in the order.
    """
    pairs = groupby(zip(places, plan.operations, strict=True), key=lambda pair: pair[0])
    stages = [_Stage(place, tuple([op for _, op in group])) for place, group in pairs]
    layers = _layers(stages)
    numbers = {layer: number for layer, (_, number) in enumerate(layers)}
    crossing = _crossing(stages)
    operations: dict[Place, list[Operation]] = {}
    for at, stage in enumerate(stages):
        own = operations.setdefault(stage.place, [])
        own += [Receive(crossing[at - 1])] if at else []
        own += [_renumbered(op, numbers) for op in stage.operations]
        own += [Send(crossing[at])] if at + 1 < len(stages) else []
    plans = {
        place: replace(
            plan,
            operations=tuple(own),
            layers=tuple([plan.layers[n] for n, (of, _) in enumerate(layers) if of == place]),
            starts=(),
            drafts=plan.drafts if place == stages[-1].place else (),
        )
        for place, own in operations.items()
    }
    return Split(plans, tuple([stage.place for stage in stages]), layers)


def _layers(stages: Sequence[_Stage[Place]]) -> tuple[tuple[Place, int], ...]:
    """Return, for every cache layer, its device and its index there."""
    places: dict[int, Place] = {}
    for stage in stages:
        for layer in (layer for op in stage.operations for layer in op.state):
            assert places.setdefault(layer, stage.place) == stage.place, f"cache layer {layer} is on two devices"
    counts: dict[Place, int] = {}
    found = []
    for layer in range(len(places)):
        place = places[layer]
        found.append((place, counts.get(place, 0)))
        counts[place] = counts.get(place, 0) + 1
    return tuple(found)


def _crossing(stages: Sequence[_Stage[Place]]) -> list[tuple[Value, ...]]:
    """Return the values that each stage sends to the next."""
    readers: dict[int, set[Place]] = {}
    for stage in stages:
        for value in (value for op in stage.operations for value in op.inputs):
            readers.setdefault(value.index, set()).add(stage.place)
    known: dict[Place, set[int]] = {stage.place: set() for stage in stages}
    at_hand: list[Value] = []  # values that the stage received or computed
    found: list[tuple[Value, ...]] = []
    for stage in stages:
        at_hand += [value for op in stage.operations for value in op.outputs]
        known[stage.place] |= {value.index for value in at_hand}
        at_hand = [v for v in at_hand if any(v.index not in known[place] for place in readers.get(v.index, ()))]
        found.append(tuple(at_hand))
    return found


def _renumbered(op: Operation, numbers: dict[int, int]) -> Operation:
    assert not isinstance(op, Fused), "a split plan is fused after splitting"
    if isinstance(op, Attention) and op.pools is not None:
        return replace(op, layer=numbers[op.layer], pools=numbers[op.pools])
    if isinstance(op, Layered):
        return replace(op, layer=numbers[op.layer])
    return op

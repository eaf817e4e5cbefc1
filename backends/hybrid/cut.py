"""One plan cut in two: which operations run on the card, and the plans of the card and of the host that come of it.

Neighbouring operations of one side are a part. What a part makes and the other side reads later leaves it, and enters
the next part, which is of the other side: so every value crosses at most once, and stays where it was made too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from localllm.plan import Append, Attention, CacheLayer, Experts, Operation, Part, Plan, SelectRows, Value

Side = Literal["host", "card"]


@dataclass(frozen=True, slots=True)
class Placement:
    """What goes to the card: the last `layers` of a plan's layers and output, which count as one row; of the first
    `host_experts` layers not the experts. With all layers and the output go the embeddings."""

    layers: int
    host_experts: int = 0


@dataclass(frozen=True, slots=True)
class Cut:
    """The plan of each side that has operations, whose parts run in the order of `order`; of every layer of the whole
    plan's cache, whose it is and its number there."""

    plans: dict[Side, Plan]
    order: tuple[Side, ...]
    layers: tuple[tuple[Side, int], ...]


def most_layers(plan: Plan) -> int:
    """Layers of a plan and its output: all that can go to a card."""
    return len(plan.starts)


def sides(plan: Plan, placement: Placement) -> list[Side]:
    """Where each operation runs."""
    count, starts = len(plan.operations), plan.starts
    on_card = min(placement.layers, len(starts))
    first = (0 if on_card == len(starts) else starts[-on_card]) if on_card else count
    host_experts = starts[min(placement.host_experts, len(starts) - 1)]
    return [
        "card" if number >= first and not (isinstance(op, Experts) and number < host_experts) else "host"
        for number, op in enumerate(plan.operations)
    ]


def cut(plan: Plan, placement: Placement) -> Cut:
    """The plans of both sides."""
    where = sides(plan, placement)
    numbers = [list(group) for _, group in groupby(range(len(where)), key=where.__getitem__)]
    order = tuple(where[group[0]] for group in numbers)
    crossing = _crossing(plan, where, numbers)
    layers = _layers(plan, where)
    plans = {side: _plan(plan, side, order, numbers, crossing, layers) for side in dict.fromkeys(order)}
    return Cut(plans, order, tuple(layers[number] for number in range(len(plan.layers))))


def _crossing(plan: Plan, where: Sequence[Side], numbers: Sequence[Sequence[int]]) -> list[tuple[Value, ...]]:
    """Values that leave each part: made in it, and read on the other side."""
    read: dict[Side, set[int]] = {"host": set(), "card": set()}
    for side, op in zip(where, plan.operations, strict=True):
        read[side] |= {value.index for value in op.inputs}
    found = []
    for group in numbers:
        other = read["host" if where[group[0]] == "card" else "card"]
        made = [value for number in group for value in plan.operations[number].outputs]
        found.append(tuple([value for value in made if value.index in other]))
    return found


def _layers(plan: Plan, where: Sequence[Side]) -> dict[int, tuple[Side, int]]:
    """Whose each layer of the cache is, and its number there."""
    found: dict[int, tuple[Side, int]] = {}
    counts: dict[Side, int] = {"host": 0, "card": 0}
    places = {layer: side for op, side in zip(plan.operations, where, strict=True) for layer in op.state}
    for layer, side in sorted(places.items()):
        found[layer] = side, counts[side]
        counts[side] += 1
    return found


def _plan(
    plan: Plan,
    side: Side,
    order: Sequence[Side],
    numbers: Sequence[Sequence[int]],
    crossing: Sequence[tuple[Value, ...]],
    layers: dict[int, tuple[Side, int]],
) -> Plan:
    operations: list[Operation] = []
    parts: list[Part] = []
    for number, group in enumerate(numbers):
        if order[number] == side:
            start = len(operations)
            operations += [_renumbered(plan.operations[n], layers) for n in group]
            enters = crossing[number - 1] if number else ()
            parts.append(Part(start, len(operations), enters, crossing[number]))
    kept: list[CacheLayer] = [layer for layer, own in zip(plan.layers, _in_order(layers), strict=True) if own == side]
    values, logits = plan.values, plan.logits
    if order[-1] != side:  # what it ends in is not the logits: rows of what leaves it stand for them
        logits = parts[-1].leaves[-1]
        if logits.rows == "batch":
            logits = Value(len(values), logits.width, "logits", "selected")
            operations.append(SelectRows(logits, parts[-1].leaves[-1]))
            values = (*values, logits)
            parts[-1] = replace(parts[-1], stop=len(operations))
    return Plan(tuple(operations), values, tuple(kept), logits, tuple(parts))


def _in_order(layers: dict[int, tuple[Side, int]]) -> list[Side]:
    return [layers[number][0] for number in range(len(layers))]


def _renumbered(op: Operation, layers: dict[int, tuple[Side, int]]) -> Operation:
    return replace(op, layer=layers[op.layer][1]) if isinstance(op, Append | Attention) else op

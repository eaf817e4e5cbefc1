"""Cuts a plan into stages of consecutive layers.

A cut falls between two layers, where no cache layer has operations on both sides. Layers that read the keys and values
of an earlier layer therefore stay with it, and so do layers that reuse its selected positions: kernels do not check
these, so a stage computes them itself. N-gram embeddings are looked up in the first stage, because they depend only on
the tokens. Other values of early layers that late layers read travel with the hidden states.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise

from localllm.cluster.errors import ClusterError
from localllm.plan import EmbedNgrams, IndexerTopK, Operation, Plan, Value
from localllm.plan.rewrites.split import split


@dataclass(frozen=True, slots=True)
class Cut:
    """A plan cut into stages: the first layer of each stage, the plan of each stage, and where the cache layers are."""

    plan: Plan
    firsts: tuple[int, ...]  # first layer of each stage, counted from 0; the output counts as one more layer
    parts: tuple[Plan, ...]
    layers: tuple[tuple[int, int], ...]  # for every cache layer of the plan: its stage and its index there

    @property
    def stages(self) -> int:
        return len(self.parts)

    def stage_of(self, value: Value) -> int:
        """Return the stage that computes a value."""
        for number, part in enumerate(self.parts):
            if any(value in op.outputs for op in part.operations):
                return number
        raise ClusterError(f"{value.name}: the plan does not compute this value")


def cut_at(plan: Plan, firsts: Sequence[int]) -> Cut:
    """Cut `plan` before these layers; `firsts[0]` is 0. Raises ClusterError for a cut that is not possible."""
    possible = possible_cuts(plan)
    layers = len(plan.starts)
    if not firsts or firsts[0] or any(b <= a for a, b in pairwise(firsts)) or firsts[-1] >= layers:
        raise ClusterError(f"the first layers of stages are 0 and larger numbers below {layers}, found {list(firsts)}")
    for first in firsts[1:]:
        if first not in possible:
            raise ClusterError(f"cannot cut before layer {first}: {_reason(plan, first)}; {_alternatives(possible)}")
    starts = [0, *[plan.starts[first] for first in firsts[1:]]]
    places = [bisect_right(starts, number) - 1 for number in range(len(plan.operations))]
    # look up n-grams in the first stage: a stable sort moves them behind its last operation
    order = [0 if isinstance(op, EmbedNgrams) else place for op, place in zip(plan.operations, places, strict=True)]
    numbers = sorted(range(len(order)), key=order.__getitem__)
    moved = replace(plan, operations=tuple([plan.operations[number] for number in numbers]))
    divided = split(moved, sorted(order))
    parts = tuple([divided.plans[number] for number in range(len(firsts))])
    return Cut(plan, tuple(firsts), parts, divided.layers)


def even_cut(plan: Plan, stages: int) -> Cut:
    """Cut `plan` into `stages` stages, so that the stage with the most bytes of weights has as few as possible."""
    possible, layers = possible_cuts(plan), len(plan.starts)
    if not 1 <= stages <= len(possible) + 1:
        raise ClusterError(f"cannot make {stages} stages of this model; {_alternatives(possible)}")
    bounds = [0, *possible, layers]
    before = [0, *accumulate(weight_bytes(plan))]  # bytes of the layers before each layer

    @cache
    def best(start: int, stages: int) -> tuple[int, tuple[int, ...]]:
        """Return the bytes of the largest stage, and the first layers, for the layers from bounds[start] on."""
        first = bounds[start]
        if stages == 1:
            return before[-1] - before[first], (first,)
        found = []
        for stop in range(start + 1, len(bounds) - stages + 1):
            most, firsts = best(stop, stages - 1)
            found.append((max(before[bounds[stop]] - before[first], most), (first, *firsts)))
        return min(found)

    return cut_at(plan, best(0, stages)[1])


def possible_cuts(plan: Plan) -> list[int]:
    """Return the layers before which the plan can be cut. Raises ClusterError for an encoder-decoder model."""
    if plan.encodes:
        raise ClusterError("a model with an encoder runs in one process; it cannot be split into stages")
    spans = _spans(plan)
    starts = list(enumerate(plan.starts))[1:]
    return [layer for layer, start in starts if not any(first < start <= last for first, last, _ in spans)]


def _spans(plan: Plan) -> list[tuple[int, int, str]]:
    """List every cache layer and every selection of positions: its first operation, its last one, and its kind."""
    found: dict[tuple[str, int], tuple[int, int]] = {}
    selections: set[int] = set()
    for number, op in enumerate(plan.operations):
        if isinstance(op, IndexerTopK):
            selections.add(op.out.index)
        used = [("cache", layer) for layer in op.state]
        used += [("selected positions", v.index) for v in (*op.inputs, *op.outputs) if v.index in selections]
        for key in used:
            found[key] = (found.get(key, (number, number))[0], number)
    return [(first, last, what) for (what, _), (first, last) in found.items()]


def _reason(plan: Plan, layer: int) -> str:
    start = plan.starts[layer]
    first, last, what = next(span for span in _spans(plan) if span[0] < start <= span[1])
    owner, reader = (max(bisect_right(plan.starts, number) - 1, 0) for number in (first, last))
    by = "a head for drafting" if reader >= len(plan.starts) - 1 else f"layer {reader}"
    return f"{by} reads the {what} of layer {owner}"


def _alternatives(possible: Sequence[int]) -> str:
    if not possible:
        return "it runs in one process"
    listed = ", ".join(map(str, possible)) if len(possible) <= 8 else f"{possible[0]} ... {possible[-1]}"
    return f"it can be cut before layers {listed} (at most {len(possible) + 1} stages)"


def by_layer(plan: Plan, amount: Callable[[Operation], int]) -> list[int]:
    """Return the sum of `amount` over the operations of each layer and of the output. Operations before the first
    layer, such as the embeddings, count as part of it.
    """
    amounts = [0] * len(plan.starts)
    for number, op in enumerate(plan.operations):
        amounts[max(bisect_right(plan.starts, number) - 1, 0)] += amount(op)
    return amounts


def weight_bytes(plan: Plan) -> list[int]:
    """Return the bytes of weights of each layer and of the output, in memory."""
    from localllm.backends.cpu.weights import stored_bytes  # imports the CPU's kernels

    return by_layer(plan, lambda op: sum(stored_bytes(weight) for weight in (*op.matrices, *op.vectors)))

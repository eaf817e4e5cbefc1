"""Chooses which layers run on which node, from the memory of each node and the time that it takes for each layer.

One sequence visits the stages one after the other, so its time per token is the sum over all stages and hops. A node is
used only if this makes the token faster, or if the model does not fit without it. With a fixed number of stages, the
slowest stage is made as fast as possible instead, because it limits the tokens per second of many sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from localllm.backends.base import CacheTypes, Limits
from localllm.base.units import size
from localllm.cluster.cut import by_layer, possible_cuts, weight_bytes
from localllm.cluster.errors import ClusterError
from localllm.engine.cache_types import layer_bytes as cache_bytes
from localllm.plan import Embed, Operation, Plan


@dataclass(frozen=True, slots=True)
class Node:
    """What a stage may use on one machine, as measured there."""

    name: str
    memory: int  # bytes for weights and cache
    bandwidth: float  # bytes of weights that decoding reads per second


@dataclass(frozen=True, slots=True)
class Sizes:
    """The bytes of each layer of a plan; the output counts as one more layer."""

    cuts: tuple[int, ...]  # layers before which the plan can be cut
    memory: tuple[int, ...]  # bytes of weights and cache that a layer keeps
    read: tuple[int, ...]  # bytes that a token reads
    shared: int = 0  # bytes of weights that two layers use, and that one stage with all layers keeps once
    encoders: int = 0  # bytes of the encoders of pictures and sound, which the first stage has

    @classmethod
    def of(cls, plan: Plan, limits: Limits, types: CacheTypes, encoders: int = 0) -> Sizes:
        """Return the sizes of a plan that is bound with these limits and cache types."""
        from localllm.backends.cpu.weights import stored_bytes  # imports the CPU's kernels

        seen: set[int] = set()

        def cache(op: Operation) -> int:
            new = set(op.state) - seen
            seen.update(new)
            return sum(cache_bytes(plan.layers[number], limits, types) for number in new)

        def read(op: Operation) -> int:
            return 0 if isinstance(op, Embed) else sum(each.share(stored_bytes(each.weight)) for each in op.reads)

        held = zip(weight_bytes(plan), by_layer(plan, cache), strict=True)
        shared = sum(weight_bytes(plan)) - sum(stored_bytes(weight) for weight in plan.weights.values())
        return cls(tuple(possible_cuts(plan)), tuple(map(sum, held)), tuple(by_layer(plan, read)), shared, encoders)

    def memory_of(self, first: int, stop: int) -> int:
        """Return the bytes of a stage with the layers from `first` until `stop`."""
        whole = not first and stop == len(self.memory)
        return sum(self.memory[first:stop]) - (self.shared if whole else 0) + (0 if first else self.encoders)


@dataclass(frozen=True, slots=True)
class Placement:
    """The first layer of each stage, and the node of each stage."""

    firsts: tuple[int, ...]
    nodes: tuple[int, ...]  # indices of nodes
    seconds: float  # of a token of one sequence, hops included


def place(sizes: Sizes, nodes: Sequence[Node], hop: float, stages: int | None = None) -> Placement:
    """Place the layers. The first stage runs on `nodes[0]`; `hop` is the time in seconds from one stage to the next.

    `stages` fixes the number of stages; None: the fastest placement for one sequence. Raises ClusterError if no
    placement has enough memory.
    """
    bounds, layers = [0, *sizes.cuts], len(sizes.memory)
    if stages is not None and not 1 <= stages <= min(len(bounds), len(nodes)):
        raise ClusterError(_too_many(stages, len(bounds), len(nodes)))
    read = [0, *accumulate(sizes.read)]
    stops = [*bounds[1:], layers]
    # best[count][node, stop]: the best way to run the layers before `stop` in `count` stages, the last one on `node`
    best: dict[tuple[int, int], tuple[float, float, Placement]] = {}
    chosen: list[tuple[float, float, Placement]] = []
    for count in range(1, (stages or min(len(bounds), len(nodes))) + 1):
        found: dict[tuple[int, int], tuple[float, float, Placement]] = {}
        for number, node in enumerate(nodes):
            before = [((0.0, 0.0, Placement((), (), 0.0)), 0)] if count == 1 and not number else []
            before += [(way, stop) for (last, stop), way in best.items() if last < number]
            for (slowest, _, way), first in before:
                for stop in stops:
                    if stop <= first or sizes.memory_of(first, stop) > node.memory:
                        continue
                    own = (read[stop] - read[first]) / node.bandwidth
                    seconds = way.seconds + own
                    made = Placement((*way.firsts, first), (*way.nodes, number), seconds)
                    entry = max(slowest, own), seconds, made
                    key = number, stop
                    if key not in found or _order(entry, stages) < _order(found[key], stages):
                        found[key] = entry
        chosen += [
            (slowest, seconds + (count * hop if count > 1 else 0.0), way)
            for (_, stop), (slowest, seconds, way) in found.items()
            if stop == layers and stages in (None, count)
        ]
        best = found
    if not chosen:
        raise ClusterError(_too_large(sizes.memory_of(0, layers), nodes, stages))
    _, seconds, way = min(chosen, key=lambda entry: _order(entry, stages))
    return Placement(way.firsts, way.nodes, seconds)


def _order(entry: tuple[float, float, Placement], stages: int | None) -> tuple[float, float, int]:
    slowest, seconds, way = entry
    return (seconds, slowest, len(way.firsts)) if stages is None else (slowest, seconds, 0)


def _too_many(stages: int, most: int, nodes: int) -> str:
    if stages > most:
        return f"cannot make {stages} stages of this model; it can be cut into at most {most}"
    return f"{stages} stages need {stages} nodes, and there {'is' if nodes == 1 else 'are'} {nodes}"


def _too_large(needed: int, nodes: Sequence[Node], stages: int | None) -> str:
    have = " + ".join(size(node.memory) for node in nodes)
    within = "" if stages is None else f" in {stages} stage{'s' * (stages > 1)}"
    problem = f"the model does not fit{within}"
    numbers = f"it needs {size(needed)}, and the nodes have {have}"
    return f"{problem}: {numbers}; use a smaller context, a smaller quantization or one more node"

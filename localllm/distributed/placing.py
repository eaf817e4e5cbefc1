"""Decides on which machines the replicas of a server run, and in how many stages: as `run` places one model, for each
replica in turn. Replicas that share a machine share its memory and its bandwidth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import ceil

from localllm.base.notices import Notice, Setting
from localllm.cluster.errors import ClusterError
from localllm.cluster.sizing import Node, Placement, Sizes, place
from localllm.distributed.machines import Machine, spread
from localllm.distributed.report import left_out
from localllm.loading.loader import MEMORY_SHARE

SLOWER = 0.8  # of the bandwidth of the slowest machine that is used: a machine below it is left out


@dataclass(frozen=True, slots=True)
class ReplicaLayout:
    """The stages of each replica, the machines that may have some, and the ones left out, as Ray's ids of nodes."""

    stages: int
    allowed: tuple[str, ...]
    excluded: tuple[str, ...]
    slower: Mapping[str, int] = field(default_factory=dict)  # excluded machines that could run a replica, if no other
    # one is left, and the bytes that they have free
    lines: tuple[str, ...] = ()  # for the user
    memory: Mapping[str, int] = field(default_factory=dict)  # bytes of a replica, by the node of its first stage
    per_node: int = 1  # most replicas on a machine: after a fault, they would gather on one, and be lost with it
    replicas: int = 1  # most that run, without those for prompts
    later: tuple[str, ...] = ()  # machines without the memory for a first stage, which may have later ones

    @property
    def selector(self) -> dict[str, str]:
        """Ray's label selector for the machines. Those that join later are allowed, so it names those that are not."""
        return _without(self.excluded)

    @property
    def first_selector(self) -> dict[str, str]:
        """The selector for first stages."""
        return _without([*self.excluded, *[node for node in self.later if node not in self.excluded]])

    def last_resort(self, alive: Collection[str]) -> ReplicaLayout | None:
        """Return a layout that admits the slower machines, if no other one of the machines `alive` may have a replica.
        None: that is not so.
        """
        left = {node: free for node, free in self.slower.items() if node in alive}
        firsts = len(left.keys() - set(self.later))
        if set(alive) - set(self.excluded) or not firsts:
            return None
        excluded = tuple([node for node in self.excluded if node not in self.slower])
        sharing = ceil(self.replicas * self.stages / len(left))  # stages of all replicas on one machine
        free = left if self.stages == 1 else dict.fromkeys(left, self.stages * min(left.values()))
        memory = {node: int(MEMORY_SHARE * bytes) // sharing for node, bytes in free.items()}
        return replace(
            self, allowed=(*self.allowed, *self.slower), excluded=excluded, slower={},
            memory={**self.memory, **memory}, per_node=ceil(self.replicas / firsts),
        )  # fmt: skip


def _without(nodes: Sequence[str]) -> dict[str, str]:
    return {"ray.io/node-id": f"!in({','.join(nodes)})"} if nodes else {}


@dataclass(frozen=True, slots=True)
class _Replica:
    """The place of one replica."""

    placement: Placement
    machines: tuple[Machine, ...]  # of each stage


def replica_layout(
    machines: Sequence[Machine], sizes: Sizes, hop: float, stages: int, replicas: tuple[int, int], prompts: int = 0
) -> ReplicaLayout:
    """Place up to `replicas[1]` replicas, each in `stages` stages; 0: the number with the fastest tokens. Then place
    `prompts` replicas for prompts.

    Machines that a replica may use later, after a fault, are allowed too. Raises ClusterError if fewer than
    `replicas[0]` replicas and the ones for prompts fit.
    """
    least, most = replicas[0] + prompts, replicas[1] + prompts
    found = _found(machines, sizes, hop, stages, (least, most))
    stages = len(found[0].machines)
    used = {machine.node: machine for each in found for machine in each.machines}
    slowest = min(machine.facts.bandwidth for machine in used.values())
    smallest = min(_needed(each, sizes) for each in found)
    lines = [f"the machines have memory for {len(found)} replicas"] if len(found) < most else []
    excluded, slower = list[str](), dict[str, int]()
    for machine in machines:
        if machine.node in used:
            continue
        if machine.facts.bandwidth < SLOWER * slowest:
            lines.append(left_out(machine, "it would not make a token faster"))
            slower[machine.node] = machine.facts.free
        elif machine.offer(1).memory < smallest:
            lines.append(left_out(machine, "it has too little memory"))
        else:
            continue
        excluded.append(machine.node)
    allowed = tuple([machine.node for machine in machines if machine.node not in excluded])
    later = tuple([machine.node for machine in machines if stages > 1 and not _takes_first(machine, sizes)])
    even = ceil(replicas[1] / len(set(allowed) - set(later)))
    if stages > 1:  # first stages have the requests, and cost as much anywhere
        usable = [machine for machine in machines if machine.node in allowed]
        with suppress(ClusterError):  # fewer fit
            found = _found(usable, sizes, hop, stages, (len(found), len(found)), even)
    sharing = Counter(each.machines[0].node for each in found[: replicas[1]])  # Ray counts those for prompts apart
    per_node = max(even, *sharing.values())
    if per_node > 1 and len(allowed) > 1:
        lines.append(
            f"{len(allowed)} machines for {replicas[1]} replicas: a failed machine may end {per_node} replicas"
        )
    return ReplicaLayout(
        stages, allowed, tuple(excluded), slower, tuple(lines), _shares(found), per_node, replicas[1], later
    )


def _found(
    machines: Sequence[Machine], sizes: Sizes, hop: float, stages: int, counts: tuple[int, int], firsts: int = 0
) -> list[_Replica]:
    """Return the places of up to `counts[1]` replicas, with up to `firsts` first stages on a machine if possible; 0:
    any number. Raises ClusterError if fewer than `counts[0]` fit.
    """
    least, most = counts
    found: list[_Replica] = []
    while len(found) < most:
        try:
            found.append(_next(machines, sizes, hop, len(found[0].machines) if found else stages, found, firsts))
        except ClusterError as error:
            if len(found) < least:
                fit = f"only {len(found)} of {least} replicas fit: " if found else ""
                raise ClusterError(f"{fit}{error}") from None
            break
    return found


def _takes_first(machine: Machine, sizes: Sizes) -> bool:
    """Return whether the smallest first stage fits, which has the encoders."""
    return sizes.memory_of(0, sizes.cuts[0]) <= machine.offer(1).memory


def _shares(found: Sequence[_Replica]) -> dict[str, int]:
    """Return the bytes for weights and cache of a replica, by the node of its first stage. Replicas on one machine load
    at the same time, so each sees the memory of all.
    """
    sharing = Counter(node for each in found for node in {machine.node for machine in each.machines})
    shares: dict[str, int] = {}
    for each in found:
        free = {machine.node: machine.facts.free // sharing[machine.node] for machine in each.machines}
        first, most = each.machines[0].node, int(MEMORY_SHARE * sum(free.values()))
        shares[first] = min(most, shares.get(first, most))
    return shares


def _next(
    machines: Sequence[Machine], sizes: Sizes, hop: float, stages: int, before: Sequence[_Replica], firsts: int
) -> _Replica:
    """Return the place where one more replica has the fastest tokens, and preferably on a machine with fewer than
    `firsts` first stages (0: any number). Raises ClusterError if none has the memory.
    """
    begun = Counter(each.machines[0].node for each in before)
    running: Counter[str] = Counter()
    taken: Counter[str] = Counter()
    for each in before:
        running.update({machine.node for machine in each.machines})
        stops = [*each.placement.firsts[1:], len(sizes.memory)]
        for machine, *span in zip(each.machines, each.placement.firsts, stops, strict=True):
            taken[machine.node] += sizes.memory_of(*span)
    found: list[tuple[bool, float, _Replica]] = []
    problem: ClusterError | None = None
    for first in machines:
        others = sorted([each for each in machines if each != first], key=lambda each: -each.facts.bandwidth)
        offered = spread([first, *others], stages)
        nodes = []
        for machine in offered:
            count = offered.count(machine)
            memory = max(0, machine.offer(1).memory - taken[machine.node]) // count
            nodes.append(Node(machine.name, memory, machine.facts.bandwidth / (1 + running[machine.node])))
        try:
            placement = place(sizes, nodes, hop, stages or None)
        except ClusterError as error:
            problem = problem or error
            continue
        full = bool(firsts) and begun[first.node] >= firsts
        used = tuple([offered[number] for number in placement.nodes])
        found.append((full, placement.seconds, _Replica(placement, used)))
    if not found:
        raise problem or ClusterError("no machine can run the model")
    return min(found, key=lambda each: each[:2])[2]


def _needed(replica: _Replica, sizes: Sizes) -> int:
    """Return the bytes of the smallest stage."""
    firsts = replica.placement.firsts
    spans = zip(firsts, [*firsts[1:], len(sizes.memory)], strict=True)
    return min(sizes.memory_of(*span) for span in spans)


def processors(total: Sequence[float], bundles: int) -> float:
    """Return the processors to reserve for each of `bundles` stages, so that they fit on nodes with these numbers."""
    each = ceil(bundles / max(len(total), 1))  # on one node, if they are spread
    return max(0.01, int(100 * min(1.0, 0.9 * min(total, default=1.0) / each)) / 100)


def check_ports(machines: Sequence[Machine], replicas: int, prompts: int) -> None:
    """Raise ClusterError if the machines have too few ports for replicas and `prompts` replicas for prompts. Each
    replica has one for its events, and both have one for each other.
    """
    found = [machine.ports for machine in machines]
    needed, have = replicas * (1 + 2 * prompts), sum(each[1] - each[0] for each in found if each is not None)
    if prompts and None not in found and needed > have:
        problem = f": connecting {replicas} replicas takes {needed} ports, and the machines have {have} for them"
        raise ClusterError(Notice(Setting("prefill_replicas", prompts), f"{problem}; give fewer of both"))

"""The machines of a Ray cluster: memory and bandwidth, measured by each, and the time to reach it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import localllm
from localllm.cluster.errors import ClusterError
from localllm.cluster.sizing import Node
from localllm.distributed import actors
from localllm.distributed.killing import kill
from localllm.distributed.measure import Facts, Request, measure, sources
from localllm.options import LoadOptions

RESERVE, SHARE = 256 << 20, 0.9  # bytes, and share of the free memory, that stages leave alone
HOP = 1e-4  # seconds that both ends of a hop take, without the network
MEASURING = 60.0  # seconds
ENDING = 1.0  # seconds to kill a process on another machine
TRIES = 5
RING_LABEL = "localllm-ring-ports"  # of a node: the first port for connections of stages and replicas
RING_PORTS = 30  # from there on


def request_of(options: LoadOptions) -> Request:
    """Return the backend that options ask for, on every machine."""
    return Request(options.backend, options.device, not options.force, options.threads)


@dataclass(frozen=True, slots=True)
class Machine:
    """A node of the cluster, with its measurements."""

    node: str  # Ray's id
    name: str
    address: str
    facts: Facts
    ports: tuple[int, int] | None = None  # for connections of stages and replicas; None: any

    def offer(self, stages: int) -> Node:
        """Return what one of `stages` stages on this machine may use."""
        free = self.facts.free
        return Node(self.name, max(0, min(int(SHARE * free), free - RESERVE)) // stages, self.facts.bandwidth)


class Machines:
    """The machines of the cluster, this one first."""

    def __init__(self, ray: Any, group: Any = None, measurer: Callable[[str, int], Any] | None = None) -> None:
        """`group`: a placement group whose bundles name the machines to use, the first one's being this machine.
        `measurer` returns the actor that measures a machine, by its node and its bundle; None: a helper does.
        """
        self._ray, self._group = ray, group
        self._measurer = measurer or (lambda node, bundle: self._helper(node))
        self._found: list[Machine] = []
        self._request: Request | None = None
        self._helpers: dict[str, Any] = {}
        self.problems: list[str] = []  # machines that cannot be used, and why
        self.unusable: list[str] = []  # Ray's ids of their nodes

    @property
    def own(self) -> Machine:
        return self._found[0]

    def measured(self, request: Request) -> list[Machine]:
        """Measure every machine once. Raises ClusterError if a machine has another version of localllm."""
        if self._request == request:
            return self._found
        self.problems, self.unusable = [], []
        own = self._ray.get_runtime_context().get_node_id()
        nodes = {each["NodeID"]: each for each in self._ray.nodes() if each["Alive"]}
        order = [own, *[node for node in nodes if node != own]]
        if self._group is not None:
            order = self._of_bundles()
        names = _names([nodes[node] for node in dict.fromkeys(order)])
        others = {node: self._measurer(node, order.index(node)) for node in dict.fromkeys(order) if node != own}
        first = measure(request, 0)
        if first.problem:
            raise ClusterError(first.problem)
        facts = {own: first} | self._measure_others([nodes[node] for node in others], request, names, others)
        found = []
        for node in order:
            if facts[node].problem:
                self.problems.append(f"{names[node]} is left out: {facts[node].problem}")
                self.unusable.append(node)
                continue
            ports = ring_ports(nodes[node]["Labels"])
            found.append(Machine(node, names[node], nodes[node]["NodeManagerAddress"], facts[node], ports))
        self._found, self._request = found, request
        return found

    def _of_bundles(self) -> list[str]:
        from ray.util.placement_group import placement_group_table

        places = placement_group_table(self._group)["bundles_to_node_id"]
        return [places[number] for number in sorted(places)]

    def _measure_others(
        self, nodes: list[dict[str, Any]], request: Request, names: dict[str, str], measurers: Mapping[str, Any]
    ) -> dict[str, Facts]:
        """Measure other machines at the same time, and nodes that share a machine one after the other."""
        rounds: list[list[dict[str, Any]]] = []
        for node in nodes:
            host = node["NodeManagerHostname"]
            free = [each for each in rounds if all(other["NodeManagerHostname"] != host for other in each)]
            if free:
                free[0].append(node)
            else:
                rounds.append([node])
        found: dict[str, Facts] = {}
        for each in rounds:
            asked = {}
            for node in each:
                measuring = measurers[node["NodeID"]].measure
                asked[node["NodeID"]] = measuring.remote(request, int(node["Resources"].get("CPU", 0)))
            for node in each:
                found[node["NodeID"]] = self._answer(asked[node["NodeID"]], names[node["NodeID"]])
        return found

    def _answer(self, reference: Any, name: str) -> Facts:
        """Return what a machine measured. Raises ClusterError unless it has the same localllm."""
        try:
            facts = self._ray.get(reference, timeout=MEASURING)
        except self._ray.exceptions.GetTimeoutError:
            return Facts("", "", "", problem=f"it did not answer within {MEASURING:g} s")
        except self._ray.exceptions.RayError as error:
            if "No module named" in str(error):
                raise ClusterError(f"{name} has no localllm; install it there: pip install 'localllm[ray]'") from None
            raise ClusterError(f"{name}: cannot be measured: {' '.join(str(error).split())[:200]}") from None
        if facts.version != localllm.__version__:
            versions = f"localllm {facts.version}, and this machine {localllm.__version__}"
            raise ClusterError(f"{name} has {versions}; install the same version on both")
        if facts.sources != sources():
            raise ClusterError(f"{name} has other source files of localllm; use the same checkout on both")
        assert isinstance(facts, Facts)
        return facts

    def _helper(self, node: str) -> Any:
        if node not in self._helpers:
            self._helpers[node] = actors.helper(self._ray, node)
        return self._helpers[node]

    def offered(self, stages: int) -> list[Machine]:
        """Return the machines for `stages` stages, the first one for the first stage: the fastest others, each once, or
        more often if there are fewer. 0: all.
        """
        others = sorted(self._found[1:], key=lambda machine: -machine.facts.bandwidth)
        if self._group is not None:
            return self._found
        return spread([self.own, *others], stages)

    def hop(self, machines: list[Machine]) -> float:
        """Return the seconds from one stage to the next: half of the slowest round trip that a connection takes."""
        trips = [_round_trip(self._ray, machine) for machine in machines[1:]]
        return HOP + max(trips, default=0.0) / 2

    def others(self, lost: Machine) -> list[Machine]:
        """Return the machines that could take a stage of `lost`, the fastest first, and this one last."""
        others = sorted(self._found[1:], key=lambda machine: -machine.facts.bandwidth)
        return [machine for machine in [*others, self.own] if machine.node != lost.node]

    def at(self, node: str, actor: Any) -> Machine:
        """Return the machine of a node. If it is new, an actor there measures it. Raises ClusterError if it cannot run
        stages.
        """
        known = next((machine for machine in self._found if machine.node == node), None)
        if known is not None:
            return known
        assert self._request is not None, "measured comes first"
        nodes = {each["NodeID"]: each for each in self._ray.nodes()}
        before = [nodes[machine.node] for machine in self._found if machine.node in nodes]
        name, new = _names([*before, nodes[node]])[node], nodes[node]
        facts = self._answer(actor.measure.remote(self._request, int(new["Resources"].get("CPU", 0))), name)
        if facts.problem:
            raise ClusterError(f"{name} cannot take a stage: {facts.problem}")
        self._found.append(Machine(node, name, new["NodeManagerAddress"], facts, ring_ports(new["Labels"])))
        return self._found[-1]

    def runs(self, machine: Machine) -> bool:
        return any(each["NodeID"] == machine.node and each["Alive"] for each in self._ray.nodes())

    def end(self, machine: Machine, process: int) -> None:
        """Kill a process of a machine; a machine that does not answer is left to Ray."""
        if not process:
            return
        if machine.node == self.own.node:
            kill(process)
            return
        with suppress(Exception):
            self._ray.get(self._helper(machine.node).end.remote(process), timeout=ENDING)

    def close(self) -> None:
        actors.end(self._ray, self._helpers.values())
        self._helpers = {}


def spread(machines: list[Machine], stages: int) -> list[Machine]:
    """Return the first machines for `stages` stages, each once, or more often if there are fewer. 0: all."""
    if not stages:
        return machines
    used = machines[:stages]
    counts = [stages // len(used) + (number < stages % len(used)) for number in range(len(used))]
    return [machine for machine, count in zip(used, counts, strict=True) for _ in range(count)]


def ring_ports(labels: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the first port for connections of a node with these labels, and the one after the last; None: any."""
    label = str(labels.get(RING_LABEL, ""))
    return (int(label), int(label) + RING_PORTS) if label.isdecimal() else None


def _names(nodes: list[dict[str, Any]]) -> dict[str, str]:
    """Return a name for each node: its address, and a number if nodes share it."""
    found: dict[str, str] = {}
    for node in nodes:
        address, taken = node["NodeManagerAddress"], set(found.values())
        names = [address, *[f"{address} (node {number})" for number in range(2, len(nodes) + 1)]]
        found[node["NodeID"]] = next(name for name in names if name not in taken)
    return found


def _round_trip(ray: Any, machine: Machine) -> float:
    """Return the seconds that opening a connection to the machine's node takes; the best of some tries."""
    port = next((each["NodeManagerPort"] for each in ray.nodes() if each["NodeID"] == machine.node), 0)
    times = []
    for _ in range(TRIES):
        began = perf_counter()
        with suppress(OSError), socket.create_connection((machine.address, port), timeout=1.0):
            times.append(perf_counter() - began)
    return min(times, default=1.0)

"""A model in stages on a Ray cluster: measures the machines, decides where the layers run, starts the stages there, and
connects them. After a loss, only the lost stages are started again.

The process that owns this object has the first stage. The others are actors in a placement group with one bundle per
stage. They belong to this process: if it ends, Ray ends them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from localllm.backends.base import Backend
from localllm.base.units import size
from localllm.cluster.backend import SplitBackend
from localllm.cluster.cut import Cut, cut_at
from localllm.cluster.errors import ClusterError, StageLost
from localllm.cluster.ring import LocalRing, Ring
from localllm.cluster.sizing import Placement, Sizes, place
from localllm.cluster.stage import Layout, message_bytes
from localllm.cluster.worker import Assignment, Source
from localllm.distributed import actors
from localllm.distributed.files import LocalCopy, file_server
from localllm.distributed.machines import ENDING, Machine, Machines, request_of
from localllm.distributed.parts import Needed, needed
from localllm.distributed.report import report
from localllm.gguf import GGUFFile
from localllm.gguf.identity import identity
from localllm.loading.splitting import Whole
from localllm.options import LoadOptions

ALIVE = 0.7  # seconds for an actor to give a sign of life
IMPORTING = 60.0  # the same while it starts
CPUS = 0.1  # of Ray's processors per stage: stages of a ring take turns, and threads adapt to the load
PLACING = 30.0  # seconds for Ray to reserve the bundles
CONNECTING = 15.0  # seconds for a stage to finish the step before and to enter a new ring


@dataclass(slots=True)
class _Process:
    """A stage in another process."""

    number: int
    machine: Machine
    actor: Any = None
    spare: Any = None  # a second actor, which has imported the program; it takes over if the first one dies
    process: int = 0  # number of the process on its machine; 0: not known yet
    group: Any = None  # placement group
    bundle: int = 0


@dataclass(frozen=True, slots=True)
class _Model:
    """The files of a model, for processes on other machines."""

    files: tuple[GGUFFile, ...]  # the model, and the file that drafts, if any
    sources: tuple[Source, ...]
    whole: Whole


class RayStages:
    """Decides about and owns the stages of one model. It is a `loading.splitting.Splitter`."""

    def __init__(
        self,
        ray: Any,
        stages: int = 0,
        tell: Callable[[str], None] = lambda text: None,
        group: Any = None,
        copy: LocalCopy | None = None,
    ) -> None:
        """`stages`: their number; 0: the fastest number. `group` is a placement group whose first bundle has this
        process: then every stage has its own bundle. `copy` is the model's file if another machine may have it.
        """
        self._ray, self._stages, self._tell, self._group, self._copy = ray, stages, tell, group, copy
        self.line = ""
        self.placement: Placement | None = None
        self._needs: dict[int, int] = {}  # bytes of each stage
        self.number, self.hop = 1, 0.0  # of stages, and seconds from one to the next
        self.restarted = 0  # stages that were lost and run again
        self._connected = self._closed = False
        self._processes: list[_Process] = []
        self._groups: list[Any] = []
        self._model: _Model | None = None
        # Processes that measure their machines, and then take the stages, by bundle or by node. With a given group, the
        # bundles are known, so they start now.
        bundles = range(1, group.bundle_count) if group is not None else ()
        self._waiting: dict[int | str, Any] = {bundle: actors.stage_in(ray, group, bundle) for bundle in bundles}
        self._machines = Machines(ray, group, self._measurer)

    # -- where ---------------------------------------------------------------------------------------------------------

    def _measurer(self, node: str, bundle: int) -> Any:
        """Return the process that measures a machine."""
        if self._group is None:
            self._waiting[node] = actors.stage_on(self._ray, node)
            return self._waiting[node]
        if bundle not in self._waiting:  # it took a stage
            self._waiting[bundle] = actors.stage_in(self._ray, self._group, bundle)
        return self._waiting[bundle]

    def free_memory(self, options: LoadOptions) -> int:
        machines = self._machines.measured(request_of(options))
        return sum({machine.node: machine.facts.free for machine in machines}.values())

    def backend(self, whole: Whole, threads: int) -> Backend | None:
        request = request_of(whole.options)
        machines = self._machines.measured(request)
        media = whole.recording.media
        sizes = Sizes.of(whole.plan, whole.limits, whole.cache, media.reserved if media is not None else 0)
        offered = self._machines.offered(self._stages)
        hop = self._machines.hop(machines)
        found = place(sizes, [machine.offer(offered.count(machine)) for machine in offered], hop, self._stages or None)
        used = [offered[number] for number in found.nodes]
        self.placement, self.number, self.hop = found, len(found.nodes), hop
        stops = [*found.firsts[1:], len(sizes.memory)]
        spans = zip(found.firsts, stops, strict=True)
        self._needs = {number: sizes.memory_of(*span) for number, span in enumerate(spans)}
        self.line = "; ".join(report(whole.plan, found, used, machines, bool(self._stages), self._machines.problems))
        if self._copy is not None:
            self._copy.complete(whole.file, [cut_at(whole.plan, found.firsts).parts[0]])
        keys: Sequence[int | str] = found.nodes if self._group is not None else [machine.node for machine in used]
        self._processes = [
            _Process(number, machine, spare=self._waiting.pop(key, None), bundle=bundle)
            for number, (machine, key, bundle) in enumerate(zip(used, keys, found.nodes, strict=True)) if number
        ]  # fmt: skip
        actors.end(self._ray, self._waiting.values())
        if len(used) == 1:
            return None
        first = used[0].facts.request.opened(threads)
        try:
            self._model = _model(whole, self._copy)
            self._reserve()
        except BaseException:
            first.close()
            raise
        others = {machine.facts.backend for machine in used[1:]}
        same = others.pop() if len(others) == 1 else ""
        return SplitBackend(first, partial(cut_at, firsts=found.firsts), self.connect, same, together=True)

    # -- starting ------------------------------------------------------------------------------------------------------

    def _reserve(self) -> None:
        """Reserve a bundle for every process."""
        if self._group is not None:
            for process in self._processes:
                process.group = self._group
            return
        group = self._group_on([process.machine for process in self._processes])
        for number, process in enumerate(self._processes):
            process.group, process.bundle = group, number

    def _group_on(self, machines: Sequence[Machine]) -> Any:
        from ray.util.placement_group import placement_group

        bundles = [{"CPU": CPUS} for _ in machines]
        where = [{"ray.io/node-id": machine.node} for machine in machines]
        group = placement_group(bundles, strategy="SPREAD", bundle_label_selector=where)
        self._groups.append(group)
        if not group.wait(PLACING):
            names = ", ".join(dict.fromkeys(machine.name for machine in machines))
            raise ClusterError(f"Ray has no free processors for stages on {names}; other jobs use them")
        return group

    def connect(self, cut: Cut, layout: Layout) -> Ring:
        """Start the stages that do not run, and return a new ring through all. Raises StageLost or ClusterError."""
        if cut.stages == 1:
            return LocalRing([])
        processes = self._processes
        try:
            return self._restored(cut, layout, processes)
        finally:
            if self._closed:  # meanwhile, because the first stage could not be loaded
                _end_all(self._ray, processes)
                self.close()

    def _restored(self, cut: Cut, layout: Layout, processes: Sequence[_Process]) -> Ring:
        """Start the processes that do not run, and return a ring through all."""
        alive = self._alive()
        started = [process for process in processes if process.number not in alive]
        try:
            for process in started:
                self._end(process)
                self._start(process)
            if started:
                self._open(started, cut, layout)
        except BaseException:
            for process in started:  # a stage that runs without its layers would never be opened
                self._end(process)
            raise
        try:
            ring = self._ring(cut, layout)
        except self._ray.exceptions.RayError as error:
            raise StageLost(f"a stage ended while it was started: {type(error).__name__}") from None
        self.restarted += len(started) if self._connected else 0
        self._connected = True
        for process in started:
            process.spare = self._actor(process, 0.0)
            process.spare.prepare.remote(process.machine.facts.request)  # not waited for
        return ring

    def _alive(self) -> set[int]:
        """Return the numbers of the stages that give a sign of life."""
        asked = {p.actor.process.remote(): p for p in self._processes if p.actor is not None}
        ready, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=ALIVE) if asked else ([], [])
        found = set()
        for reference in ready:
            with suppress(self._ray.exceptions.RayError):
                self._ray.get(reference)
                found.add(asked[reference].number)
        return found

    def _end(self, process: _Process) -> None:
        """End a stage at once. Ray only asks a process to leave; a stopped one would run for five more seconds."""
        if process.actor is None:
            return
        actors.end(self._ray, [process.actor])
        if process.process and self._machines.runs(process.machine):
            self._kill(process)
        process.actor, process.process = None, 0

    def _kill(self, process: _Process) -> None:
        """Let another process of the same machine kill a stage, which may hang."""
        if process.spare is not None and process.machine.node != self._machines.own.node:
            with suppress(Exception):  # it hangs, too
                self._ray.get(process.spare.end.remote(process.process), timeout=ENDING)
                return
        self._machines.end(process.machine, process.process)

    def _start(self, process: _Process) -> None:
        """Let the spare process take the stage, or a new one."""
        if self._group is None and not self._machines.runs(process.machine):
            self._move(process)
            process.spare = None
        process.actor, process.spare = process.spare, None
        if process.actor is not None:
            try:
                # at first, only one actor of each machine has measured; the others of a given group still import
                self._ray.get(process.actor.process.remote(), timeout=ALIVE if self._connected else IMPORTING)
                return
            except self._ray.exceptions.RayError:
                self._ray.kill(process.actor, no_restart=True)
        process.actor = self._actor(process, CPUS)

    def _actor(self, process: _Process, cpus: float) -> Any:
        """Return a new actor in the bundle of a stage."""
        return actors.stage_in(self._ray, process.group, process.bundle, cpus)

    def _move(self, process: _Process) -> None:
        """Give a stage whose machine is gone to another machine, with the same backend."""
        lost, needed = process.machine, self._needs[process.number]
        for machine in self._machines.others(lost):
            same = machine.facts.backend == lost.facts.backend
            if same and self._machines.runs(machine) and needed <= self._room(machine):
                self._moved(process, machine)
                process.group, process.bundle = self._group_on([machine]), 0
                return
        raise ClusterError(f"{lost.name} is gone, and no other machine can take its layers; start it again")

    def _moved(self, process: _Process, machine: Machine) -> None:
        """Note the new machine of a stage."""
        lost = process.machine
        if machine.facts.backend != lost.facts.backend:  # other bits
            raise ClusterError(f"{machine.name} would take the layers of {lost.name}, but has another backend")
        self._tell(f"{lost.name} is gone; {machine.name} takes its layers")
        process.machine = machine

    def _room(self, machine: Machine) -> int:
        """Return the bytes that a machine has for one more stage."""
        here = [process.number for process in self._processes if process.machine == machine]
        here += [0] if machine == self._machines.own else []
        return machine.offer(1).memory - sum(self._needs[number] for number in here)

    def _open(self, started: Sequence[_Process], cut: Cut, layout: Layout) -> None:
        """Load stages, each in its process, in parallel."""
        ray, model = self._ray, self._model
        assert model is not None
        get = partial(self._get, "cannot start")
        for process, number in zip(started, get([p.actor.process.remote() for p in started], started), strict=True):
            process.process = number
        for process, node in zip(started, get([p.actor.node.remote() for p in started], started), strict=True):
            if node != process.machine.node:  # Ray has moved the bundle: its machine was lost
                self._moved(process, self._machines.at(node, process.actor))
        missing = []
        for source in model.sources:
            missing.append([not has for has in get([p.actor.has.remote(source) for p in started], started)])
        servers = tuple([self._server(number) if any(each) else None for number, each in enumerate(missing)])
        answers = []
        for at, process in enumerate(started):
            parts: list[Needed | None] = []
            for number, (file, source) in enumerate(zip(model.files, model.sources, strict=True)):
                part = needed(file, source.identity, [cut.parts[process.number]]) if missing[number][at] else None
                parts.append(part)
            if wanted := sum(part.bytes for part in parts if part is not None):
                self._tell(f"{process.machine.name} needs {size(wanted)} of the model, and keeps it")
            drafter = model.sources[1] if len(model.sources) > 1 else None
            given = Assignment(process.number, model.sources[0], model.whole.recording, layout, drafter)
            facts = process.machine.facts
            answers.append(process.actor.open.remote(given, facts.request, facts.threads, tuple(parts), servers))
        try:
            for process, problem in zip(started, get(answers, started), strict=True):
                if problem:
                    raise ClusterError(f"{process.machine.name}: stage {process.number}: {problem}")
        finally:
            for server in servers:
                if server is not None:
                    ray.kill(server)

    def _server(self, number: int) -> Any:
        """Return a server of the model's files (0) or the drafter's (1), on the machine that has them."""
        if not number and self._copy is not None:
            return file_server(self._ray, self._copy.home.node, self._copy.home.paths)
        assert self._model is not None
        paths = tuple([os.path.abspath(path) for path in self._model.files[number].paths])
        return file_server(self._ray, self._machines.own.node, paths)

    def _get(self, what: str, references: Sequence[Any], processes: Sequence[_Process]) -> list[Any]:
        """Return the answers of processes. Raises StageLost with the machine of a process that ended."""
        found = []
        for reference, process in zip(references, processes, strict=True):
            try:
                found.append(self._ray.get(reference))
            except self._ray.exceptions.RayError as error:
                raise StageLost(f"{process.machine.name}: stage {process.number} {what}: {_first(error)}") from None
        return found

    # -- the ring --------------------------------------------------------------------------------------------------

    def _ring(self, cut: Cut, layout: Layout) -> Ring:
        """Connect the stages with new keys: each accepts the one before, and then connects to the one after."""
        from localllm.cluster.zeromq import Endpoint, ZmqRing

        ray, processes = self._ray, self._processes
        get = partial(ray.get, timeout=CONNECTING)
        endpoint = Endpoint(
            message_bytes(cut, layout, cut.stages), self._machines.own.address, ports=self._machines.own.ports
        )
        try:
            peers = get(
                [process.actor.listen.remote(process.machine.address, process.machine.ports) for process in processes]
            )
            before = [endpoint.peer, *peers[:-1]]
            get([p.actor.accept.remote(peer.public_key) for p, peer in zip(processes, before, strict=True)])
            endpoint.accept(peers[-1].public_key)
            after = [*peers[1:], endpoint.peer]
            get([process.actor.serve.remote(peer) for process, peer in zip(processes, after, strict=True)])
            endpoint.connect(peers[0])
        except BaseException:
            endpoint.close()
            raise
        return ZmqRing(endpoint)

    def close(self) -> None:
        """End all stages, and give their bundles back."""
        from ray.util.placement_group import remove_placement_group

        self._closed = True
        actors.end(self._ray, self._waiting.values())
        _end_all(self._ray, self._processes)
        for group in self._groups:
            with suppress(Exception):
                remove_placement_group(group)
        self._machines.close()
        self._processes, self._groups = [], []


def _model(whole: Whole, copy: LocalCopy | None = None) -> _Model:
    files = tuple(file for file in (whole.file, whole.drafter) if file is not None)
    sources = [copy.home.source] if copy is not None else []  # of a copy, the identity is not known
    sources += [Source(os.path.abspath(file.path), identity(file)) for file in files[len(sources) :]]
    return _Model(files, tuple(sources), whole)


def _end_all(ray: Any, processes: Sequence[_Process]) -> None:
    actors.end(ray, [actor for process in processes for actor in (process.actor, process.spare)])


def _first(error: Exception) -> str:
    cause = getattr(error, "cause", None)
    text = " ".join(str(cause if cause is not None else error).split())
    return text.split(". ")[0][:300]

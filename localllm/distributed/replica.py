"""A replica: the model, its scheduler and its tokenizer in one Serve replica. It answers the requests of fronts.

A request comes as an `Ask` and lasts until its answer ends, so Serve counts it as ongoing. Its events go into the
outbox of its front, which reads one stream per replica: a step of many requests is one report.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from secrets import token_hex
from time import monotonic
from typing import TYPE_CHECKING, Any

from localllm import load
from localllm.base.errors import LocalLLMError
from localllm.base.notices import Notice, Setting, said
from localllm.distributed.files import Home, LocalCopy
from localllm.distributed.killing import guarded
from localllm.distributed.machines import ring_ports
from localllm.distributed.messages import Ask, Listen, Origin, Report, States
from localllm.distributed.outbox import Outbox
from localllm.distributed.prompts import PromptClient, PromptSource, endpoint_bytes
from localllm.generation.errors import Stopped
from localllm.generation.interfaces import SchedulerLimits
from localllm.generation.request import Event, Failed, Finished, Request
from localllm.generation.scheduler import Scheduler
from localllm.gguf import open_gguf
from localllm.loading.facts import ModelFacts
from localllm.models import ModelError
from localllm.options import LoadOptions

if TYPE_CHECKING:
    from localllm.cluster.zeromq import Endpoint
    from localllm.distributed.direct import DirectSender
    from localllm.distributed.stages import RayStages
    from localllm.model import Model

BEAT = 0.25  # seconds after which a report without events is sent
ORPHANED = 60.0  # seconds without a sign of life from the front, after which a replica ends
RETRY_SECONDS = 10.0  # until a replica that could not open the model is started again
LOAD_SECONDS = 0.1  # interval between the loads in reports
MEETING = 10.0  # seconds for a replica that evaluates prompts to answer
STALLED = 5.0  # seconds for it to take a message
NAMESPACE = "localllm"  # of the actors' names


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """How a replica loads its model."""

    home: Home  # the front's machine, and the file there
    version: str  # of the front's program
    options: LoadOptions
    limits: SchedulerLimits
    stages: int = 1  # bundles of the replica's placement group; the first has this process, the others may have actors
    fastest: bool = False  # use the number of bundles with the fastest tokens
    memory: Mapping[str, int] = field(default_factory=dict)  # most bytes of weights and cache, by Ray's id of the node
    prompts: tuple[str, ...] = ()  # names of the actors that evaluate prompts for it
    encoders: Home | None = None  # the mmproj file; None: it takes no pictures or sound

    def memory_on(self, node: str) -> int:
        """Return the most bytes of weights and cache on a node; 0: not limited. One for which no share was computed may
        have as much as any other one: it may have several replicas.
        """
        return self.memory.get(node, min(self.memory.values(), default=0))


@dataclass(frozen=True, slots=True)
class Opened:
    """What a replica says of itself once it is open: facts, or why it cannot work."""

    facts: ModelFacts | None
    problem: str = ""
    notes: tuple[str, ...] = ()


class Replica:
    """The deployment's class. Serve calls its methods on one event loop, apart from the scheduler's thread."""

    _source: PromptSource | None = None

    def __init__(self, settings: ReplicaSettings, front: str = "") -> None:
        """Open the model. If this fails, `opened` returns the reason: Serve would only try again."""
        self._problem, self._front, self._pulsed = "", front, monotonic()
        self._began = monotonic()
        self._outboxes: dict[str, Outbox] = {}
        self._stages: RayStages | None = None
        self._notes: list[str] = []
        try:
            with guarded():
                self._open(settings)
        except (LocalLLMError, ModelError, OSError) as error:
            self._problem = Notice(f"{_address()}: ", said(error))

    def _open(self, settings: ReplicaSettings) -> None:
        import ray

        from localllm import __version__

        if settings.version != __version__:
            versions = f"localllm {__version__}, and the front has {settings.version}"
            raise LocalLLMError(f"a machine of the cluster has {versions}; install the same version on all")
        limits = settings.limits
        copy = LocalCopy(ray, settings.home, _address(), self._notes.append)
        if settings.stages == 1:
            with open_gguf(copy.path) as file:
                copy.complete(file)
        else:
            self._stages = _stages(ray, settings, copy, self._notes.append)
        model = self._model = load(
            copy.path, settings.options, mmproj=_encoders(ray, settings.encoders, self._notes.append),
            sequences=limits.parallel, split=self._stages,
            memory=settings.memory_on(ray.get_runtime_context().get_node_id()),
        )  # fmt: skip
        if model.embeds:
            problem = "gives embeddings, which replicas do not serve"
            raise LocalLLMError(Notice(f"{settings.home.source.path}: {problem}; serve it without ", Setting("ray")))
        limits = replace(limits, aligned=model.prompt_alignment)
        self._scheduler = Scheduler(model.new_core(limits, self))
        if settings.prompts:
            own = token_hex(8)
            clients = [PromptClient(partial(meet, ray, name, own, model)) for name in settings.prompts]
            self._source = PromptSource(model, self._scheduler, clients)

    # -- for the scheduler -----------------------------------------------------------------------------------------

    def step(self, sequences: int, drafts: int = 0) -> None:
        """Count a step for the metrics of the fronts (`Observer`)."""
        for outbox in list(self._outboxes.values()):
            outbox.step(sequences, drafts)

    # -- for fronts ------------------------------------------------------------------------------------------------

    async def opened(self, listen: Listen | None = None) -> Opened:
        """Return the facts of the model, or the problem. `listen` names the replica that is asked."""
        if self._problem:
            return Opened(None, self._problem)
        model = self._model
        tokenizer = model.maybe_tokenizer
        notes = (*self._notes, model.placed, model.cache.note, (tokenizer.note if tokenizer is not None else "") or "")
        return Opened(model.facts, notes=tuple(filter(None, notes)))

    async def answer(self, ask: Ask) -> None:
        """Run a request until its answer ends. If the front cancels the call, the request ends at the next step."""
        outbox, loop, done = self._outbox(ask.front), asyncio.get_running_loop(), asyncio.Event()
        if self._problem:
            outbox.put(ask.number, Failed(Stopped(self._problem), ask.request.choice))
            return

        def listener(event: Event) -> None:
            outbox.put(ask.number, event)
            if isinstance(event, Finished | Failed):
                loop.call_soon_threadsafe(done.set)

        try:
            request = await asyncio.to_thread(self._made, ask, outbox)
            if self._source is not None:
                await self._source.fetch(request)
            ticket = self._scheduler.submit(request, listener)
        except LocalLLMError as error:
            outbox.put(ask.number, Failed(error, ask.request.choice))
            return
        try:
            await done.wait()
        except asyncio.CancelledError:
            ticket.cancel()
            outbox.drop(ask.number)
            raise

    async def listen(self, listen: Listen) -> AsyncIterator[Report]:
        """Yield reports to a front until it cancels the call, at least every BEAT seconds."""
        mine, origin = self._where()
        if listen.replica != mine:
            raise LocalLLMError(f"replica {mine} was asked for the events of {listen.replica}")
        outbox, counted = self._outbox(listen.front), 0.0
        reader = outbox.turn()
        direct = self._direct(listen.key) if listen.key else None
        try:
            yield Report((), origin=origin if direct is None else replace(origin, peer=direct.peer))
            for number in count(1):
                report = await outbox.take(reader, BEAT, number)
                if report is None:
                    return
                if direct is None or not await direct.send(report):
                    yield report
                if not self._problem and monotonic() - counted > LOAD_SECONDS:
                    restarted = 0 if self._stages is None else self._stages.restarted
                    recovering, load = self._scheduler.recovering, self._scheduler.load()
                    yield Report((), load, restarted=restarted, recovering=recovering, before=number)
                    counted = monotonic()
        finally:
            if direct is not None:
                direct.close()

    async def pulse(self, listen: Listen) -> None:
        """Note that the front lives."""
        self._pulsed = monotonic()

    async def check_health(self) -> None:
        """End the deployment if its front is gone. Serve calls this every second, and starts a replica that raises
        again: then its file may be there.
        """
        if self._problem and monotonic() - self._began > RETRY_SECONDS:
            raise LocalLLMError(self._problem)
        if monotonic() - self._pulsed > ORPHANED:
            self._pulsed = monotonic()
            threading.Thread(target=_end, args=(self._front,), daemon=True).start()

    async def forget(self, listen: Listen) -> None:
        """Clear the prefix cache."""
        if not self._problem:
            self._scheduler.forget()

    def _where(self) -> tuple[str, Origin]:
        """Return Serve's id of this replica, and where it runs."""
        import ray
        from ray import serve

        context = ray.get_runtime_context()
        stages, hop = (1, 0.0) if self._stages is None else (self._stages.number, self._stages.hop)
        origin = Origin(
            context.get_actor_name() or "", context.namespace, os.getpid(), context.get_node_id(), stages, hop,
            self._problem,
        )  # fmt: skip
        return serve.get_replica_context().replica_id.unique_id, origin

    def _direct(self, key: bytes) -> DirectSender | None:
        """Listen for the front with this public key; None: no port is free."""
        from localllm.distributed.direct import DirectSender

        try:
            return DirectSender(key, _address(), own_ports())
        except OSError:
            return None

    # -- requests --------------------------------------------------------------------------------------------------

    def _outbox(self, front: str) -> Outbox:
        if front not in self._outboxes:
            self._outboxes[front] = Outbox()
        return self._outboxes[front]

    def _made(self, ask: Ask, outbox: Outbox) -> Request:
        """Return the request with everything that did not travel: its constraint, sequence breakers and functions."""
        request, model = ask.request, self._model
        if ask.media:
            from localllm.distributed.media import unpacked  # imports the encoders

            request = replace(request, prompt=unpacked(request.prompt, ask.media, model.multimodal))
        if ask.recipe is not None:
            request = replace(request, constraint=ask.recipe.made(model))
        if request.sampling.dry_multiplier and model.dry_breakers is not None:
            request = replace(request, dry_breakers=model.dry_breakers.find(request.sampling.dry_sequence_breaker))
        if ask.states:
            request = replace(request, states=lambda start, rows: outbox.put(ask.number, States(start, rows.copy())))
        return request


def _end(front: str) -> None:
    from ray import serve

    serve.delete(front)


def _encoders(ray: Any, home: Home | None, tell: Callable[[str], None]) -> str:
    """Return the path of the mmproj file on this machine, fetched if necessary."""
    if home is None:
        return "off"
    copy = LocalCopy(ray, home, _address(), tell)
    if copy.fetched:
        with open_gguf(copy.path) as file:
            copy.complete(file)
    return str(copy.path)


def _stages(ray: Any, settings: ReplicaSettings, copy: LocalCopy, tell: Callable[[str], None]) -> RayStages:
    """Return the splitter of a replica with several stages."""
    from ray.util.placement_group import get_current_placement_group

    from localllm.distributed.stages import RayStages

    count = 0 if settings.fastest else settings.stages
    return RayStages(ray, count, tell, get_current_placement_group(), copy)


def meet(ray: Any, name: str, own: str, model: Model) -> Endpoint:
    """Connect to the actor that evaluates prompts. Each side accepts the other's key before that one connects. `own`
    tells this replica from others.
    """
    actor = ray.get_actor(name, namespace=NAMESPACE)
    endpoint = new_endpoint(model.context)
    try:
        asked = actor.meet.remote(own, endpoint.peer.public_key, model.executable.cache_layout)
        peer = ray.get(asked, timeout=MEETING)
        endpoint.accept(peer.public_key)
        ray.get(actor.join.remote(own, endpoint.peer), timeout=MEETING)
        endpoint.connect(peer)
    except BaseException as error:
        endpoint.close()
        cause = getattr(error, "cause", None)  # of Ray's error: what the actor raised
        raise (cause if isinstance(cause, LocalLLMError) else error) from None
    return endpoint


def new_endpoint(context: int) -> Endpoint:
    """Return an endpoint of this process for the blocks of prompts."""
    from localllm.cluster.zeromq import Endpoint

    return Endpoint(endpoint_bytes(context), _address(), STALLED, own_ports())


def own_ports() -> tuple[int, int] | None:
    """Return the ports for connections on the machine of this process; None: any."""
    import ray

    return ring_ports(ray.get_runtime_context().get_node_labels())


def _address() -> str:
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())

"""Replicas that evaluate prompts only: actors of Ray with the model and its scheduler, for the replicas of one front.

They are not replicas of the Serve deployment: each replica that decodes connects to all of them, by name. They end with
the front's process. Ray restarts an actor that died.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from time import monotonic
from typing import TYPE_CHECKING, Any

from localllm.base.closing import Closing
from localllm.base.errors import LocalLLMError
from localllm.base.notices import Notice, Setting
from localllm.cluster.errors import ClusterError
from localllm.distributed.placing import ReplicaLayout
from localllm.distributed.prompts import PromptServer
from localllm.distributed.replica import MEETING, NAMESPACE, Replica, ReplicaSettings, new_endpoint

if TYPE_CHECKING:
    from localllm.cluster.secured import Peer
    from localllm.cluster.zeromq import Endpoint

CPUS = 0.1  # of Ray's processors
OPEN_SECONDS = 3600.0  # longest time for loading a model
TELL_SECONDS = 15.0  # before a note says that replicas wait


@dataclass(frozen=True, slots=True)
class _Meeting:
    """A replica that is about to connect."""

    endpoint: Endpoint  # of this process
    key: bytes  # of the other one
    began: float


class PromptReplica(Replica):
    """The actor's class."""

    def __init__(self, settings: ReplicaSettings) -> None:
        super().__init__(settings)
        self._meeting: dict[str, _Meeting] = {}  # by the name that the other replica gave itself
        self._servers: dict[bytes, PromptServer] = {}

    async def meet(self, caller: str, key: bytes, layout: str) -> Peer:
        """Accept the replica `caller`, which has this public key. Return where it connects to. `layout` describes its
        cache blocks: with others, each prompt would be evaluated twice.
        """
        if self._problem:
            raise LocalLLMError(self._problem)
        if layout != (own := self._model.executable.cache_layout):
            problem = f"its cache is {own[:120]}, this one {layout[:120]}"
            raise ClusterError(f"{problem}; separate replicas for prompts need the same backend and kind of processor")
        for other, meeting in list(self._meeting.items()):
            if other == caller or monotonic() - meeting.began > 2 * MEETING:  # it was given up
                self._meeting.pop(other).endpoint.close()
        endpoint = new_endpoint(self._model.context)
        self._meeting[caller] = _Meeting(endpoint, key, monotonic())
        endpoint.accept(key)
        peer: Peer = endpoint.peer
        return peer

    async def join(self, caller: str, peer: Peer) -> None:
        """Connect to the replica, which has accepted this one."""
        meeting = self._meeting.get(caller)
        if meeting is None or meeting.key != peer.public_key:
            raise ClusterError("this meeting was given up")
        endpoint = self._meeting.pop(caller).endpoint
        endpoint.connect(peer)
        self._servers = {key: server for key, server in self._servers.items() if server.connected}
        self._servers[peer.public_key] = PromptServer(self._model, self._scheduler, endpoint)


class PromptReplicas(Closing):
    """The actors of one front."""

    def __init__(self, ray: Any, actors: dict[str, Any]) -> None:
        self._ray, self._actors = ray, actors
        self.names = tuple(actors)

    @classmethod
    def start(
        cls, front: str, settings: ReplicaSettings, count: int, layout: ReplicaLayout, told: Callable[[str], None]
    ) -> PromptReplicas:
        """Start the actors, and return once they are open. Raises ClusterError and LocalLLMError. `told` gets a note if
        that takes long.
        """
        import ray

        if layout.stages > 1:
            problem = f": these machines run the model in {layout.stages} stages, but such a replica has all layers in "
            raise ClusterError(Notice(Setting("prefill_replicas", count), f"{problem}one process; leave it out"))
        settings = replace(settings, stages=1, encoders=None)  # it gets prompts of text only
        selector = {"label_selector": layout.selector} if layout.excluded else {}
        where = {"num_cpus": CPUS, "max_restarts": -1, "scheduling_strategy": "SPREAD", **selector}
        made = ray.remote(PromptReplica)
        actors = {
            name: made.options(name=name, namespace=NAMESPACE, **where).remote(settings)
            for name in _names(front, count)
        }
        found = cls(ray, actors)
        try:
            opening = [actor.opened.remote() for actor in actors.values()]
            if ray.wait(opening, num_returns=count, timeout=TELL_SECONDS)[1]:
                told("the replicas for prompts still load the model, or wait for free processors (`ray status`)")
            for opened in ray.get(opening, timeout=OPEN_SECONDS):
                if opened.facts is None:
                    raise LocalLLMError(opened.problem)
        except ray.exceptions.RayError as error:
            found.close()
            raise ClusterError(f"the replicas for prompts did not start: {type(error).__name__}") from None
        except BaseException:
            found.close()
            raise
        return found

    def close(self) -> None:
        for actor in self._actors.values():
            with suppress(Exception):  # the cluster may be gone
                self._ray.kill(actor, no_restart=True)
        self._actors = {}


def _names(front: str, count: int) -> list[str]:
    return [f"{front}-prompts-{number}" for number in range(count)]

"""Replicas that evaluate prompts only: actors of Ray with the model and its scheduler, for the replicas of one front.

They are not replicas of the Serve deployment: each replica that decodes connects to all of them, by name. They end with
the front's process. Ray restarts an actor that died.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from localllm.base.closing import Closing
from localllm.base.errors import LocalLLMError
from localllm.base.notices import Notice, Setting
from localllm.cluster.errors import ClusterError
from localllm.distributed.placing import ReplicaLayout
from localllm.distributed.prompts import PromptServer
from localllm.distributed.replica import NAMESPACE, Replica, ReplicaSettings, new_endpoint

if TYPE_CHECKING:
    from localllm.cluster.secured import Peer
    from localllm.cluster.zeromq import Endpoint

CPUS = 0.1  # of Ray's processors
MOST_MEETING = 64  # replicas that connect at the same time
OPEN_SECONDS = 3600.0  # longest time for loading a model


class PromptReplica(Replica):
    """The actor's class."""

    def __init__(self, settings: ReplicaSettings) -> None:
        super().__init__(settings)
        self._meeting: dict[bytes, Endpoint] = {}  # by the key of the other replica
        self._servers: dict[bytes, PromptServer] = {}

    async def meet(self, key: bytes) -> Peer:
        """Accept the replica with this public key. Return where it connects to."""
        import ray

        if self._problem:
            raise LocalLLMError(self._problem)
        while len(self._meeting) >= MOST_MEETING:  # left by replicas that died meanwhile
            self._meeting.pop(next(iter(self._meeting))).close()
        endpoint = self._meeting[key] = new_endpoint(ray, self._model.context)
        endpoint.accept(key)
        peer: Peer = endpoint.peer
        return peer

    async def join(self, peer: Peer) -> None:
        """Connect to the replica, which has accepted this one."""
        endpoint = self._meeting.pop(peer.public_key)
        endpoint.connect(peer)
        self._servers = {key: server for key, server in self._servers.items() if server.connected}
        self._servers[peer.public_key] = PromptServer(self._model, self._scheduler, endpoint)


class PromptReplicas(Closing):
    """The actors of one front."""

    def __init__(self, ray: Any, actors: dict[str, Any]) -> None:
        self._ray, self._actors = ray, actors
        self.names = tuple(actors)

    @classmethod
    def start(cls, front: str, settings: ReplicaSettings, count: int, layout: ReplicaLayout) -> PromptReplicas:
        """Start the actors, and return once they are open. Raises ClusterError and LocalLLMError."""
        import ray

        if layout.stages > 1:
            problem = "evaluate prompts with all layers in one process; leave out "
            raise ClusterError(Notice(Setting("prefill_replicas", count), f": {problem}", Setting("stages")))
        settings = replace(settings, stages=1)
        selector = {"label_selector": layout.selector} if layout.excluded else {}
        where = {"num_cpus": CPUS, "max_restarts": -1, "scheduling_strategy": "SPREAD", **selector}
        made = ray.remote(PromptReplica)
        actors = {
            name: made.options(name=name, namespace=NAMESPACE, **where).remote(settings)
            for name in _names(front, count)
        }
        found = cls(ray, actors)
        try:
            for opened in ray.get([actor.opened.remote() for actor in actors.values()], timeout=OPEN_SECONDS):
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

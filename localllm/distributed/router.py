"""Serve's request router for replicas: it asks the front's `Fleet`.

Serve imports this module by name, copies the class with the values that it uses, and makes the router in the front's
process. The router therefore keeps no state, and finds the fleet by the front's name.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from localllm.distributed.fleet import Fleet, fleet_of
from localllm.distributed.messages import Ask, Listen

LOOK = 0.05  # seconds between two looks for a replica that takes requests


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # untyped
    """Sends a request to the replica that the fleet ranks first."""

    _fleet: Fleet | None = None

    def initialize_state(self, front: str) -> None:
        self._fleet = fleet_of(front)  # None in Serve's own processes, which send no requests

    @property
    def supports_rejection_protocol(self) -> bool:
        """Replicas queue what they are sent, so none has to say first that it has room."""
        return False

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        if self._fleet is not None:
            self._fleet.update([each.replica_id.unique_id for each in replicas])

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        if self._fleet is not None:
            self._fleet.forget(replica_id.unique_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order of preference, each alone in its rank."""
        asked: Any = pending_request.args[0] if pending_request is not None and pending_request.args else None
        running = {each.replica_id.unique_id: each for each in candidate_replicas}
        names = list(running)
        if pending_request is None or pending_request.future.done():  # cancelled: Serve looks again if there is a rank
            return [list(candidate_replicas)]
        if isinstance(asked, Listen):
            # If the replica is gone, another one refuses the call. A call that waits would take one of the few tasks
            # in which Serve routes requests.
            names = [asked.replica] if asked.replica in running else names
        elif isinstance(asked, Ask) and self._fleet is not None:
            names = self._fleet.ranked(running, asked.chunks, asked.tokens)
        if not names:  # Serve asks again at once, on the event loop that has to learn of new replicas
            await asyncio.sleep(LOOK)
        return [[running[name]] for name in names]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        asked: Any = pending_request.args[0] if pending_request.args else None
        if self._fleet is not None and isinstance(asked, Ask):
            self._fleet.sent(asked.number, replica_id.unique_id, asked.chunks)

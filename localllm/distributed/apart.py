"""Keeps the first stages of a server's replicas on different machines, so that one machine's death does not end all.

Serve limits the replicas of a machine only if they have no placement groups. So each node declares resources here,
`SERVERS` of 1 each. A server claims one of them, and the first bundle of each replica takes a share of it.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from localllm.base.closing import Closing

if TYPE_CHECKING:
    from localllm.distributed.placing import ReplicaLayout

SERVERS = 16  # of a cluster that keep their replicas apart
RESOURCES = {f"localllm-server-{number}": 1 for number in range(1, SERVERS + 1)}
OPTION = f"--resources={json.dumps(RESOURCES)}"  # of `ray start`
LEAST = 0.001  # processors that a claim reserves
UNDECLARED = "Ray was started without `localllm worker` there: a machine may get the first stages of several replicas"
ALL_CLAIMED = f"{SERVERS} servers run on this cluster: a machine may get the first stages of several replicas"


class Claim(Closing):
    """One of the resources, which no other server of the cluster uses until `close`, or until this process ends."""

    def __init__(self, resource: str = "", group: Any = None) -> None:
        self.resource, self._group = resource, group  # "": none, and replicas may gather on a machine

    @classmethod
    def take(cls, ray: Any, layout: ReplicaLayout) -> tuple[Claim, str]:
        """Claim a resource if this layout needs one. Return it, and a line for the user if none can be claimed."""
        if layout.stages == 1 or layout.replicas == 1 or len(layout.allowed) == 1:
            return cls(), ""
        declared = _declared(ray, layout.allowed)
        for name in declared:
            if (group := _reserved(ray, name)) is not None:
                return cls(name, group), ""
        return cls(), ALL_CLAIMED if declared else UNDECLARED

    def keep_on(self, ray: Any, nodes: Collection[str]) -> None:
        """Give the resource up unless all these nodes declare it. Otherwise replicas would wait for ever."""
        if self.resource and self.resource not in _declared(ray, nodes):
            self.resource = ""

    def share(self, per_node: int) -> dict[str, float]:
        """Return what the first bundle of a replica takes, so that at most `per_node` fit on a machine."""
        return {self.resource: int(1000 / per_node) / 1000} if self.resource else {}

    def close(self) -> None:
        from ray.util.placement_group import remove_placement_group

        group, self._group = self._group, None
        if group is not None:
            with suppress(Exception):  # the cluster may be gone
                remove_placement_group(group)


def _declared(ray: Any, allowed: Collection[str]) -> list[str]:
    """Return the resources that all these nodes have, the unused first: replicas outlive a server that was killed."""
    nodes = [each["Resources"] for each in ray.nodes() if each["NodeID"] in allowed]
    found = [name for name in RESOURCES if all(name in resources for resources in nodes)]
    free, total = ray.available_resources(), ray.cluster_resources()
    return sorted(found, key=lambda name: free.get(name, 0.0) < total.get(name, 0.0))


def _reserved(ray: Any, name: str) -> Any:
    """Return a placement group of this name, which Ray gives to one process only; None: another one has it."""
    from ray.util.placement_group import placement_group

    try:
        return placement_group([{"CPU": LEAST}], name=name)
    except ray.exceptions.RaySystemError as error:
        if "already exists" not in str(error):
            raise
        return None

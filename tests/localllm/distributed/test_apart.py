"""The first stages of a server's replicas run on different machines, also when several servers share a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import pytest

from localllm.distributed import apart, deployment
from localllm.distributed.apart import RESOURCES, Claim
from localllm.distributed.placing import ReplicaLayout
from localllm.distributed.replica import ReplicaSettings
from localllm.generation.interfaces import SchedulerLimits
from localllm.options import LoadOptions
from tests.localllm.distributed.conftest import TwoNodes
from tests.localllm.distributed.servers import until
from tests.localllm.distributed.test_deployment import HOME

pytestmark = pytest.mark.xdist_group("ray")
SETTINGS = ReplicaSettings(HOME, "version", LoadOptions(), SchedulerLimits(1), 2)


@contextmanager
def placed(cluster: TwoNodes, claim: Claim, layout: ReplicaLayout) -> Iterator[Any]:
    """Reserve the bundles of one replica as Serve does."""
    from ray.util.placement_group import placement_group, remove_placement_group

    options = deployment._options(cluster.ray, "front", SETTINGS, (2, 2), claim, layout)
    group = placement_group(
        options["placement_group_bundles"], strategy=options["placement_group_strategy"],
        bundle_label_selector=options.get("placement_group_bundle_label_selector"),
    )  # fmt: skip
    try:
        yield group
    finally:
        remove_placement_group(group)


def first_of(group: Any) -> str:
    """Return the node of a replica's first stage."""
    from ray.util.placement_group import placement_group_table

    return str(placement_group_table(group)["bundles_to_node_id"][0])


def test_first_stages_of_two_replicas_never_share_a_node(cluster: TwoNodes) -> None:
    layout = ReplicaLayout(2, cluster.nodes, (), replicas=2)
    claim, line = Claim.take(cluster.ray, layout)
    assert (claim.resource, line) == (next(iter(RESOURCES)), "")
    with closing(claim), placed(cluster, claim, layout) as one:
        assert one.wait(10)
        with placed(cluster, claim, layout) as two:
            assert two.wait(10)
            assert {first_of(one), first_of(two)} == set(cluster.nodes)
            with placed(cluster, claim, layout) as three:
                assert not three.wait(1)  # it waits for a node without a replica
                other, _ = Claim.take(cluster.ray, layout)
                assert other.resource not in ("", claim.resource)
                with closing(other), placed(cluster, other, layout) as four:
                    assert four.wait(10)  # another server is not limited by this one
    until(lambda: _taken(cluster, layout) == next(iter(RESOURCES)))  # once Ray has counted what the replicas gave back


@pytest.mark.parametrize("number", [0, 1])
def test_a_first_stage_keeps_off_a_node_without_room_for_it(cluster: TwoNodes, number: int) -> None:
    layout = ReplicaLayout(2, cluster.nodes, (), replicas=2, later=(cluster.nodes[number],), per_node=2)
    with placed(cluster, Claim(), layout) as one, placed(cluster, Claim(), layout) as two:
        for group in (one, two):
            assert group.wait(10)
            assert first_of(group) == cluster.nodes[1 - number]


def _taken(cluster: TwoNodes, layout: ReplicaLayout) -> str:
    """Return the resource that a new server would claim."""
    with closing(Claim.take(cluster.ray, layout)[0]) as claim:
        return claim.resource


def test_a_cluster_without_these_resources_is_told(cluster: TwoNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = ReplicaLayout(2, cluster.nodes, (), replicas=2)
    with monkeypatch.context() as changed:
        changed.setattr(apart, "RESOURCES", {"undeclared": 1})
        claim, line = Claim.take(cluster.ray, layout)
    assert (claim.resource, claim.share(1), line) == ("", {}, apart.UNDECLARED)
    for unneeded in (replace(layout, stages=1), replace(layout, replicas=1), replace(layout, allowed=("one",))):
        claim, line = Claim.take(cluster.ray, unneeded)
        assert (claim.resource, line) == ("", "")

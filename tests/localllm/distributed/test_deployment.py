"""Starts replicas while other fronts use the cluster; without Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Event, Thread
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest

from localllm.cluster.errors import ClusterError
from localllm.cluster.worker import Source
from localllm.distributed import apart, deployment
from localllm.distributed.apart import Claim
from localllm.distributed.deployment import TRIES, Deployment
from localllm.distributed.files import Home
from localllm.distributed.fleet import Fleet
from localllm.distributed.parts import Needed
from localllm.distributed.placing import ReplicaLayout
from localllm.distributed.replica import ReplicaSettings
from localllm.generation.interfaces import SchedulerLimits
from localllm.options import LoadOptions

HOME = Home("node", Source("model.gguf", "identity"), ("model.gguf",), Needed("identity", (), (), ()))
pytestmark = pytest.mark.usefixtures("ray")  # which the program imports here
SETTINGS = ReplicaSettings(HOME, "version", LoadOptions(), SchedulerLimits(parallel=4), 2)
LAYOUT = ReplicaLayout(2, ("node",), ())


@pytest.mark.parametrize("raced", [0, 2, TRIES - 1])
def test_a_start_that_another_front_disturbs_is_repeated(raced: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lasts: list[bool] = []

    def started(*arguments: Any) -> str:
        lasts.append(arguments[-1])
        if len(lasts) <= raced:
            raise deployment._Raced
        return "started"

    monkeypatch.setattr(Deployment, "_started", started)
    monkeypatch.setattr(deployment, "sleep", lambda seconds: None)
    fleet = Fleet("front", 4)
    assert Deployment.start("front", fleet, SETTINGS, (1, 2), LAYOUT) == "started"  # type: ignore[comparison-overlap]
    assert lasts == [False] * min(raced, TRIES - 1) + [raced == TRIES - 1]  # the last try raises what it meets


def test_a_front_ends_although_its_cluster_is_gone(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="127.0.0.1:1"))
    claim = Claimed()
    deployment._end("front", SimpleNamespace(), claim)  # nothing answers there
    with pytest.raises(ClusterError):
        failed(monkeypatch, claim)
    assert not claim.closing.is_set()  # Ray would wait
    monkeypatch.setattr(deployment, "reachable", lambda address: True)
    monkeypatch.setattr(deployment, "MOST_ENDING_SECONDS", 0.2)
    over, began = Event(), monotonic()
    deployment._end("front", SimpleNamespace(delete=lambda name: over.wait(60)), claim)
    assert monotonic() - began < 30  # the call itself lasts a minute
    over.set()
    assert claim.closing.wait(20)
    claim, began = Claimed(seconds=60), monotonic()
    deployment._end("front", SimpleNamespace(status=lambda: SimpleNamespace(applications=1)), claim)
    with pytest.raises(ClusterError):
        failed(monkeypatch, claim)
    assert claim.closing.is_set()
    assert monotonic() - began < 30
    claim.over.set()


class Claimed(Claim):
    """A claim that needs some time to be closed."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.seconds, self.closing, self.over = seconds, Event(), Event()

    def close(self) -> None:
        self.closing.set()
        self.over.wait(self.seconds)


def failed(monkeypatch: pytest.MonkeyPatch, claim: Claim) -> None:
    """Start replicas that do not open."""

    def started(*arguments: Any) -> None:
        raise ClusterError("no replica opens")

    with monkeypatch.context() as changed:
        changed.setattr(Claim, "take", lambda ray, layout: (claim, ""))
        changed.setattr(Deployment, "_started", started)
        Deployment.start("front", Fleet("front", 4), SETTINGS, (1, 2), LAYOUT)


def test_a_problem_of_ray_before_the_start_is_an_error_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(ray: Any, layout: ReplicaLayout) -> None:
        raise ray.exceptions.RaySystemError("System error: line\nthe cluster is gone")

    monkeypatch.setattr(Claim, "take", take)
    with pytest.raises(ClusterError, match=r"^the replicas did not start: the cluster is gone$"):
        Deployment.start("front", Fleet("front", 4), SETTINGS, (1, 2), LAYOUT)


LAST = ReplicaLayout(1, ("node",), ("slow",), {"slow": 1000}, memory={"node": 7})


def last_resort(
    ray: Any, monkeypatch: pytest.MonkeyPatch, deploy: Callable[[ReplicaLayout], Any], claim: Claim | None = None
) -> Deployment:
    """Return replicas whose machines are gone, but for a slow one."""
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": "slow", "Alive": True}])
    monkeypatch.setattr(deployment, "_end", lambda front, serve, claim: None)
    return Deployment("front", None, deploy, LAST, claim or Claim())


def test_the_last_resort_is_tried_again_if_it_fails(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[ReplicaLayout] = []

    def deploy(layout: ReplicaLayout) -> None:
        tried.append(layout)
        if len(tried) == 1:
            raise RuntimeError("the controller of Serve starts again")

    found = last_resort(ray, monkeypatch, deploy)
    with pytest.raises(RuntimeError):
        found.revive()
    assert "takes them" in found.revive()
    assert found.revive() == ""
    assert [layout.memory for layout in tried] == [{"node": 7, "slow": 800}] * 2


@pytest.mark.parametrize(("declared", "share"), [({}, {}), ({"resource": 1}, {"resource": 1.0})])
def test_the_last_resort_demands_no_resource_that_is_not_declared(
    ray: Any, monkeypatch: pytest.MonkeyPatch, declared: Mapping[str, int], share: Mapping[str, float]
) -> None:
    """The slower machine joined with `ray start`: a bundle that demands the resource would wait for ever."""
    claim, shares = Claim("resource"), list[Mapping[str, float]]()
    found = last_resort(ray, monkeypatch, lambda layout: shares.append(claim.share(1)), claim)
    nodes = [
        {"NodeID": "node", "Alive": False, "Resources": {}},
        {"NodeID": "slow", "Alive": True, "Resources": {"CPU": 1.0, **declared}},
    ]
    monkeypatch.setattr(apart, "RESOURCES", {"resource": 1})
    for name, said in {"nodes": nodes, "available_resources": {}, "cluster_resources": {}}.items():
        monkeypatch.setattr(ray, name, lambda said=said: said)
    assert "takes them" in found.revive()
    assert shares == [share]


def test_nothing_is_deployed_after_the_end(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    found = last_resort(ray, monkeypatch, lambda layout: order.append("deployed"))
    found.close()
    assert found.revive() == ""
    assert order == []
    begun, over = Event(), Event()

    def deploy(layout: ReplicaLayout) -> None:
        begun.set()
        over.wait(20)
        order.append("deployed")

    found = last_resort(ray, monkeypatch, deploy)
    monkeypatch.setattr(deployment, "_end", lambda front, serve, claim: order.append("ended"))
    threads = [Thread(target=found.revive), Thread(target=found.close)]
    threads[0].start()
    assert begun.wait(20)
    threads[1].start()
    threads[1].join(0.2)
    over.set()
    for thread in threads:
        thread.join()
    assert order == ["deployed", "ended"]


@pytest.mark.parametrize("wait", [True, False])
def test_replicas_plan_with_the_memory_of_their_layout(ray: Any, monkeypatch: pytest.MonkeyPatch, wait: bool) -> None:
    from ray import serve

    given: list[Any] = []

    def run_many(targets: list[Any], **options: bool) -> list[str]:
        given.extend([targets[0].target._bound_deployment.init_args[0].memory, set(options.values())])
        return ["handle"]

    monkeypatch.setattr(ray, "nodes", list)
    monkeypatch.setattr(serve, "run_many", run_many)
    layout = LAST.last_resort(["slow"])
    assert layout is not None
    assert deployment._deploy("front", SETTINGS, (1, 2), Claim(), layout, wait) == "handle"
    assert given == [{"node": 7, "slow": 800}, {wait}]


def test_several_servers_fit_in_a_small_cluster() -> None:
    ray = SimpleNamespace(nodes=lambda: [{"NodeID": "node", "Resources": {"CPU": 2.0}}])
    options = deployment._options(ray, "front", SETTINGS, (2, 2), Claim(), LAYOUT)
    assert 3 * 2 * sum(bundle["CPU"] for bundle in options["placement_group_bundles"]) <= 2.0

"""Starts replicas while other fronts use the cluster; without Ray."""

from __future__ import annotations

from threading import Event
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest

from localllm.cluster.worker import Source
from localllm.distributed import deployment
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
    deployment._end("front", SimpleNamespace())  # nothing answers there
    monkeypatch.setattr(deployment, "reachable", lambda address: True)
    monkeypatch.setattr(deployment, "MOST_ENDING_SECONDS", 0.2)
    over, began = Event(), monotonic()
    deployment._end("front", SimpleNamespace(delete=lambda name: over.wait(60)))
    assert monotonic() - began < 30  # the call itself lasts a minute
    over.set()


def test_several_servers_fit_in_a_small_cluster() -> None:
    ray = SimpleNamespace(nodes=lambda: [{"NodeID": "node", "Resources": {"CPU": 2.0}}])
    options = deployment._options(ray, "front", SETTINGS, (2, 2), LAYOUT)
    assert 3 * 2 * sum(bundle["CPU"] for bundle in options["placement_group_bundles"]) <= 2.0

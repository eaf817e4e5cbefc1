"""Stages that are started again, with actors in this process; without Ray."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from localllm.cluster.errors import ClusterError, StageLost
from localllm.distributed import stages
from localllm.distributed.machines import Machine
from localllm.distributed.measure import Facts
from localllm.distributed.stages import RayStages

CUT: Any = SimpleNamespace(stages=2)
LAYOUT: Any = None
MACHINE = Machine("node", "machine", "127.0.0.1", Facts("", "", "machine"))


class RayError(Exception):
    """Of Ray."""


class Actor:
    """A stage, which knows whether it has its layers. Its calls return what Ray's references lead to."""

    def __init__(self) -> None:
        self.opened = self.killed = False
        self.process, self.prepare = SimpleNamespace(remote=lambda: 0), SimpleNamespace(remote=lambda request: None)


def started(monkeypatch: pytest.MonkeyPatch, *opens: Callable[[], None]) -> RayStages:
    """Return two stages, the second one in an actor. `opens` are called when it loads its layers."""
    left = list(opens)
    ray = SimpleNamespace(
        exceptions=SimpleNamespace(RayError=RayError), get=lambda reference, timeout=0.0: reference,
        wait=lambda asked, num_returns, timeout: (asked, []), nodes=lambda: [{"NodeID": "node", "Alive": True}],
        kill=lambda actor, no_restart: setattr(actor, "killed", True),
    )  # fmt: skip
    found = RayStages(ray, 2)
    found._processes = [stages._Process(1, MACHINE)]

    def open_(started: list[Any], cut: Any, layout: Any) -> None:
        left.pop(0)()
        for process in started:
            process.actor.opened = True

    def ring(cut: Any, layout: Any) -> Any:
        assert all(process.actor.opened for process in found._processes), "a stage has no layers"
        return "ring"

    monkeypatch.setattr(found, "_open", open_)
    monkeypatch.setattr(found, "_ring", ring)
    monkeypatch.setattr(found, "_actor", lambda process, cpus: Actor())
    return found


def fail(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("error", [StageLost("its process ended"), ClusterError("the file was removed")])
def test_a_stage_that_could_not_load_its_layers_is_started_again(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = started(monkeypatch, partial(fail, error), lambda: None)
    with pytest.raises(type(error)):
        found.connect(CUT, LAYOUT)
    assert found._processes[0].actor is None
    assert found.connect(CUT, LAYOUT) == "ring"

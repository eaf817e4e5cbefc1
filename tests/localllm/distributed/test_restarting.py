"""Stages that are started again, with actors in this process; without Ray."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn

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

    def __init__(self, importing: float = 0.0) -> None:
        """`importing`: seconds until it answers."""
        self.importing, self.opened, self.killed = importing, False, False
        self.process, self.prepare = SimpleNamespace(remote=lambda: self), SimpleNamespace(remote=lambda request: None)


def started(monkeypatch: pytest.MonkeyPatch, *opens: Callable[[], None]) -> RayStages:
    """Return two stages, the second one in an actor. `opens` are called when it loads its layers."""
    left = list(opens)
    ray = SimpleNamespace(
        exceptions=SimpleNamespace(RayError=RayError), get=answered,
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


def answered(actor: Actor, timeout: float = 60.0) -> Actor:
    return actor if actor.importing < timeout else fail(RayError("it does not answer in time"))


def fail(error: Exception) -> NoReturn:
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


def test_the_actors_of_a_group_are_waited_for_while_they_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once all stages run, a silent one is replaced."""
    found, slow = started(monkeypatch, lambda: None, lambda: None), Actor(5.0)
    [process] = found._processes
    process.spare = slow
    assert found.connect(CUT, LAYOUT) == "ring"
    assert (process.actor, slow.killed) == (slow, False)
    process.actor, process.spare = None, Actor(5.0)
    other = process.spare
    assert found.connect(CUT, LAYOUT) == "ring"
    assert (process.actor is other, other.killed) == (False, True)


@pytest.mark.usefixtures("ray")  # which closing imports
@pytest.mark.parametrize("fails", [True, False])
def test_stages_that_load_while_they_are_closed_end(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """The first stage could not be loaded; the others do not know it yet."""
    found = started(monkeypatch, lambda: None)
    processes = found._processes

    def ring(cut: Any, layout: Any) -> str:
        found.close()
        loaded.append(Actor())  # Ray starts an actor that was asked for before
        processes[0].actor = loaded[0]
        return fail(StageLost("no ring")) if fails else "ring"

    loaded = list[Actor]()
    monkeypatch.setattr(found, "_ring", ring)
    with pytest.raises(StageLost) if fails else nullcontext():
        found.connect(CUT, LAYOUT)
    assert loaded[0].killed
    assert processes[0].spare is None or processes[0].spare.killed

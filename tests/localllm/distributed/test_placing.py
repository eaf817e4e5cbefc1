"""Replicas are placed by the measured memory and bandwidth of the machines, and slow machines are left out."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from localllm.cluster.errors import ClusterError
from localllm.cluster.sizing import Sizes
from localllm.distributed import deployment
from localllm.distributed.apart import Claim
from localllm.distributed.machines import RESERVE, RING_PORTS, Machine
from localllm.distributed.measure import Facts
from localllm.distributed.placing import ReplicaLayout, check_ports, processors, replica_layout
from localllm.distributed.replica import ReplicaSettings
from localllm.generation.interfaces import SchedulerLimits
from localllm.options import LoadOptions
from tests.localllm.distributed.test_deployment import HOME

LAYERS, LAYER = 10, 100 << 20
SIZES = Sizes(tuple(range(1, LAYERS)), (LAYER,) * LAYERS, (LAYER,) * LAYERS)
PLENTY = 64 << 30
STAGED = ReplicaSettings(HOME, "version", LoadOptions(), SchedulerLimits(1), 2)
RAY = SimpleNamespace(nodes=lambda: [{"NodeID": "large", "Resources": {"CPU": 2.0}}])


def machine(name: str, bandwidth: float, memory: int = PLENTY) -> Machine:
    free = max(int(memory / 0.9) + 1, memory + RESERVE)
    return Machine(name, name, name, Facts("", "", name, free=free, bandwidth=bandwidth, backend="cpu"))


def layout(*machines: Machine, stages: int = 0, replicas: tuple[int, int] = (1, 1), prompts: int = 0) -> ReplicaLayout:
    return replica_layout(machines, SIZES, 0.001, stages, replicas, prompts)


def test_a_slow_machine_gets_no_replica() -> None:
    found = layout(machine("slow", 1e9), machine("fast", 10e9))
    assert found.stages == 1
    assert found.allowed == ("fast",)
    assert found.excluded == ("slow",)
    assert found.lines[0].startswith("slow is left out: it would not make a token faster (reads 1.0 GB/s")


def test_a_slow_machine_gets_a_replica_if_no_other_one_is_left() -> None:
    found = layout(machine("slow", 1e9), machine("fast", 10e9), machine("small", 10e9, LAYER))
    assert found.excluded == ("slow", "small")
    for alive in (["slow", "fast"], ["slow", "new", "small"], ["small"], []):
        assert found.last_resort(alive) is None
    last = found.last_resort(["slow", "small"])
    assert last is not None
    assert last.selector == {"ray.io/node-id": "!in(small)"}  # it has too little memory
    assert last.allowed == ("fast", "slow")
    assert last.memory["slow"] == int(0.8 * machine("slow", 1e9).facts.free)
    assert last.last_resort(["slow"]) is None  # admitted already


def test_an_equal_machine_is_allowed_after_a_fault() -> None:
    found = layout(machine("one", 10e9), machine("two", 9e9))
    assert found.allowed == ("one", "two")
    assert found.lines == ()


def test_a_machine_without_memory_is_left_out() -> None:
    found = layout(machine("one", 10e9), machine("small", 20e9, 2 * LAYER))
    assert found.allowed == ("one", "small")  # it is fast enough to take two layers
    assert found.stages == 2
    found = layout(machine("one", 20e9), machine("small", 20e9, LAYERS * LAYER - 1))
    assert found.excluded == ("small",)
    assert "it has too little memory" in found.lines[0]


def test_a_model_that_fits_no_machine_has_as_few_stages_as_needed() -> None:
    small = [machine(str(number), 10e9, 4 * LAYER) for number in range(4)]
    assert layout(*small).stages == 3
    assert layout(*small, stages=4).stages == 4


def test_a_second_replica_uses_another_machine_unless_sharing_is_faster() -> None:
    fast, half, slow = machine("fast", 10e9), machine("half", 6e9), machine("slow", 2e9)
    assert layout(fast, half, replicas=(2, 2)).allowed == ("fast", "half")
    found = layout(fast, slow, replicas=(2, 2))
    assert found.allowed == ("fast",)  # half of it is faster than the slow one
    assert layout(fast, slow, replicas=(6, 6)).allowed == ("fast", "slow")


def test_replicas_do_not_gather_on_one_machine() -> None:
    """They would all be lost with it."""
    one, two, three = (machine(name, 10e9) for name in ("one", "two", "three"))
    assert [layout(one, two, three, replicas=(1, most)).per_node for most in (1, 3, 4)] == [1, 1, 2]
    assert layout(one, two, three, replicas=(1, 3)).lines == ()
    told = "3 machines for 4 replicas: a failed machine may end 2 replicas"
    assert layout(one, two, three, replicas=(1, 4)).lines == (told,)
    fast = machine("fast", 40e9)
    assert layout(fast, machine("half", 12e9), replicas=(4, 4)).per_node == 3
    found = layout(fast, machine("half", 12e9), stages=2, replicas=(4, 4))
    assert found.per_node == 2  # first stages, with the others elsewhere
    found = layout(machine("slow", 1e9), fast, replicas=(2, 2))
    last = found.last_resort(["slow"])
    assert last is not None
    assert (found.per_node, last.per_node) == (2, 2)
    assert layout(one, two, prompts=1).per_node == 1  # Ray does not count those for prompts
    assert layout(one, replicas=(1, 1), prompts=2).per_node == 1


def test_replicas_share_the_memory_of_the_last_machines() -> None:
    fast, slow, slower = machine("fast", 40e9), machine("slow", 1e9), machine("slower", 0.5e9, PLENTY // 2)
    found = layout(slow, slower, fast, replicas=(3, 3))
    for alive, sharing in ((["slow", "slower"], 2), (["slower"], 3)):
        last = found.last_resort(alive)
        assert last is not None
        assert last.per_node == sharing
        shares = {each.node: int(0.8 * each.facts.free) // sharing for each in (slow, slower) if each.node in alive}
        assert {node: last.memory[node] for node in alive} == shares
    last = layout(slow, slower, fast, machine("other", 40e9), stages=2).last_resort(["slow", "slower"])
    assert last is not None  # two stages, one on each machine
    assert last.memory["slow"] == int(0.8 * 2 * slower.facts.free)


def test_replicas_share_the_memory_of_a_machine() -> None:
    only = machine("only", 10e9, 2 * LAYERS * LAYER)
    assert layout(only, replicas=(2, 2)).lines == ()
    with pytest.raises(ClusterError, match=r"^only 2 of 3 replicas fit: the model does not fit"):
        layout(only, replicas=(3, 3))
    assert layout(only, replicas=(1, 3)).lines == ("the machines have memory for 2 replicas",)


def test_more_stages_than_machines_share_them() -> None:
    assert layout(machine("a", 1e9), machine("b", 1e9), stages=3).stages == 3
    with pytest.raises(ClusterError, match="into at most 10"):
        layout(machine("a", 1e9), stages=11)


@pytest.mark.parametrize(("have", "bundles"), [([1, 1], 2), ([1, 1], 4), ([8, 2, 4], 5), ([2], 7), ([], 3), ([1], 500)])
def test_all_bundles_fit_on_the_nodes(have: list[float], bundles: int) -> None:
    each = processors(have, bundles)
    assert 0 < each <= 1
    if have and bundles < 100:
        assert sum(int(processors / each) for processors in have) >= bundles


def test_replicas_share_the_memory_of_their_machine() -> None:
    one, two = machine("one", 30e9), machine("two", 12e9, PLENTY // 2)
    found = layout(one, two, stages=1, replicas=(3, 3))  # two on the fast machine
    assert found.memory == {"one": int(0.8 * (one.facts.free // 2)), "two": int(0.8 * two.facts.free)}
    found = layout(one, two, stages=2, replicas=(2, 2))  # each on both
    assert set(found.memory.values()) == {int(0.8 * (one.facts.free // 2 + two.facts.free // 2))}
    assert layout(one, stages=2).memory == {"one": int(0.8 * one.facts.free)}  # two stages of one replica


def test_replicas_in_stages_share_the_memory_of_their_machines() -> None:
    """Each machine has a first stage, and a later one of another replica."""
    one, two, slow = machine("one", 10e9), machine("two", 9e9), machine("slow", 1e9)
    found = layout(one, two, slow, stages=2, replicas=(2, 2))
    assert found.memory == dict.fromkeys(("one", "two"), int(0.8 * 2 * (one.facts.free // 2)))
    assert (found.per_node, found.excluded) == (1, ("slow",))
    found = layout(one, two, machine("three", 10e9), stages=2, replicas=(3, 3))
    assert set(found.memory) == {"one", "two", "three"}
    found = layout(machine("fast", 40e9), machine("half", 12e9), stages=2, replicas=(3, 3))
    assert (found.per_node, set(found.memory)) == (2, {"fast", "half"})
    settings = ReplicaSettings(HOME, "version", LoadOptions(), SchedulerLimits(1), memory={"one": 9, "two": 7})
    assert [settings.memory_on(node) for node in ("one", "two", "joined later")] == [9, 7, 7]
    assert replace(settings, memory={}).memory_on("one") == 0  # a replica for prompts


def test_a_first_stage_runs_where_its_encoders_fit() -> None:
    """The other machine has memory for six layers, and the encoders take as much."""
    sizes = replace(SIZES, encoders=6 * LAYER)
    large, small = machine("large", 10e9, 40 * LAYER), machine("small", 10e9, 6 * LAYER)
    found = replica_layout([large, small], sizes, 0.001, 2, (2, 2))
    assert set(found.memory) == {"large"}
    assert found.lines == ("2 machines for 2 replicas: a failed machine may end 2 replicas",)
    assert (found.per_node, found.later) == (2, ("small",))
    options = deployment._options(RAY, "front", STAGED, (2, 2), Claim("resource"), found)
    assert options["placement_group_bundle_label_selector"] == [{"ray.io/node-id": "!in(small)"}, {}]
    assert options["placement_group_bundles"][0]["resource"] == 0.5
    found = replica_layout([large, small, machine("slow", 1e9, 6 * LAYER)], sizes, 0.001, 2, (2, 2))
    assert found.first_selector == {"ray.io/node-id": "!in(slow,small)"}
    assert found.selector == {"ray.io/node-id": "!in(slow)"}
    assert found.last_resort(["slow"]) is None  # no first stage fits there


def test_replicas_for_prompts_need_ports() -> None:
    limited, free = replace(machine("one", 10e9), ports=(7450, 7450 + RING_PORTS)), machine("two", 10e9)
    check_ports([limited], 10, 1)
    check_ports([limited], 31, 0)  # events then travel through Ray
    check_ports([limited, limited], 4, 7)
    check_ports([limited, free], 99, 9)
    told = r"^prefill_replicas=5: connecting 3 replicas takes 33 ports, and the machines have 30 for them; give fewer"
    with pytest.raises(ClusterError, match=told):
        check_ports([limited], 3, 5)

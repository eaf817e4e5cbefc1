"""How replicas meet the ones that evaluate prompts, without Ray: equal cache blocks, one meeting for each, stages."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

zmq = pytest.importorskip("zmq", reason="replicas need pyzmq")

from localllm.base.errors import LocalLLMError  # noqa: E402
from localllm.cluster.errors import ClusterError  # noqa: E402
from localllm.cluster.secured import Peer  # noqa: E402
from localllm.cluster.zeromq import Endpoint  # noqa: E402
from localllm.distributed import prompt_replica  # noqa: E402
from localllm.distributed.placing import ReplicaLayout  # noqa: E402
from localllm.distributed.prompt_replica import PromptReplica, PromptReplicas  # noqa: E402
from localllm.distributed.replica import MEETING  # noqa: E402


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray reads its token when it is imported, so the first import is that of the tests with a cluster."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> PromptReplica:
    monkeypatch.setattr(prompt_replica, "new_endpoint", lambda context: Endpoint(context))
    found = PromptReplica.__new__(PromptReplica)
    model: Any = SimpleNamespace(context=1024, executable=SimpleNamespace(cache_layout="blocks of f16"))
    found._problem, found._model, found._meeting, found._servers = "", model, {}, {}
    return found


def test_other_cache_blocks_are_refused_with_both_names(replica: PromptReplica) -> None:
    with pytest.raises(
        ClusterError, match=r"^its cache is blocks of f16, this one blocks of q8_0; .* the same backend"
    ):
        asyncio.run(replica.meet("a", zmq.curve_keypair()[0], "blocks of q8_0"))
    assert not replica._meeting


def test_a_meeting_that_was_given_up_keeps_no_port(replica: PromptReplica) -> None:
    keys = [zmq.curve_keypair()[0] for _ in range(4)]

    def meet(actor: str, key: bytes) -> Endpoint:
        peer = asyncio.run(replica.meet(actor, key, "blocks of f16"))
        endpoint = replica._meeting[actor].endpoint
        assert endpoint.peer == peer
        return endpoint

    first, second, other = meet("a", keys[0]), meet("a", keys[1]), meet("b", keys[2])
    assert [each._pull.closed for each in (first, second, other)] == [True, False, False]
    with pytest.raises(ClusterError, match="given up"):
        asyncio.run(replica.join("a", Peer("tcp://127.0.0.1:1", keys[0])))
    held = replica._meeting["a"]
    replica._meeting["a"] = replace(held, began=held.began - 2 * MEETING)  # its replica died
    third = meet("c", keys[3])
    assert second._pull.closed
    assert sorted(replica._meeting) == ["b", "c"]
    for each in (other, third):
        each.close()


def test_machines_that_need_stages_are_refused() -> None:
    with pytest.raises(LocalLLMError) as raised:
        PromptReplicas.start("front", SimpleNamespace(), 2, ReplicaLayout(3, ("one",), ()), lambda text: None)  # type: ignore[arg-type]
    problem = "these machines run the model in 3 stages, but such a replica has all layers in one process; leave it out"
    assert str(raised.value) == f"prefill_replicas=2: {problem}"

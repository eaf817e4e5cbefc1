"""A replica whose machine does not have the model's file: it fetches what it needs, once, and gives the same tokens."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import localllm
from localllm.distributed.files import Home
from localllm.distributed.messages import Ask
from localllm.distributed.replica import Replica, ReplicaSettings
from localllm.generation.interfaces import SchedulerLimits
from localllm.generation.request import Failed, Request, Token
from localllm.gguf import open_gguf
from localllm.options import LoadOptions, SamplingOptions
from tests.localllm.distributed.conftest import TwoNodes
from tests.models.kit import KIT

pytestmark = pytest.mark.xdist_group("ray")
OPTIONS = LoadOptions(threads=1, ctx_size=256)
PROMPT, COUNT = [3, 1, 4, 1, 5], 12


def answered(replica: Replica) -> list[int]:
    """Return the tokens of a request to a replica in this process."""
    sampling = SamplingOptions(temperature=0.0)
    ask = Ask.of("front", 1, Request(PROMPT, sampling, COUNT, ignore_eos=True), (), ())

    async def run() -> list[Any]:
        await replica.answer(ask)
        outbox = replica._outbox("front")
        report = await outbox.take(outbox.turn(), 0)
        assert report is not None
        return [event for _, event in report.events]

    events = asyncio.run(run())
    assert not [event.error for event in events if isinstance(event, Failed)]
    return [event.token for event in events if isinstance(event, Token)]


@pytest.mark.parametrize("stages", [1, 2])
def test_a_replica_without_the_file_fetches_what_it_needs(
    cluster: TwoNodes, stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = KIT["llama-gqa"].write(tmp_path / "model.gguf")
    monkeypatch.setattr("localllm.distributed.parts.SMALL", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache" / "localllm").mkdir(mode=0o700, parents=True)
    with open_gguf(path) as file:
        home = Home.of(file, cluster.nodes[1])
        first, last = (file.tensors[name] for name in ("blk.0.attn_q.weight", "output_norm.weight"))
    elsewhere = replace(home, source=replace(home.source, path=str(tmp_path / "nowhere" / "model.gguf")))
    settings = ReplicaSettings(elsewhere, localllm.__version__, OPTIONS, SchedulerLimits(1), stages)
    with localllm.load(path, OPTIONS) as whole:
        reply = whole.generate(PROMPT, max_tokens=COUNT, temperature=0.0, ignore_eos=True)
        str(reply)
    changed = []
    for _ in range(3 - stages):
        replica = Replica(settings)
        assert not replica._problem
        assert answered(replica) == list(reply.tokens)
        assert any("of the model, and keeps it" in note for note in replica._notes)
        replica._scheduler.close()
        if replica._stages is not None:
            replica._stages.close()
        replica._model.close()
        (part,) = (tmp_path / "cache" / "localllm" / "parts").glob("*/model.gguf")
        changed.append(part.stat().st_mtime_ns)
        data, there = part.read_bytes(), path.read_bytes()
        assert len(data) == len(there)
        places = [slice(each.place[1], each.place[1] + each.nbytes) for each in (first, last)]
        assert data[places[0]] == there[places[0]]
        assert data[places[1]] == (there[places[1]] if stages == 1 else bytes(last.nbytes))  # a hole
        assert (data == there) == (stages == 1)
    assert changed[0] == changed[-1]  # not fetched again


def test_a_file_that_cannot_be_read_any_more_is_said(cluster: TwoNodes, tmp_path: Path) -> None:
    path = KIT["llama-gqa"].write(tmp_path / "model.gguf")
    with open_gguf(path) as file:
        home = Home.of(file, cluster.nodes[1])
    path.unlink()
    replica = Replica(ReplicaSettings(home, localllm.__version__, OPTIONS, SchedulerLimits(1)))
    assert "the model cannot be fetched: " in replica._problem
    assert "No such file" in replica._problem


def test_a_replica_takes_no_more_than_its_share_of_the_memory(cluster: TwoNodes, tmp_path: Path) -> None:
    path = KIT["llama-gqa"].write(tmp_path / "model.gguf")
    with open_gguf(path) as file:
        home = Home.of(file, cluster.nodes[0])
    with localllm.load(path, OPTIONS, sequences=8) as whole:
        needed = whole.executable.memory
        blocks = whole.pool.blocks
    found = []
    for node in (*cluster.nodes, ""):
        memory = {node: needed.weights + needed.cache // 2} if node else {}
        replica = Replica(ReplicaSettings(home, localllm.__version__, OPTIONS, SchedulerLimits(8), memory=memory))
        assert not replica._problem
        found.append(replica._model.pool.blocks)
        replica._scheduler.close()
        replica._model.close()
    assert 0 < found[0] < blocks
    assert found[1:] == [found[0], blocks]  # a machine without a share may have as much as another one

"""Models in stages on a cluster of two nodes: the same bits, placement, and lost stages."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np
import pytest

import localllm
from localllm.backends.base import F16_CACHE
from localllm.base.notices import NotUsed
from localllm.cluster.errors import ClusterError, StageLost
from localllm.distributed import machines, stages
from localllm.distributed.machines import Machines
from localllm.distributed.measure import Facts, Request
from localllm.distributed.stages import RayStages
from localllm.engine import BlockPool, Engine
from localllm.engine.session import Session
from localllm.gguf import open_gguf
from localllm.loading.loader import limits_of
from localllm.loading.recording import Recording
from localllm.loading.resolve import resolve
from localllm.loading.splitting import Whole
from localllm.model import Model
from localllm.options import LoadOptions
from localllm.plan import BLOCK
from tests.localllm.distributed.conftest import TwoNodes
from tests.localllm.support import REPOSITORY
from tests.localllm.support import localllm as cli
from tests.models.kit import KIT
from tests.processes import gone

pytestmark = pytest.mark.xdist_group("ray")
PROMPT = "Once upon a time"
RUN = ["run", "demo", PROMPT, "-n", "12", "--seed", "3"]
TOKENS = list(range(40))
PROGRAM_SECONDS = 120.0  # for a program that runs meanwhile


@contextmanager
def loaded(cluster: TwoNodes, path: Any, count: int, **options: Any) -> Iterator[tuple[Model, RayStages]]:
    """Load a model in `count` stages."""
    split = RayStages(cluster.ray, count)
    try:
        with localllm.load(path, split=split, threads=1, **options) as model:
            yield model, split
    finally:
        split.close()


@pytest.fixture(scope="module")
def halves(cluster: TwoNodes) -> Iterator[tuple[Model, RayStages]]:
    """The bundled model in two stages. A test may kill the second one, which is started again."""
    with loaded(cluster, "demo", 2) as found:
        yield found
        (process,) = found[1]._processes
    assert gone(process.process)


def logits_of(engine: Engine, tokens: list[int]) -> np.ndarray:
    session = Session(engine)
    found = session.evaluate(tokens, logits=True).copy()
    session.close()
    return found


def again(model: Model) -> Engine:
    """Return an engine over the stages that are connected again, as the loop does after a loss."""
    executable: Any = model.engine.executable
    executable.restore()
    limits = model.engine.limits
    windowed = BlockPool(limits.window_blocks, BLOCK, model.plan.window) if limits.window_blocks else None
    return Engine(executable, BlockPool(limits.blocks, BLOCK, windowed=windowed), limits)


def test_two_nodes_give_the_tokens_and_logits_of_one_process(
    cluster: TwoNodes, halves: tuple[Model, RayStages]
) -> None:
    model, split = halves
    with localllm.load("demo", threads=1) as whole:
        np.testing.assert_array_equal(model.logits(TOKENS), whole.logits(TOKENS))
        for options in ({"temperature": 0.0}, {"temperature": 0.9, "seed": 7}):
            assert str(model.generate(PROMPT, max_tokens=24, **options)) == str(
                whole.generate(PROMPT, max_tokens=24, **options)
            )
        (process,) = split._processes
        assert process.machine.node == cluster.nodes[1]
        assert process.process != os.getpid()
        where = (
            r"layers 0(-\d)? here \(cpu\), (\d(-\d)? and )?the output on [\d.]+ \(node 2\) \(cpu\); .* ms a token .*"
        )
        assert re.fullmatch(where, model.placed)


def test_a_hybrid_model_with_a_head_that_drafts(cluster: TwoNodes, tmp_path: Path) -> None:
    """Recurrent states stay in the stages. The last stage has the head, which the program may find too slow to use."""
    path = KIT["qwen35-mtp"].write(tmp_path / "model.gguf")
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    found = []
    for spec in ("off", "mtp"):
        with warnings.catch_warnings(), loaded(cluster, path, 2, spec=spec) as (model, _):
            warnings.simplefilter("ignore", NotUsed)
            found.append(answered(model, tokens))
            assert bool(model.engine.draft_heads) == (spec == "mtp")
    with localllm.load(path, threads=1, spec="off") as whole:
        found.append(answered(whole, tokens))
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 12


def answered(model: Model, tokens: list[int]) -> list[int]:
    reply = model.generate(tokens, max_tokens=12, temperature=0.0, ignore_eos=True)
    str(reply)
    return list(reply.tokens)


def test_a_lost_stage_is_started_again_alone(cluster: TwoNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped as a machine hangs, and killed. The other stage keeps its process, and its weights. Then the stage is
    lost with its machine (here it only seems so), and another machine takes it.
    """
    with loaded(cluster, "demo", 3) as (model, split):
        engine = model.engine
        expected = logits_of(engine, TOKENS)
        kept, lost = split._processes
        assert split.restarted == 0
        assert model.prompt_alignment == 1  # prefixes of any length are reused
        assert kept.machine.node == cluster.nodes[0]
        assert lost.machine.node == cluster.nodes[1]
        before = kept.process
        for sent in (signal.SIGSTOP, signal.SIGKILL):
            process = lost.process
            os.kill(process, sent)
            with pytest.raises(StageLost, match="ended"):
                logits_of(engine, TOKENS)
            engine = again(model)
            assert kept.process == before
            assert lost.process != process
            assert gone(process)
            np.testing.assert_array_equal(logits_of(engine, TOKENS), expected)
        # Ray has moved the bundle of the stage (here it only seems so), to a machine that was not measured before
        split._group, split._machines._found[1:], lost.machine = lost.group, [], replace(lost.machine, node="gone")
        os.kill(lost.process, signal.SIGKILL)
        with pytest.raises(StageLost, match="ended"):
            logits_of(engine, TOKENS)
        engine = again(model)
        assert lost.machine.node == split._machines._found[1].node == cluster.nodes[1]
        np.testing.assert_array_equal(logits_of(engine, TOKENS), expected)
        split._group = None
        monkeypatch.setattr(Machines, "runs", lambda self, machine: machine.node == cluster.nodes[0])
        os.kill(lost.process, signal.SIGKILL)
        with pytest.raises(StageLost, match="ended"):
            logits_of(engine, TOKENS)
        engine = again(model)
        assert lost.machine.node == cluster.nodes[0]
        assert kept.process == before
        np.testing.assert_array_equal(logits_of(engine, TOKENS), expected)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_an_answer_goes_on_after_its_stage_was_lost(halves: tuple[Model, RayStages], sent: signal.Signals) -> None:
    model, split = halves
    with localllm.load("demo", threads=1) as whole:
        expected = str(whole.generate(PROMPT, max_tokens=60, temperature=0.8, seed=4))
    pieces = []
    for piece in model.generate(PROMPT, max_tokens=60, temperature=0.8, seed=4):
        pieces.append(piece.text)
        if len(pieces) == 5:
            os.kill(split._processes[0].process, sent)
    assert "".join(pieces) == expected


def test_a_machine_without_the_file_fetches_its_part_once(
    cluster: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = KIT["llama-gqa"].write(tmp_path / "model.gguf")
    made = stages._model

    def elsewhere(*given: Any) -> Any:
        model = made(*given)
        return replace(model, sources=(replace(model.sources[0], path=str(tmp_path / "nowhere.gguf")),))

    monkeypatch.setattr(stages, "_model", elsewhere)
    monkeypatch.setattr("localllm.distributed.parts.SMALL", 0)
    choose, chosen = stages.place, []

    def place(*given: Any) -> Any:
        chosen.append(choose(*given))
        return chosen[0]  # another measurement could choose another cut, which needs other tensors

    monkeypatch.setattr(stages, "place", place)
    with localllm.load(path, threads=1) as whole:
        expected = whole.logits(TOKENS)
    changed = []
    for _ in range(2):
        with loaded(cluster, path, 2) as (model, _):
            np.testing.assert_array_equal(model.logits(TOKENS), expected)
        (part,) = (cluster.homes[1] / "localllm" / "parts").glob("*/model.gguf")
        assert part.stat().st_size == path.stat().st_size
        changed.append(part.stat().st_mtime_ns)
        first = model.file.tensors["blk.0.attn_q.weight"]
        assert not any(part.read_bytes()[first.place[1] : first.place[1] + first.nbytes])  # a hole
    assert changed[0] == changed[1]


def test_another_localllm_is_refused(halves: tuple[Model, RayStages], monkeypatch: pytest.MonkeyPatch) -> None:
    found, request = halves[1]._machines, Request("cpu", threads=1)  # not measured yet
    with monkeypatch.context() as changed:
        changed.setattr(machines.localllm, "__version__", "0.0.1")
        with pytest.raises(ClusterError, match=r"^[\d.]+ \(node 2\) has localllm .* version on both$"):
            found.measured(request)
    monkeypatch.setattr(machines, "sources", lambda: "other")
    with pytest.raises(ClusterError, match=r"^[\d.]+ \(node 2\) has other .* checkout on both$"):
        found.measured(request)


def test_the_layers_follow_the_measured_memory_and_bandwidth(
    cluster: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow machine is left out; one stage says so; a machine without memory passes its layers on."""
    file = open_gguf(resolve("demo"))
    plan = Recording(256).plan(file)
    whole = Whole(file, None, Recording(256), plan, limits_of(256, plan), F16_CACHE, LoadOptions(backend="cpu"))

    def measured(own: tuple[int, float], other: tuple[int, float], count: int) -> str:
        def facts(found: Facts, values: tuple[int, float]) -> Facts:
            return replace(found, free=values[0], bandwidth=values[1])

        monkeypatch.setattr(machines, "measure", lambda request, threads: facts(of_cpu(request), own))
        monkeypatch.setattr(
            Machines,
            "_measure_others",
            lambda self, nodes, request, *given: {each["NodeID"]: facts(of_cpu(request), other) for each in nodes},
        )
        split = RayStages(cluster.ray, count)
        try:
            if (backend := split.backend(whole, 1)) is not None:
                backend.close()
            return split.line
        finally:
            split.close()

    def of_cpu(request: Request) -> Facts:
        return Facts("", "", "", request, 1, 0, 0.0, "cpu", "cpu")

    plenty, few = 1 << 40, machines.RESERVE + (300 << 10)
    assert measured((plenty, 1e10), (plenty, 1e9), 0).startswith("all layers here (cpu)")
    assert "(node 2) is left out: it would not make a token faster (reads 1.0 GB/s" in measured(
        (plenty, 1e10), (plenty, 1e9), 0
    )
    assert measured((plenty, 1e6), (plenty, 1e12), 0).startswith("layers 0 here (cpu), 1-3 and the output on")
    assert measured((plenty, 1e9), (plenty, 1e9), 2).startswith("layers 0-")
    with pytest.raises(ClusterError, match="the model does not fit"):
        measured((few, 1e9), (few, 1e9), 0)
    file.close()


def killed_driver(address: str) -> tuple[bool, bool]:
    """Kill a program with two other stages. One of them is stopped, so it notices nothing. Return whether each ends."""
    code = (
        "import sys, time, localllm\n"
        "from localllm.distributed.attach import attached\n"
        "from localllm.distributed.stages import RayStages\n"
        f"with attached({address!r}) as ray:\n"
        "    split = RayStages(ray, 3)\n"
        "    model = localllm.load('demo', split=split, threads=1)\n"
        "    print(*[process.process for process in split._processes], flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        late = Timer(PROGRAM_SECONDS, driver.kill)
        late.start()
        first, second = map(int, driver.stdout.readline().split())
        late.cancel()
        os.kill(second, signal.SIGSTOP)
        driver.kill()
    return gone(first), gone(second)  # Ray gives a process that is stopped five seconds


def run_in_stages(address: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "localllm", *RUN, "--ray", address, "--stages", "2"],
        cwd=REPOSITORY, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=PROGRAM_SECONDS,
    )  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def meanwhile(cluster: TwoNodes) -> Iterator[dict[str, Future[Any]]]:
    """Programs that mostly wait for Ray. They run while other tests do."""
    with ThreadPoolExecutor() as pool:
        yield {each.__name__: pool.submit(each, cluster.address) for each in (killed_driver, run_in_stages)}


def test_a_driver_that_is_killed_leaves_nothing(meanwhile: dict[str, Future[Any]]) -> None:
    """Ray ends the stages."""
    assert meanwhile["killed_driver"].result(2 * PROGRAM_SECONDS) == (True, True)


def test_the_program_runs_in_stages_on_a_named_cluster(cluster: TwoNodes, meanwhile: dict[str, Future[Any]]) -> None:
    done = meanwhile["run_in_stages"].result(2 * PROGRAM_SECONDS)
    assert done.returncode == 0, done.stderr
    assert done.stdout == cli(*RUN).stdout
    assert done.stderr.count("\n") == 1
    assert f"the output on {cluster.host} (node 2) (cpu)" in done.stderr

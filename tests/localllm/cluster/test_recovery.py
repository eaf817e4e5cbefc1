"""A stage is lost at every message: answers continue with the same tokens as without the loss."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest

import localllm
from localllm.backends.base import Backend
from localllm.backends.cpu.backend import CpuBackend
from localllm.base.errors import LocalLLMError
from localllm.cluster.backend import SplitBackend
from localllm.cluster.cut import even_cut
from localllm.cluster.errors import StageLost
from localllm.cluster.executable import SplitExecutable
from localllm.cluster.ring import Connect
from localllm.engine import CacheLost, SequenceRows
from localllm.generation.interfaces import SchedulerLimits
from localllm.generation.recovery import ATTEMPTS
from localllm.generation.request import Request, Token
from localllm.generation.running import MOST_LOSSES
from localllm.generation.scheduler import Scheduler
from localllm.gguf import open_gguf
from localllm.loading.recording import Recording
from localllm.options import SamplingOptions
from tests.localllm.cluster.crowd import Crowd, split
from tests.localllm.cluster.faults import Faults
from tests.localllm.cluster.support import Processes
from tests.localllm.engine.support import LIMITS, engine_of
from tests.localllm.generation.speculation.support import eager
from tests.localllm.generation.support import Stepped, ask
from tests.models.kit import KIT

OPTIONS: dict[str, Any] = {"ctx_size": 256}
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 24}


@contextmanager
def faulty(path: Path, stages: int, spec: str) -> Iterator[tuple[localllm.Model, Faults]]:
    """Open a model in stages whose ring fails as `Faults` says."""
    found: list[Faults] = []

    def connecting(backend: Backend, stages: int) -> Connect:
        found.append(Faults(backend))
        return found[0].connect

    with split(path, stages, connecting, spec=spec, **OPTIONS) as model:
        if spec != "off":
            eager(model)
        found[0].first = [model.executable._first]  # type: ignore[attr-defined]
        yield model, found[0]
    found[0].close()


@pytest.mark.parametrize(
    ("kit", "stages", "spec", "stride"),
    [("llama-gqa", 2, "off", 1), ("qwen35-mtp", 3, "mtp", 7), ("gemma3-12", 2, "ngram", 7)],
)
def test_a_stage_is_lost_at_every_message(kit: str, stages: int, spec: str, stride: int, tmp_path: Path) -> None:
    """Prompts, decoding, drafts, copies, grammars and reused prefixes. Some messages still arrive, and some do not."""
    path = KIT[kit].write(tmp_path / "model.gguf")
    with (
        localllm.load(path, threads=1, spec="off", **OPTIONS) as plain,
        faulty(path, stages, spec) as (model, faults),
    ):
        at, lost = 0, 0
        while True:
            faults.messages, faults.fatal, before = 0, {at}, faults.connections
            crowd = Crowd(plain, model, 3, parallel=3, longest=70, constrained=spec != "off")
            crowd.run(requests=6)
            if faults.messages <= at:
                break
            assert faults.connections == before + 1
            lost, at = lost + 1, at + stride
        assert lost > 60 / stride


def test_drafts_of_lost_steps_are_forgotten(tmp_path: Path) -> None:
    """Two steps with drafts are in flight when a stage is lost. The gains of later steps are recorded."""
    path = KIT["qwen35-mtp"].write(tmp_path / "model.gguf")
    with faulty(path, 3, "mtp") as (model, faults):
        drafts = model.drafts()
        assert drafts is not None
        assert drafts._model is not None
        with Stepped(model, drafts, parallel=3) as it:
            for number in range(3):
                it.ask(Request([5, 6, 7 + number], SamplingOptions(temperature=0.0), 60, ignore_eos=True))
            it.turn(6)
            lost = [each.proposal.round for each in it.running.flights if each.proposal is not None]
            assert len(lost) == 2
            assert None not in lost
            before, faults.fatal = faults.connections, {faults.messages}
            it.finish()
            assert faults.connections == before + 1
            assert not set(lost) & set(drafts._model._rounds)
            assert len(drafts._model._rounds) <= 3


def test_two_faults_while_it_is_restored_and_then_none(tmp_path: Path) -> None:
    """A stage is lost while the stages are connected again: that is tried several times."""
    path = KIT["llama-gqa"].write(tmp_path / "model.gguf")
    with (
        localllm.load(path, threads=1, spec="off", **OPTIONS) as plain,
        faulty(path, 2, "off") as (model, faults),
    ):
        faults.messages, faults.fatal = 0, {30, 31}
        faults.refused = [faults.connections + 2]
        Crowd(plain, model, 3, parallel=3, longest=70).run(requests=6)
        assert faults.refusals == 1
        assert faults.connections == 4


def test_if_it_cannot_be_restored_requests_fail_and_the_next_one_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localllm.generation.recovery._PAUSE", 0.01)
    path = KIT["llama-gqa"].write(tmp_path / "model.gguf")
    with faulty(path, 2, "off") as (model, faults):
        truth = model.generate([5, 6, 7], **GREEDY).tokens
        streams = [model.stepper.stream(Request([5, 6, 7 + n], SamplingOptions(), 20)) for n in range(3)]
        next(streams[0])
        faults.fatal = {faults.messages + 9}
        faults.refused = [*range(faults.connections + 1, faults.connections + 1 + ATTEMPTS)]
        reason = r"^stage 1: its process ended; it could not be restored \(stage 1: no machine is free\); the next"
        for stream in streams:
            with pytest.raises(LocalLLMError, match=reason):
                list(stream)
        assert faults.refusals == ATTEMPTS
        session = model.session()
        with pytest.raises(StageLost, match="stage 1: its process ended"):
            session.evaluate([1, 2, 3], logits=False)
        assert model.generate([5, 6, 7], **GREEDY).tokens == truth


def test_what_was_evaluated_before_a_loss_is_not_used_after_it(tmp_path: Path) -> None:
    """Sequences outside the loop, cached prefixes and slots."""
    path = KIT["llama-gqa"].write(tmp_path / "model.gguf")
    with faulty(path, 2, "off") as (model, faults):
        session = model.session()
        session.evaluate([1, 2, 3], logits=False)
        ids = list(range(3, 80))
        first = model.generate(ids, **GREEDY)
        assert model.generate(ids, **GREEDY).usage.reused_tokens > 60
        faults.fatal = {faults.messages + 3}
        again = model.generate(ids, **GREEDY)
        assert again.tokens == first.tokens
        assert len(model.stepper.core.running.prefixes) == 1
        with pytest.raises(CacheLost, match="the cached tokens were lost with a part of the model; evaluate the text"):
            session.evaluate([4], logits=False)
        assert session.shared([1, 2, 3]) == 0
        assert session.rewind(2) == 0
        session.evaluate([1, 2, 3], logits=False)
        session.close()


def test_a_request_that_breaks_every_stage_fails_and_others_go_on(tmp_path: Path) -> None:
    path = KIT["llama-gqa"].write(tmp_path / "model.gguf")
    with faulty(path, 2, "off") as (model, _):
        truth = model.generate([5, 6, 7], **GREEDY).tokens
        with pytest.MonkeyPatch.context() as patch:
            poison = next(token for token in range(10, 90) if token not in truth)
            patch.setattr(SplitExecutable, "collect", breaking(SplitExecutable.collect, poison))
            bad = model.stepper.stream(Request([poison, 2, 3], SamplingOptions(), 5))
            good = model.stepper.stream(Request([5, 6, 7], SamplingOptions(temperature=0), 24, ignore_eos=True))
            with pytest.raises(LocalLLMError, match=rf"its process ended; this happened {MOST_LOSSES} times"):
                list(bad)
            assert [event.token for event in good if isinstance(event, Token)] == truth
        assert model.generate([5, 6, 7], **GREEDY).tokens == truth


def breaking(collect: Any, token: int) -> Any:
    """Return `collect`, with a stage that is lost by each step with this token."""

    def collecting(executable: SplitExecutable, step: Any) -> Any:
        if (step.batch.tokens == token).any():
            executable._exchange.lost = StageLost("stage 1: its process ended")
        return collect(executable, step)

    return collecting


def test_requests_are_queued_and_cancelled_while_a_stage_comes_back(tmp_path: Path) -> None:
    path = KIT["llama-gqa"].write(tmp_path / "model.gguf")
    with faulty(path, 2, "off") as (model, faults):
        truth = model.generate([5, 6, 7], **GREEDY).tokens
        again = threading.Event()
        reconnect = model.executable._reconnect  # type: ignore[attr-defined]
        model.executable._reconnect = lambda: again.wait(30) and reconnect()  # type: ignore[attr-defined]
        with Scheduler(model.new_core(SchedulerLimits())) as scheduler:
            greedy = Request([5, 6, 7], SamplingOptions(temperature=0), 24, ignore_eos=True)
            faults.fatal = {faults.messages + 10}
            first, other = ask(scheduler, greedy), ask(scheduler, greedy)
            until = monotonic() + 20
            while scheduler._stepper.core._recovery is None and monotonic() < until:
                sleep(0.01)
            new = ask(scheduler, greedy)
            assert other.ticket is not None
            other.ticket.cancel()
            began = monotonic()
            assert other.result().reason == "cancelled"
            assert monotonic() - began < 5
            assert not first.over.is_set()
            again.set()
            assert first.result().reason == new.result().reason == "length"
            assert first.tokens == new.tokens == truth


def test_the_time_of_a_recovery_includes_the_pauses_between_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica reports it, so that its front sends it no request meanwhile."""
    monkeypatch.setattr("localllm.generation.recovery._PAUSE", 0.1)
    path = KIT["llama-gqa"].write(tmp_path / "model.gguf")
    with faulty(path, 2, "off") as (model, faults), Scheduler(model.new_core(SchedulerLimits())) as scheduler:
        seen: list[float] = []
        reconnect = model.executable._reconnect  # type: ignore[attr-defined]
        model.executable._reconnect = lambda: (seen.append(scheduler.recovering), reconnect())[1]  # type: ignore[attr-defined]
        faults.fatal = {faults.messages + 10}
        faults.refused = [faults.connections + 1, faults.connections + 2]
        assert ask(scheduler, Request([5, 6, 7], SamplingOptions(temperature=0), 24)).result().reason
        assert len(seen) == 3
        assert seen[1] > 0.1
        assert seen[2] > seen[1] + 0.2
        assert scheduler.recovering == 0


@pytest.mark.parametrize("fails", [False, True])
def test_a_recovery_ends_although_all_requests_have_left(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A front sends them to another replica. This one does not seem to wait for its stage ever after, and does not fail
    its next request.
    """
    monkeypatch.setattr("localllm.generation.recovery._PAUSE", 0.01)
    path = KIT["llama-gqa"].write(tmp_path / "model.gguf")
    with faulty(path, 2, "off") as (model, faults):
        truth = model.generate([5, 6, 7], **GREEDY).tokens
        left, reconnect = threading.Event(), model.executable._reconnect  # type: ignore[attr-defined]
        model.executable._reconnect = lambda: left.wait(30) and reconnect()  # type: ignore[attr-defined]
        with Scheduler(model.new_core(SchedulerLimits())) as scheduler:
            greedy = Request([5, 6, 7], SamplingOptions(temperature=0), 24, ignore_eos=True)
            faults.fatal = {faults.messages + 10}
            if fails:
                faults.refused = [*range(faults.connections + 1, faults.connections + 1 + ATTEMPTS)]
            one, until = ask(scheduler, greedy), monotonic() + 20
            while not scheduler.recovering and monotonic() < until:
                sleep(0.01)
            assert one.ticket is not None
            one.ticket.cancel()
            assert one.result().reason == "cancelled"
            left.set()
            while scheduler.recovering and monotonic() < until:
                sleep(0.01)
            assert scheduler.recovering == 0
            assert faults.refusals == (ATTEMPTS if fails else 0)
            assert ask(scheduler, greedy).result().reason == "length"
            assert model.generate([5, 6, 7], **GREEDY).tokens == truth


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP, signal.SIGUSR1])
def test_a_process_that_ends_stops_or_hangs_is_replaced(fault: signal.Signals, tmp_path: Path) -> None:
    """SIGUSR1 makes the handling of the next step hang, while the connections stay alive."""
    pytest.importorskip("zmq", reason="stages in other processes need pyzmq")
    cpu = CpuBackend(1)
    path, recording = KIT["qwen35-mtp"].write(tmp_path / "model.gguf"), Recording(LIMITS.positions)
    processes = Processes(path, recording)
    with open_gguf(path) as file:
        plan = recording.plan(file)
        split_engine = engine_of(SplitBackend(cpu, lambda plan: even_cut(plan, 2), processes.connect), plan, LIMITS)
        whole = engine_of(cpu, plan, LIMITS)
    requests = [Request([3 + n, 4, 5, 6], SamplingOptions(temperature=0), 60, ignore_eos=True) for n in range(3)]
    with Stepped(whole, parallel=3) as it:
        truth = [it.ask(request)[1] for request in requests]
        it.finish()
    noticed = []
    with Stepped(split_engine, parallel=3) as it:
        answers = [it.ask(request)[1] for request in requests]
        for tokens in (10, 30):
            while len(answers[0].tokens) < tokens:
                it.turn()
            os.kill(processes.processes[0].pid, fault)
            began = monotonic()
            while it.core._recovery is None:
                it.turn()
            noticed.append(monotonic() - began)
        it.finish()
    assert processes.connections == 3
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in truth]
    assert max(noticed) < 10  # about 1.5 s on a machine that is not busy
    for engine in (split_engine, whole):
        engine.executable.close()
    cpu.close()


def test_a_step_of_an_earlier_ring_is_lost(tmp_path: Path) -> None:
    """The new ring begins with the same numbers of requests, and its answers belong to other steps."""
    path = KIT["llama-gqa"].write(tmp_path / "model.gguf")
    with faulty(path, 2, "off") as (model, faults):
        engine = model.engine
        first, second = engine.add(), engine.add()
        pending = engine.submit([SequenceRows(first, [1, 2, 3])])
        engine.lose()
        engine.restore()
        other = engine.submit([SequenceRows(second, [4, 5, 6])])
        with pytest.raises(StageLost, match="the connection to the stages is closed"):
            engine.collect(pending)
        [result] = engine.collect(other)
        found = result.logits.copy()
        assert not first.tokens
        assert faults.connections == 2
        engine.release(second)
        np.testing.assert_array_equal(found, model.logits([4, 5, 6])[-1:])

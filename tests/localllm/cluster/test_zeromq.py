"""Stages in other processes and threads, over ZeroMQ on 127.0.0.1: the same bits, strangers, stages that are lost."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest

zmq = pytest.importorskip("zmq", reason="stages in other processes need pyzmq")

from localllm.backends.base import F16_CACHE, BackendError, CacheTypes  # noqa: E402
from localllm.backends.cpu.backend import CpuBackend  # noqa: E402
from localllm.cluster.backend import SplitBackend  # noqa: E402
from localllm.cluster.cut import Cut, even_cut  # noqa: E402
from localllm.cluster.errors import ClusterError, StageLost  # noqa: E402
from localllm.cluster.executable import SplitExecutable  # noqa: E402
from localllm.cluster.secured import Peer  # noqa: E402
from localllm.cluster.stage import Layout, bind_stage  # noqa: E402
from localllm.cluster.worker import Assignment, Source, open_stage  # noqa: E402
from localllm.cluster.zeromq import Endpoint  # noqa: E402
from localllm.engine import BlockPool, DraftRows, Engine, SequenceRows  # noqa: E402
from localllm.gguf import open_gguf  # noqa: E402
from localllm.gguf.identity import identity  # noqa: E402
from localllm.loading.loader import kept  # noqa: E402
from localllm.loading.recording import Recording  # noqa: E402
from localllm.plan import BLOCK  # noqa: E402
from tests.localllm.cluster.support import Processes, Threads  # noqa: E402
from tests.localllm.engine.support import ALONE, LIMITS, PLANS, Schedule, alone, engine_of  # noqa: E402
from tests.models.kit import KIT  # noqa: E402


@pytest.fixture(scope="module")
def cpu() -> Iterator[CpuBackend]:
    backend = CpuBackend(threads=1)
    yield backend
    backend.close()


def test_a_message_that_only_seems_to_be_there_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeroMQ's poll sometimes announces a message that cannot be received."""
    endpoint = Endpoint(1 << 10)
    polls = [{endpoint._pull: zmq.POLLIN}]
    monkeypatch.setattr(endpoint._poller, "poll", lambda timeout: polls.pop() if polls else sleep(0.05) or {})
    began = monotonic()
    with pytest.raises(StageLost, match="no answer within"):
        endpoint.receive(0.3)
    assert monotonic() - began < 3
    endpoint.close()


# -- processes -------------------------------------------------------------------------------------------------------


def test_stages_in_other_processes_have_the_same_bits_and_are_missed_when_stopped(
    cpu: CpuBackend, tmp_path: Path
) -> None:
    """A hybrid model with a head for drafting in two stages. Then the other process stops, as a machine hangs."""
    path, recording = KIT["qwen35-mtp"].write(tmp_path / "model.gguf"), Recording(LIMITS.positions, heads=1)
    processes = Processes(path, recording)
    split = SplitBackend(cpu, lambda plan: even_cut(plan, 2), processes.connect)
    with open_gguf(path) as file:
        plan = recording.plan(file)
        engines = []
        for backend in (split, cpu):
            pool = BlockPool(LIMITS.blocks, BLOCK, windowed=BlockPool(LIMITS.window_blocks, BLOCK, plan.window))
            limits = LIMITS if backend is split else ALONE
            engines.append(Engine(backend.bind(plan, limits, CacheTypes(), None, kept(plan, False)), pool, limits))
            engines[-1].draft_heads = plan.drafts
    engine, whole = engines
    schedule = Schedule(engine, whole, min(plan.input_vocabulary, plan.logits.width), 5, 60, 60)
    schedule.run(16, 4)
    assert schedule.counts["compared"] > 20
    drafted = []
    for each in engines:
        sequence = each.add()
        [result] = each.step([SequenceRows(sequence, list(range(30)))])
        rows = DraftRows(sequence, 0, list(range(1, 30)), result.hidden[:-1].copy(), 1)
        drafted.append([array.copy() for array in each.draft([rows])])
    np.testing.assert_array_equal(drafted[0][0], drafted[1][0])
    np.testing.assert_array_equal(drafted[0][1], drafted[1][1])
    os.kill(processes.processes[0].pid, signal.SIGSTOP)  # its connections stay open
    sequence = engine.add()
    for _ in range(2):  # the first notices it, the second knows
        with pytest.raises(StageLost, match=r"the connection (from|to) the (previous|next) stage ended"):
            engine.step([SequenceRows(sequence, [1, 2, 3])])
        assert not sequence.tokens
    os.kill(processes.processes[0].pid, signal.SIGKILL)
    engine.executable.close()
    whole.executable.close()


def test_another_file_is_refused_before_its_weights_are_read(cpu: CpuBackend, tmp_path: Path) -> None:
    ours, theirs = (KIT[name].write(tmp_path / f"{name}.gguf") for name in ("llama-gqa", "qwen3-dense"))
    with open_gguf(ours) as file:
        source, cut = Source(str(theirs), identity(file)), even_cut(Recording(256).plan(file), 2)
    layout = Layout(cut.firsts, LIMITS, F16_CACHE)
    with pytest.raises(ClusterError, match=r"qwen3-dense.gguf: this is not the model .*; copy the file from the first"):
        open_stage(Assignment(1, source, Recording(256), layout), cpu)
    open_stage(Assignment(1, replace(source, path=str(ours)), Recording(256), layout), cpu).close()


# -- one process, two threads ----------------------------------------------------------------------------------------


def test_a_stage_with_other_sizes_is_refused_at_the_start(cpu: CpuBackend) -> None:
    threads = Threads(cpu)

    def connect(cut: Cut, layout: Layout) -> Any:
        larger = replace(layout, limits=replace(LIMITS, blocks=LIMITS.blocks + 1))
        threads.stages = [bind_stage(1, cut, larger, cpu)]
        return threads.ring(cut, layout)

    split = SplitBackend(cpu, lambda plan: even_cut(plan, 2), connect)
    with pytest.raises(ClusterError, match=r"^stage 1 has another model, other sizes or another version of localllm"):
        split.bind(PLANS["llama"](), LIMITS)
    assert "stage ended" in str(threads.ended[0])


def test_errors_and_interrupted_steps_over_the_wire(cpu: CpuBackend) -> None:
    plan, threads = PLANS["llama"](), Threads(cpu)
    engine = engine_of(threads.backend(), plan, LIMITS)
    stages = threads.stages
    whole = engine_of(cpu, plan, ALONE)
    sequence, tokens = engine.add(), list(range(20))
    run = stages[0].executable.run
    stages[0].executable.run = lambda received: 1 / 0
    with pytest.raises(BackendError, match=r"^stage 1: ZeroDivisionError: division by zero$"):
        engine.step([SequenceRows(sequence, tokens)])
    stages[0].executable.run = run
    engine.step([SequenceRows(sequence, tokens[:10])])
    engine.executable._exchange.send(3, (0, 0))  # type: ignore[attr-defined]  # the answer to this request is not fetched
    [result] = engine.step([SequenceRows(sequence, tokens[10:], "all")])
    np.testing.assert_array_equal(result.logits, alone(whole, tokens, 20)[10:])
    for executable in (engine.executable, whole.executable):
        executable.close()


def test_micro_batches_keep_both_stages_busy(cpu: CpuBackend) -> None:
    """The second stage evaluates a micro-batch only after the first stage has begun the next one."""
    plan, threads = PLANS["llama"](), Threads(cpu)
    limits = replace(LIMITS, rows=256, logit_rows=256, window_blocks=0)
    engine = engine_of(threads.backend(), plan, limits)
    first, second = engine.executable._first.executable, threads.stages[0].executable  # type: ignore[attr-defined]
    begun, together = [0, 0], []
    run_first, run_second = first.run, second.run

    def run(received: Any = ()) -> Any:
        begun[0] += 1
        return run_first(received)

    def run_after(received: Any) -> Any:
        begun[1] += 1
        until = monotonic() + 3
        while begun[0] == begun[1] < 4 and monotonic() < until:
            sleep(0.001)
        together.append(begun[0] > begun[1] or begun[1] == 4)
        return run_second(received)

    first.run, second.run = run, run_after
    tokens = [token % 29 for token in range(256)]
    [result] = engine.step([SequenceRows(engine.add(), tokens, "all")])
    assert together == [True] * 4
    whole = engine_of(cpu, plan, limits)
    np.testing.assert_array_equal(result.logits, alone(whole, tokens, 256))
    for executable in (engine.executable, whole.executable):
        executable.close()


def test_a_stage_that_hangs_is_given_up_and_one_that_stops_is_missed(cpu: CpuBackend) -> None:
    threads = Threads(cpu, patience=0.3)
    engine = engine_of(threads.backend(), PLANS["llama"](), LIMITS)
    sequence = engine.add()
    engine.step([SequenceRows(sequence, [1])])
    go_on = threads.hang(threads.stages[0])
    with pytest.raises(StageLost, match=r"no answer within 0.3 s; a stage hangs, or its network is too slow"):
        engine.step([SequenceRows(sequence, [2])])
    assert sequence.tokens == [1]
    go_on.set()
    engine.executable.close()
    assert "stage ended" in str(threads.ended[0])


@pytest.mark.parametrize("lost", [0, 1])
def test_a_stage_that_ends_ends_the_ring(cpu: CpuBackend, lost: int) -> None:
    """The front learns it whichever of its two stages ends, and the other stage ends with a reason."""
    threads = Threads(cpu, 3)
    engine = engine_of(threads.backend(), PLANS["llama"](), LIMITS)
    sequence = engine.add()
    engine.step([SequenceRows(sequence, [1])])

    def end(message: object) -> None:
        raise SystemExit

    threads.stages[lost].handle = end  # type: ignore[assignment, method-assign]
    with pytest.raises(StageLost, match=r"the connection (from|to) the (previous|next) stage ended"):
        engine.step([SequenceRows(sequence, [2])])
    assert sequence.tokens == [1]
    engine.executable.close()
    assert {type(reason) for reason in threads.ended} == {type(None), StageLost}


def test_stages_serve_again_in_another_ring(cpu: CpuBackend) -> None:
    """As after the loss of a third stage: weights stay, and the front evaluates its sequences again."""
    plan, tokens = PLANS["llama"](), list(range(20))
    cut = even_cut(plan, 2)
    layout = Layout(cut.firsts, LIMITS, F16_CACHE)
    first, second = (bind_stage(number, cut, layout, cpu) for number in (0, 1))
    whole, found = engine_of(cpu, plan, ALONE), []
    for _ in range(2):
        threads = Threads(cpu)
        threads.stages = [second]
        executable = SplitExecutable(cut, layout, first, threads.ring(cut, layout))
        engine = Engine(executable, BlockPool(LIMITS.blocks, BLOCK), LIMITS)
        found.append(engine.step([SequenceRows(engine.add(), tokens, "all")])[0].logits)
        executable._exchange.close()
        assert len(threads.ended) == 1
    for logits in found:
        np.testing.assert_array_equal(logits, alone(whole, tokens, 20))
    for stage in (first, second):
        stage.close()


def test_strangers_cannot_send_and_do_not_disturb(cpu: CpuBackend) -> None:
    plan, threads = PLANS["llama"](), Threads(cpu)
    engine = engine_of(threads.backend(), plan, LIMITS)
    sequence = engine.add()
    engine.step([SequenceRows(sequence, list(range(9)))])
    context = zmq.Context()
    for address, key in [(peer.address, peer.public_key) for peer in threads.peers]:
        for server_key in (key, zmq.curve_keypair()[0], None):
            own = context.socket(zmq.PUSH)
            own.linger = 0
            if server_key is not None:
                own.curve_serverkey = server_key
                own.curve_publickey, own.curve_secretkey = zmq.curve_keypair()
            events = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED
            monitor = own.get_monitor_socket(events)
            own.connect(address)
            assert monitor.poll(5000)
            assert zmq.utils.monitor.recv_monitor_message(monitor)["event"] == zmq.Event.DISCONNECTED
            own.disable_monitor()
            monitor.close(0)
            own.close()
    context.term()
    [result] = engine.step([SequenceRows(sequence, list(range(9, 20)), "all")])
    np.testing.assert_array_equal(result.logits, alone(engine_of(cpu, plan, ALONE), list(range(20)), 20)[9:])
    engine.executable.close()


_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(200),
        b"\x01\x00\x05\x00hello",
        _GREETING,
        _GREETING + b"\x06" + b"\xff" * 900,
    ],
    ids=["nothing", "http", "zeros", "version 1", "greeting", "giant frame"],
)
def test_garbage_from_strangers_ends_no_ring(sent: bytes) -> None:
    """A scanner of ports is enough: it opens a connection, sends something, and closes it."""
    one, other = Endpoint(1 << 16), Endpoint(1 << 16)
    for endpoint, following in ((one, other), (other, one)):
        following.accept(endpoint.peer.public_key)
        endpoint.connect(following.peer)

    def check() -> None:
        for sender, receiver in ((one, other), (other, one)):
            sender.send(b"message")
            assert receiver.receive(5) == b"message"

    check()
    host, port = one.peer.address.removeprefix("tcp://").split(":")
    for _ in range(3):
        with socket.create_connection((host, int(port))) as stranger, suppress(OSError):
            stranger.sendall(sent)
            stranger.settimeout(0.2)
            stranger.recv(1 << 16)
    with pytest.raises(StageLost, match="no answer within"):  # and not: the connection ended
        one.receive(0.5)
    check()
    other.close()
    with pytest.raises(StageLost, match="stage ended"):
        one.receive(5)
    one.close()


def test_an_endpoint_that_cannot_listen_leaves_nothing_behind() -> None:
    """Replicas try to connect again and again while no port is free."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        before = threading.active_count(), len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with pytest.raises(ClusterError, match=f"^cannot listen on ports {port} to {port} of 127.0.0.1: "):
                Endpoint(1 << 10, ports=(port, port + 1))
            with pytest.raises(ClusterError, match=r"^cannot listen on any port of 192.0.2.1: "):
                Endpoint(1 << 10, "192.0.2.1")
        assert threading.active_count() <= before[0]
        assert len(os.listdir("/proc/self/fd")) <= before[1]


def test_a_message_larger_than_announced_ends_the_connection() -> None:
    sender, receiver = Endpoint(1 << 20), Endpoint(1 << 16)
    receiver.accept(sender.peer.public_key)
    sender.connect(receiver.peer)
    sender.send(bytes(1 << 16))
    assert len(receiver.receive(5)) == 1 << 16
    sender.send(bytes((1 << 16) + 1000))
    with pytest.raises(StageLost, match=r"previous stage ended"):
        receiver.receive(5)
    for endpoint in (sender, receiver):
        endpoint.close()


def send_for_ever(endpoint: Endpoint) -> None:
    while True:
        endpoint.send(b"x")


def test_sending_to_a_process_that_ended_fails_at_once() -> None:
    sender, receiver = Endpoint(1 << 16), Endpoint(1 << 16)
    receiver.accept(sender.peer.public_key)
    sender.connect(receiver.peer)
    sender.send(b"x")
    assert receiver.receive(5) == b"x"
    receiver.close()
    began = monotonic()
    for _ in range(2):  # the stage tells it once more, and must not wait either
        with pytest.raises(StageLost, match="the connection to the next stage ended"):
            send_for_ever(sender)
    assert monotonic() - began < 30  # its patience is 60 s
    sender.close()


def test_without_a_next_process_sending_ends_with_a_reason() -> None:
    endpoint = Endpoint(1 << 16, patience=0.2)
    endpoint.connect(Peer("tcp://127.0.0.1:1", zmq.curve_keypair()[0]))
    with pytest.raises(StageLost, match=r"the next stage takes no messages for 0.2 s; it hangs, or was not started"):
        endpoint.send(b"x")
    endpoint.close()

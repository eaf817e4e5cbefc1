"""Helpers for tests of stages: a backend that splits plans within this process, and stages in processes or threads."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from time import sleep
from typing import Any

from localllm.backends.base import Backend
from localllm.backends.cpu.backend import CpuBackend
from localllm.cluster.backend import SplitBackend
from localllm.cluster.cut import Cut, even_cut
from localllm.cluster.errors import StageLost
from localllm.cluster.ring import LocalRing
from localllm.cluster.stage import Layout, Stage, bind_stage, message_bytes
from localllm.cluster.worker import Assignment, Source, open_stage
from localllm.gguf import open_gguf
from localllm.gguf.identity import identity
from localllm.loading.recording import Recording
from tests.processes import stat


def local(backend: Backend, stages: int) -> SplitBackend:
    """Return a backend that runs plans in this many stages of this process."""
    return SplitBackend(backend, lambda plan: even_cut(plan, stages), LocalRing.over([backend] * (stages - 1)))


class Threads:
    """Starts every stage but the first in a thread of this process, which the front reaches over ZeroMQ."""

    def __init__(self, backend: Backend, stages: int = 2, patience: float = 5.0) -> None:
        self._backend, self._count, self._patience = backend, stages, patience
        self.stages: list[Stage] = []
        self.ended: list[BaseException | None] = []  # why each stage ended, in order of time
        self.peers: list[Any] = []

    def backend(self) -> SplitBackend:
        return SplitBackend(self._backend, lambda plan: even_cut(plan, self._count), self.connect)

    def connect(self, cut: Cut, layout: Layout) -> Any:
        self.stages = [bind_stage(number, cut, layout, self._backend) for number in range(1, cut.stages)]
        return self.ring(cut, layout)

    def ring(self, cut: Cut, layout: Layout) -> Any:
        """Serve the stages until the ring is closed."""
        from localllm.cluster.zeromq import Endpoint, ZmqRing

        sizes = [message_bytes(cut, layout, cut.stages), *[stage.most_bytes for stage in self.stages]]
        endpoints = [Endpoint(size) for size in sizes]
        self.peers = [endpoint.peer for endpoint in endpoints]
        for number, endpoint in enumerate(endpoints):
            endpoint.accept(self.peers[number - 1].public_key)
        threads = [
            threading.Thread(target=self._serve, args=(stage, endpoint), daemon=True)
            for stage, endpoint in zip(self.stages, endpoints[1:], strict=True)
        ]
        for number, endpoint in enumerate(endpoints):
            endpoint.connect(self.peers[(number + 1) % cut.stages])
        for thread in threads:
            thread.start()

        def join() -> None:
            for thread in threads:
                thread.join(10)
                assert not thread.is_alive(), "a stage did not end"

        return ZmqRing(endpoints[0], self._patience, join)

    def _serve(self, stage: Stage, endpoint: Any) -> None:
        from localllm.cluster.zeromq import serve

        try:
            self.ended.append(serve(stage, endpoint))
        except SystemExit:  # a test ends the thread, like a process that is killed
            self.ended.append(None)
        endpoint.close()

    @staticmethod
    def hang(stage: Stage) -> threading.Event:
        """Make the next step of a stage wait for the event that is returned."""
        event, run = threading.Event(), stage.executable.run

        def waiting(received: Any = ()) -> Any:
            event.wait(10)
            return run(received)

        stage.executable.run = waiting  # type: ignore[method-assign]
        return event


class Processes:
    """Starts a process for every stage but the first; each process opens its part of the file."""

    def __init__(
        self,
        path: Path,
        recording: Recording,
        patience: float = 30.0,
        via: Callable[[str], str] | None = None,
        pause: float = 0.0,
    ) -> None:
        """`via` starts a relay to HOST:PORT, through which a process is reached, and returns its HOST:PORT. Every step
        waits for `pause` seconds.
        """
        self._via, self._pause = via, pause
        with open_gguf(path) as file:
            self._source = Source(str(path), identity(file))
        self._recording, self._patience = recording, patience
        self.processes: list[Any] = []
        self.connections = 0

    def connect(self, cut: Cut, layout: Layout) -> Any:
        from localllm.cluster.zeromq import Endpoint, ZmqRing

        self.processes, self.connections = [], self.connections + 1
        endpoint = Endpoint(message_bytes(cut, layout, cut.stages))
        try:
            self._start(cut, layout, endpoint)
        except (EOFError, OSError):
            endpoint.close()
            for process in self.processes:
                process.kill()
                process.join()
            raise StageLost("a stage's process ended while it was started") from None
        return ZmqRing(endpoint, self._patience, self.end)

    def _start(self, cut: Cut, layout: Layout, endpoint: Any) -> None:
        """Start the processes, and connect each one to the next."""
        spawn, pipes = multiprocessing.get_context("spawn"), []
        for number in range(1, cut.stages):
            ours, theirs = spawn.Pipe()
            given = Assignment(number, self._source, self._recording, layout)
            process = spawn.Process(target=work, args=(given, theirs, self._pause), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            pipes.append(ours)
        peers = [endpoint.peer, *[pipe.recv() for pipe in pipes]]
        endpoint.accept(peers[-1].public_key)
        for number, pipe in enumerate(pipes, 1):
            pipe.send(peers[number - 1].public_key)
            pipe.recv()  # it accepts the process before it
        if self._via is not None:
            reached = [self._via(peer.address.removeprefix("tcp://")) for peer in peers]
            peers = [peer._replace(address=f"tcp://{at}") for peer, at in zip(peers, reached, strict=True)]
        for number, pipe in enumerate(pipes, 1):
            pipe.send(peers[(number + 1) % cut.stages])
        endpoint.connect(peers[1])

    def end(self) -> None:
        for process in self.processes:
            if process.is_alive() and stopped(process.pid):  # it cannot end by itself
                process.kill()
            process.join(5)
            assert process.exitcode is not None, "a stage did not end"


def stopped(pid: int) -> bool:
    """Whether a process is stopped by SIGSTOP."""
    return stat(pid)[0] == "T"


def pausing(executable: Any, name: str, seconds: float) -> None:
    """Let a method of an executable wait before it runs."""
    method = getattr(executable, name)

    def late(*given: Any) -> Any:
        sleep(seconds)
        return method(*given)

    setattr(executable, name, late)


def work(given: Assignment, pipe: Connection, pause: float = 0.0) -> None:
    """Open a stage and serve it: the main function of a process. SIGUSR1 makes its next step hang."""
    from localllm.cluster.watchdog import Watchdog
    from localllm.cluster.zeromq import Endpoint, serve

    with ExitStack() as closing:
        backend = CpuBackend(1)
        closing.callback(backend.close)
        stage = open_stage(given, backend)
        closing.callback(stage.close)
        if pause:
            pausing(stage.executable, "run", pause)
        endpoint = Endpoint(stage.most_bytes)
        closing.callback(endpoint.close)
        pipe.send(endpoint.peer)
        endpoint.accept(pipe.recv())
        pipe.send(None)
        endpoint.connect(pipe.recv())
        watchdog = Watchdog(lambda: os._exit(1))
        closing.callback(watchdog.close)
        signal.signal(signal.SIGUSR1, lambda *_: Threads.hang(stage))
        serve(stage, endpoint, watchdog)

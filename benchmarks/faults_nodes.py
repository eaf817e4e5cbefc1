"""The nodes of `faults.py --nodes`: each is a `localllm worker` with a separate cache folder.

A node is killed as a computer that loses its power: the worker, Ray's processes and everything that these have started
get SIGKILL together. They all have FAULTS_NODE in their environment, or descend from the worker: Ray's agents overwrite
part of their environment with their title. Agents that are left alone keep their node's ports for seconds.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.ports import GROUP, free_ports  # noqa: E402
from tests.processes import below, runs  # noqa: E402

RUN, NODE = "FAULTS_RUN", "FAULTS_NODE"
STARTING = 60.0  # seconds for a node to start
READY = "localllm run"  # in the last line of `localllm worker` before it waits


def processes(**marks: str) -> dict[int, str]:
    """Return the processes with these values in their environment and their command lines, without zombies."""
    wanted, found = {f"{name}={value}".encode() for name, value in marks.items()}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted <= set((folder / "environ").read_bytes().split(b"\0")) and runs(int(folder.name)):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


class Nodes:
    """A cluster of `count` nodes on this machine. The first one is the head; a server connects through it."""

    def __init__(self, run: str, count: int) -> None:
        self._run, self.count = run, count
        self._port, self._address, self._token = free_ports(count), "", ""
        self._folders = [Path(tempfile.mkdtemp(prefix="faults-node-")) for _ in range(count)]
        self._workers: dict[int, subprocess.Popen[str]] = {}
        kernels = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "localllm", "kernels")
        for folder in self._folders:
            (folder / "localllm").mkdir(mode=0o700)
            if kernels.exists():
                (folder / "localllm" / "kernels").symlink_to(kernels)
        for number in range(count):
            self.start(number)

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment of a program on the first node."""
        return {"XDG_CACHE_HOME": str(self._folders[0])}

    def start(self, number: int) -> None:
        """Start a node, and return once it belongs to the cluster."""
        words = ["--port", str(self._port + GROUP * number)]
        words += ["--join", self._address] if number else []
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        environment |= {RUN: self._run, NODE: str(number), "XDG_CACHE_HOME": str(self._folders[number])}
        log = self._folders[number] / "log"
        with log.open("w") as output:
            worker = self._workers[number] = subprocess.Popen(
                [sys.executable, "-m", "localllm", "worker", *words], cwd=ROOT, env=environment, text=True,
                stdin=subprocess.PIPE, stdout=output, stderr=output,
            )  # fmt: skip
        assert worker.stdin is not None
        with suppress(BrokenPipeError):
            worker.stdin.write(f"{self._token}\n")
            worker.stdin.close()
        until = time.monotonic() + STARTING
        while READY not in log.read_text():
            if worker.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"node {number} does not start:\n{log.read_text()}")
            time.sleep(0.05)
        if not number:
            said = log.read_text()
            address, token = re.search(r"localllm worker --join (\S+)", said), re.search(r"token:\n\n    (\w+)", said)
            assert address is not None, said
            assert token is not None, said
            self._address, self._token = address[1], token[1]

    def processes(self, number: int) -> dict[int, str]:
        return processes(**{RUN: self._run, NODE: str(number)})

    def kill(self, number: int) -> None:
        """Kill all processes of a node. Some may start others meanwhile."""
        started = below(self._workers[number].pid)
        while found := self.processes(number).keys() | started:
            started = set()
            for process in found:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            self._workers[number].wait()

    def close(self) -> None:
        """End all nodes as Ctrl-C does, the head last, and delete their folders."""
        for number in reversed(range(self.count)):
            worker = self._workers.get(number)
            if worker is not None and worker.poll() is None:
                worker.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    worker.wait(30)
            self.kill(number)
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

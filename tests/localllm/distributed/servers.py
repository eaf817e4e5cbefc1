"""Servers of the bundled model in other processes, with and without Ray."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tests.localllm.support import REPOSITORY

STARTED = re.compile(r"listening on (http://\S+)")
PATIENCE = 60


class Server(NamedTuple):
    url: str
    process: subprocess.Popen[str]
    log: Path

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return httpx.post(f"{self.url}{path}", json=body, timeout=PATIENCE)

    def metrics(self) -> dict[str, float]:
        lines = httpx.get(f"{self.url}/metrics", timeout=5).text.splitlines()
        parts = [line.rpartition(" ") for line in lines if not line.startswith("#")]
        return {name.partition("{")[0]: float(value) for name, _, value in parts if "bucket" not in name}

    def running(self) -> float:
        """Return the number of cache blocks that requests use."""
        lines = httpx.get(f"{self.url}/metrics", timeout=5).text.splitlines()
        counts = {name: float(count) for name, _, count in (line.rpartition(" ") for line in lines) if name[:1] != "#"}
        blocks = [counts[f'localllm_cache_blocks{{model="demo",state="{state}"}}'] for state in ("all", "free", "kept")]
        return blocks[0] - blocks[1] - blocks[2]


def started(log: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "localllm", "serve", "demo", "--port", "0", "-c", "512", *words]
    with log.open("w") as output:
        return subprocess.Popen(command, cwd=REPOSITORY, stdout=output, stderr=output, text=True)


@contextmanager
def listening(log: Path, process: subprocess.Popen[str]) -> Iterator[Server]:
    """Wait for a server, and stop it after the block."""
    try:
        until(lambda: STARTED.search(log.read_text()) or process.poll() is not None)
        found = STARTED.search(log.read_text())
        assert found is not None, log.read_text()
        yield Server(found[1], process, log)
    finally:
        end(process)


def end(process: subprocess.Popen[str]) -> None:
    """End a server as Ctrl-C does."""
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(20)
    process.kill()


def until(ready: Callable[[], object], seconds: float = PATIENCE) -> None:
    stop = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < stop, "it does not happen"
        time.sleep(0.05)

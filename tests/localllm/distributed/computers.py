"""Computers of a cluster: `localllm worker` with separate homes on this machine, and programs that run there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.localllm.support import REPOSITORY

RUN = ["run", "demo", "Hello", "--seed", "1", "-n", "8"]
WORKER = [sys.executable, "-m", "localllm", "worker"]  # in the local network, as users do: Ray replaces 127.0.0.1


def environment(home: Path) -> dict[str, str]:
    """Return the environment of a user with this cache folder, without settings of this process's own cluster. Ray's
    folders go where the home is.
    """
    (home / "localllm").mkdir(mode=0o700, parents=True, exist_ok=True)
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
        "XDG_CACHE_HOME": str(home),
        "TMPDIR": str(home.parent),
    }


@contextmanager
def worker(home: Path, *words: str, token: str = "") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a worker until the block ends, and yield it with its output until it was ready."""
    with subprocess.Popen(
        [*WORKER, *words], cwd=REPOSITORY, env=environment(home), text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{token}\n")
        process.stdin.close()
        said = ""
        for line in process.stdout:
            said += line
            if "localllm run" in line:
                break
        try:
            yield process, said
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)


def refused(home: Path, *words: str, token: str = "") -> str:
    """Run a worker that does not start, and return its only line on stderr, besides what it is about to do."""
    done = subprocess.run(
        [*WORKER, *words], cwd=REPOSITORY, env=environment(home), text=True, input=f"{token}\n", capture_output=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout == ""
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert len(done.stderr.splitlines()) <= 2
    return errors[0]


def ran(home: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Answer a prompt with these options."""
    words = [sys.executable, "-m", "localllm", *RUN, *more]
    return subprocess.run(
        words, cwd=REPOSITORY, env=environment(home), capture_output=True, text=True, stdin=subprocess.DEVNULL
    )

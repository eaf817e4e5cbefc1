"""A forked start is like a start of Python: same output, exit code, environment, streams and end."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from tests.localllm.started import Started, can_fork
from tests.localllm.support import PROGRAM, REPOSITORY, localllm

MODEL = {"LOCALLLM_MODEL": "no-such-model"}


@pytest.mark.parametrize(
    ("words", "stdin", "environ"),
    [
        (("run", "demo", "-n", "6", "--temp", "0", "--verbose-prompt"), "Hällo\r\nthere", {}),
        (("run", "Hello"), None, MODEL),
        (("run", "demo", "-n", "many"), None, {}),
        (("config",), "", {"LOCALLLM_SEED": "7"}),
    ],
    ids=("answer", "environment", "usage", "settings"),
)
def test_the_result_is_the_same(words: tuple[str, ...], stdin: str | None, environ: dict[str, str]) -> None:
    assert can_fork(environ)
    given: dict[str, Any] = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    given |= {"cwd": REPOSITORY, "env": {**os.environ, **environ}}
    expected = subprocess.run([*PROGRAM, *words], capture_output=True, encoding="utf-8", **given)
    found = localllm(*words, stdin=stdin, environ=environ)
    assert (found.returncode, found.stdout, found.stderr) == (expected.returncode, expected.stdout, expected.stderr)


@contextmanager
def waiting(folder: Path) -> Iterator[tuple[Started, int]]:
    """Start a program that reads a pipe; yield it, and the end to write to."""
    reads, writes = os.pipe()
    with (folder / "out").open("wb") as out:
        yield Started(["run", "demo", "-n", "4"], (reads, out.fileno(), out.fileno()), os.environ, folder), writes
    os.close(reads)


def test_it_runs_in_a_folder_until_it_is_killed(tmp_path: Path) -> None:
    with waiting(tmp_path) as (started, writes):
        with pytest.raises(subprocess.TimeoutExpired):
            started.wait(0.01)
        end = monotonic() + 60
        while Path(f"/proc/{started.pid}/cwd").resolve() != tmp_path:
            assert monotonic() < end
        assert started.poll() is None
        started.kill()
        assert started.wait(60) == started.poll() == -signal.SIGKILL
        os.close(writes)


def test_its_input_ends(tmp_path: Path) -> None:
    with waiting(tmp_path) as (started, writes):
        os.write(writes, b"Hello")
        os.close(writes)
        assert started.wait(60) == 0
    assert (tmp_path / "out").read_text().count("\n") == 1


def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    with waiting(tmp_path) as (started, writes):
        ended = os.pidfd_open(started.pid)
        os.close(started._numbers)  # as at the end of this process
        assert select.select([ended], [], [], 60)[0]
        os.close(ended)
        os.close(writes)

"""`.ci/run`, with fake programs in place of Python, lint and types."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.localllm.support import REPOSITORY

README = """
    python3 -m venv .venv && cat
    python3 -m venv .venv && install && touch testing && sleep 60
"""
PROGRAMS = {
    "python3": "exit 0",
    "git": "exit 1",
    "install": 'mkdir -p "$PLACE/venv/bin" && for each in ruff mypy; do cp "$0.program" "$PLACE/venv/bin/$each"; done',
    "install.program": "echo $$ >>pids; while :; do sleep 0.1; done",
}


@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc")
def test_an_interrupt_ends_lint_and_types(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    (tmp_path / "bin").mkdir()
    shutil.copy(REPOSITORY / ".ci" / "run", tmp_path / ".ci" / "run")
    (tmp_path / "README.md").write_text(README)
    for name, script in PROGRAMS.items():
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    place, pids = tmp_path / f"localllm-ci-{os.getuid()}", tmp_path / "pids"
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    environment |= {"TMPDIR": str(tmp_path), "PLACE": str(place)}
    pids.touch()
    ci = subprocess.Popen([".ci/run"], cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        until(lambda: (tmp_path / "testing").exists() and len(pids.read_text().split()) == 3)
        os.killpg(ci.pid, signal.SIGINT)
        ci.wait(30)
        assert not place.exists()
        until(lambda: not any(map(runs, pids.read_text().split())))
    finally:
        for pid in (str(ci.pid), *pids.read_text().split()):
            if runs(pid):
                os.kill(int(pid), signal.SIGKILL)
        ci.wait()


def runs(pid: str) -> bool:
    command = Path("/proc", pid, "cmdline")
    return command.exists() and command.read_bytes() != b""  # empty for a zombie


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)

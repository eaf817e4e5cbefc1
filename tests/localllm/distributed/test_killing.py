"""A process that is stopped while it starts is killed, and its guard ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from time import sleep

import pytest

from localllm.distributed import supervised
from localllm.distributed.killing import guarded, kill
from tests.localllm.support import REPOSITORY
from tests.processes import gone

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="guards need Linux's /proc")


def children(process: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def test_a_process_that_stops_while_it_starts_is_killed() -> None:
    lines = "import time", "from localllm.distributed.killing import guarded", "with guarded():", " print(flush=True)"
    code = "\n".join([*lines, " time.sleep(60)"])
    with subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        started.stdout.readline()
        (guard,) = children(started.pid)
        started.send_signal(signal.SIGSTOP)
        sleep(0.5)
        started.send_signal(signal.SIGCONT)  # a short stop is not enough
        sleep(1.8)
        assert started.poll() is None
        started.send_signal(signal.SIGSTOP)
        try:
            assert started.wait(10) == -signal.SIGKILL
        finally:
            kill(started.pid)
    assert gone(guard)


def test_the_guard_of_a_process_that_is_killed_ends() -> None:
    code = "from localllm.distributed.killing import guarded\nwith guarded():\n print(flush=True)\n input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as started:
        assert started.stdout is not None
        started.stdout.readline()
        (guard,) = children(started.pid)
        started.kill()
    assert gone(guard)


def test_ray_ends_when_its_supervisor_is_killed() -> None:
    """The supervisor removes Ray's folder; without it, Ray would stay for ever."""
    code = (
        "import subprocess, sys\nfrom localllm.distributed.supervised import _default_signals\n"
        "child = subprocess.Popen(['sleep', '60'], preexec_fn=_default_signals)\nprint(child.pid, flush=True)\n"
        "child.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        child = int(started.stdout.readline())
        started.kill()
    ended = gone(child)
    kill(child)
    assert ended


def test_a_signal_ends_a_command_that_connects_to_ray() -> None:
    """Ray's `init` may take seconds. In the main thread it replaces the handler of SIGTERM, as it does here."""
    code = (
        "import signal, threading, time, types\n"
        "from localllm.cli.terminal.signals import unwinding\n"
        "from localllm.distributed.attach import connect\n"
        "def init(**options):\n"
        "    if threading.current_thread() is threading.main_thread():\n"
        "        signal.signal(signal.SIGTERM, lambda number, frame: None)\n"
        "    print(flush=True)\n"
        "    time.sleep(60)\n"
        "with unwinding():\n"
        "    connect(types.SimpleNamespace(init=init), '127.0.0.1:1')\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        started.stdout.readline()
        started.send_signal(signal.SIGTERM)
        try:
            assert started.wait(10) == 128 + signal.SIGTERM
        finally:
            kill(started.pid)


def test_the_guard_ends_with_the_block() -> None:
    before = set(children(os.getpid()))
    with guarded():
        (guard,) = set(children(os.getpid())) - before
    assert gone(guard)
    kill(guard)  # has ended: nothing happens


@pytest.mark.parametrize("leads", [True, False])
def test_a_node_ends_what_ray_has_left_in_its_session(leads: bool) -> None:
    """Ray's agents wait a minute for a head that is gone. The processes of other sessions stay."""
    code = (
        "import subprocess\n"
        "from localllm.distributed import supervised\n"
        "supervised.LEAVING = 0.1\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        "supervised._end_session()\n"
        "child.poll() is None and __import__('time').sleep(0.2)\n"
        "print(child.poll())\n"
        "child.kill()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, start_new_session=leads
    )
    assert done.stdout == ("-9\n" if leads else "None\n"), done.stderr


def test_a_process_that_ends_while_it_is_read_is_in_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    assert supervised._in_session(os.getsid(0))
    monkeypatch.setattr(Path, "read_text", lambda self, errors: "")
    assert supervised._in_session(os.getsid(0)) == []

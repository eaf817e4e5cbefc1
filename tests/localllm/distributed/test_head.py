"""A command ends with one line if the head of its cluster is gone."""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys

import pytest

from localllm.distributed.head import watched
from localllm.distributed.quiet import quiet
from tests.localllm.support import REPOSITORY

CODE = """
import atexit, signal, sys, time
from localllm.cli.terminal.signals import unwinding
from localllm.cluster.errors import ClusterError
from localllm.distributed import head
head.LOOK, head.GONE, head.LEAVING, head.EXITING = 0.05, 0.2, 0.3, 0.3
try:
    with unwinding(), head.watched({address!r}, lambda text: print(text, flush=True)) as is_gone:
        print(is_gone(), flush=True)
        {work}
except ClusterError as error:
    print("error:", error, flush=True)
    sys.exit(1)
"""
WORK = {
    "waits": "time.sleep(60)",
    "does not listen to signals": "[signal.signal(n, lambda *_: None) for n in (2, 15)]\n"
    "        for _ in range(60): time.sleep(1)",
    "leaves its work late": "[signal.signal(n, lambda *_: None) for n in (2, 15)]\n"
    "        while not is_gone(): time.sleep(0.01)\n"
    "        until = time.monotonic() + 0.75\n"
    "        while time.monotonic() < until: time.sleep(0.01)",
    "cannot write": "sys.stderr.close()\n        [signal.signal(n, lambda *_: None) for n in (2, 15)]\n"
    "        for _ in range(60): time.sleep(1)",
    "waits at its end": "atexit.register(time.sleep, 60); time.sleep(60)",
    "ends by itself": "signal.signal(2, lambda *_: None)\n        while not is_gone(): time.sleep(0.01)",
}


@pytest.mark.parametrize("name", WORK)
def test_a_command_without_a_head_ends(name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        code = CODE.format(address=address, work=WORK[name])
        command = subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
        assert command.stdout is not None
        assert command.stdout.readline() == "False\n"
    try:
        assert command.wait(20) == 1
    finally:
        command.kill()
    told = f"error: the Ray cluster at {address} is gone: its first computer does not answer\n"
    assert command.stdout.read() == told
    command.stdout.close()


def test_other_signals_are_passed_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        with pytest.raises(KeyboardInterrupt), watched(address, print):
            signal.raise_signal(signal.SIGINT)


def test_errors_that_ray_leaves_in_tasks_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    error = type("ActorUnavailableError", (Exception,), {"__module__": "ray.exceptions"})("gone")
    with quiet():
        for each in (error, ValueError("ours")):
            logging.getLogger("asyncio").error("Task exception was never retrieved", exc_info=each)
    assert "ours" in caplog.text
    assert "ActorUnavailableError" not in caplog.text

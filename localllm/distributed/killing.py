"""Ends processes of this machine that no longer work. Ray only asks them to leave, which a stopped one never does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from localllm.distributed import guard


def kill(process: int) -> None:
    """Kill a process, unless it has ended."""
    with suppress(OSError):
        os.kill(process, getattr(signal, "SIGKILL", signal.SIGTERM))  # Windows has no SIGKILL


@contextmanager
def guarded() -> Iterator[None]:
    """Let this process be killed if it is stopped within the block. Used while it starts, before a front watches it.
    Only on Linux.
    """
    if not Path("/proc/self/stat").exists():
        yield
        return
    command = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True) as child:
        try:
            yield
        finally:
            child.kill()

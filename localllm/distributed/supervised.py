"""Runs `ray start` for as long as its caller lives, and removes its files afterwards.

    python -m localllm.distributed.supervised FOLDER ARGUMENTS...

The caller has opened a pipe to this process. When the pipe closes, because the caller closed it or died, Ray's
processes are ended, and FOLDER, which Ray uses for its logs and sockets, is deleted.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import NoReturn

OWN = "r"  # folder in FOLDER, which only this user can enter
TRIES = 10
_PARENT_DEATH = 1  # PR_SET_PDEATHSIG
PATIENCE = 5.0  # seconds for `ray start` to end by itself
LEAVING = 1.0  # seconds for the processes that it has started


def main(folder: str, arguments: list[str]) -> NoReturn:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the caller decides
    own = os.path.join(folder, OWN)  # Ray lets all users write to the folder that it gets
    started = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--temp-dir={own}", *arguments]
    ray = subprocess.Popen(started, stdin=subprocess.DEVNULL, preexec_fn=_default_signals)

    def watch() -> None:
        sys.stdin.buffer.read()
        Path(f"{folder}.log").unlink(missing_ok=True)  # the caller does not read it any more
        ray.send_signal(signal.SIGINT)  # unlike SIGTERM, does not wait for five seconds
        try:
            ray.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            ray.kill()

    threading.Thread(target=watch, daemon=True).start()
    code = ray.wait()
    _end_session()
    for _ in range(TRIES):  # Ray's last processes may still write
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            break
        sleep(0.2)
    os._exit(code)  # the thread still reads


def _end_session() -> None:
    """Kill the processes that Ray has left. Its agents would wait a minute for a head that is gone, and keep their
    ports. On Linux only.
    """
    session, until = os.getpid(), monotonic() + LEAVING  # the caller has started this process in a new session
    while (left := _in_session(session)) and monotonic() < until:
        sleep(0.05)
    for process in left:
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)


def _in_session(session: int) -> list[int]:
    """Return the processes of a session except its leader."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):  # it has ended
            state, _, _, its = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:4]
            if its == str(session) != folder.name and state != "Z":
                found.append(int(folder.name))
    return found


def _default_signals() -> None:
    """Prepare Ray's process. On Linux, it also ends when this process is killed."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PARENT_DEATH, signal.SIGINT)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

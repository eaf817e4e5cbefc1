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
from time import sleep
from typing import NoReturn

OWN = "r"  # folder in FOLDER, which only this user can enter
TRIES = 10
_PARENT_DEATH = 1  # PR_SET_PDEATHSIG
PATIENCE = 5.0  # seconds for Ray's processes to end by themselves


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
    for _ in range(TRIES):  # Ray's last processes may still write
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            break
        sleep(0.2)
    os._exit(code)  # the thread still reads


def _default_signals() -> None:
    """Prepare Ray's process. On Linux, it also ends when this process is killed."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PARENT_DEATH, signal.SIGINT)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

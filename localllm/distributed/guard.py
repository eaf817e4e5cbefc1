"""Kills a process that is stopped while it starts. It runs as a child of this process:

    python guard.py PROCESS

It ends with its parent. `killing.guarded` starts it; the program's modules are not needed here, so it takes 10 MB.
"""

from __future__ import annotations

import os
import signal
import sys
import time

STOPPED = 1.5  # seconds until a stopped process is killed
LOOK = 0.3  # seconds between looks


def main(process: int) -> None:
    since = None
    while os.getppid() == process:
        now = time.monotonic()
        if not stopped(process):
            since = None
        elif since is None:
            since = now
        elif now - since > STOPPED:
            os.kill(process, signal.SIGKILL)
        time.sleep(LOOK)


def stopped(process: int) -> bool:
    """Return whether a signal has stopped a process, by Linux's /proc."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


if __name__ == "__main__":
    main(int(sys.argv[1]))

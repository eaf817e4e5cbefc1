"""Processes of this machine as Linux's /proc lists them, for tests and benchmarks."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep


def stat(process: int) -> tuple[str, int]:
    """Return the state of a process (Z: it has ended) and its parent. Raises OSError if it is gone."""
    state, parent, *_ = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return state, int(parent)


def runs(process: int) -> bool:
    with suppress(OSError):
        return stat(process)[0] != "Z"
    return False


def gone(process: int, seconds: float = 10.0) -> bool:
    """Return whether a process ends within some seconds."""
    until = monotonic() + seconds
    while runs(process):
        if monotonic() > until:
            return False
        sleep(0.05)
    return True


def below(process: int) -> set[int]:
    """Return the processes that a process has started, directly or not."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(folder.name)] = stat(int(folder.name))[1]
    found = new = {process}
    while new := {child for child, parent in parents.items() if parent in new}:
        found = found | new
    return found - {process}

"""Detects a stage that hangs: it handles a message, but its process has stopped working.

A connection only tells whether a process is alive. A hanging process (a lock that is never released, a device that does
not answer) is found by the processor time that it uses, which does not depend on how busy the machine is: a thread that
waits for a processor counts as working. An endless loop is not found; for it, the front's patience ends.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

HUNG = 1.2  # seconds without work until a stage counts as hanging
_LOOK = 0.1  # seconds between looks
_LITTLE = 0.02  # share of a processor that heartbeats and this thread stay below, and any work exceeds


class Watchdog:
    """Calls `hung` in a separate thread if the process stops working while it handles a message.

    Only for stages whose work uses the processor: a graphics card at work cannot be seen.
    """

    def __init__(self, hung: Callable[[], None]) -> None:
        self._hung = hung
        self._changes = 0  # odd while a message is handled
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Watch the process while a message is handled."""
        self._changes += 1
        try:
            yield
        finally:
            self._changes += 1

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        used, at, seen, since = _used(), time.monotonic(), 0, 0.0
        while not self._closed.wait(_LOOK):
            before, last, used, at = used, at, _used(), time.monotonic()
            changes = self._changes
            late = at - last > 5 * _LOOK  # this thread was kept from looking, as the others may have been
            works = used - before > _LITTLE * (at - last) or late
            if changes != seen or works or changes % 2 == 0 or _others_work():
                seen, since = changes, at
            elif at - since > HUNG:
                self._hung()
                return


def _used() -> float:
    """Return the seconds of processor time of the process, without this thread's."""
    return time.process_time() - time.thread_time()


def _others_work() -> bool:
    """Whether another thread runs, waits for a processor or for a disk. Elsewhere than on Linux: False."""
    mine = threading.get_native_id()
    try:
        threads = [int(each) for each in os.listdir("/proc/self/task")]
        stats = [Path(f"/proc/self/task/{each}/stat").read_text() for each in threads if each != mine]
        states = [stat.rpartition(")")[2].split()[0] for stat in stats]
    except (OSError, ValueError, IndexError):  # a thread ended meanwhile
        return Path("/proc/self/task").exists()
    return any(state in "RD" for state in states)

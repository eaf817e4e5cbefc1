"""End a command on SIGTERM and SIGHUP (on Windows SIGBREAK) as on Ctrl-C, so that unfinished files are removed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

# Windows has no SIGHUP; its consoles send SIGBREAK for Ctrl-Break and when they close.
ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGBREAK") if hasattr(signal, name))


@contextmanager
def unwinding() -> Iterator[None]:
    """Raise SystemExit(128 + number) on the first signal in ENDING. Ignored signals stay ignored (nohup)."""
    if threading.current_thread() is not threading.main_thread():  # Python sets handlers only in the main thread
        yield
        return
    caught = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        for each in caught:
            signal.signal(each, signal.SIG_IGN)  # a second signal must not interrupt the cleanup
        raise SystemExit(128 + number)

    for number in caught:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, signal.SIG_DFL)

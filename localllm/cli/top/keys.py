"""Read single keys from the terminal, without Enter and without echo. Without a terminal, no keys arrive."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from select import select
from time import sleep
from types import FrameType

from localllm.cli.terminal.quiet import Quiet

Wait = Callable[[float], bytes]  # waits up to this number of seconds; returns the pressed key, or b""


@contextmanager
def keys(leave: Callable[[], None], come_back: Callable[[], None]) -> Iterator[Wait]:
    """Yield a function that waits for a key. Ctrl-C raises KeyboardInterrupt. On Ctrl-Z, `leave` restores the
    shell's screen, and `come_back` shows the program's screen again after `fg`."""
    if not sys.stdin.isatty() or not hasattr(signal, "SIGTSTP"):
        yield _no_keys
        return
    with Quiet(by_key=True):
        signal.signal(signal.SIGINT, signal.default_int_handler)  # Quiet ignores SIGINT and restores the handler
        stop = signal.getsignal(signal.SIGTSTP)
        assert callable(stop)

        def stopped(number: int, frame: FrameType | None) -> None:
            leave()
            stop(number, frame)  # returns after the shell's `fg`
            signal.signal(signal.SIGTSTP, stopped)
            come_back()

        signal.signal(signal.SIGTSTP, stopped)
        yield _key


def _key(seconds: float) -> bytes:
    descriptor = sys.stdin.fileno()
    if not select([descriptor], [], [], seconds)[0]:
        return b""
    found = os.read(descriptor, 64)
    if not found:  # the terminal has gone
        raise KeyboardInterrupt
    return b"" if found.startswith(b"\x1b") else found  # ignore arrows and other escape sequences


def _no_keys(seconds: float) -> bytes:
    sleep(seconds)
    return b""

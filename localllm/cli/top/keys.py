"""Single keys from the terminal, without Enter and without showing them. Without a terminal there are none."""

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

Wait = Callable[[float], bytes]  # takes seconds; returns the key that was pressed, or nothing


@contextmanager
def keys(leave: Callable[[], None], come_back: Callable[[], None]) -> Iterator[Wait]:
    """Yield what waits for a key. Ctrl-C raises KeyboardInterrupt. Around a stop by Ctrl-Z, `leave` gives the shell
    its screen and `come_back` takes it again."""
    if not sys.stdin.isatty() or not hasattr(signal, "SIGTSTP"):
        yield _no_keys
        return
    with Quiet(by_key=True):
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which Quiet would ignore; it restores what was
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
    return b"" if found.startswith(b"\x1b") else found  # arrows and their like


def _no_keys(seconds: float) -> bytes:
    sleep(seconds)
    return b""

"""Turn off the echo of keys typed while a program writes. The keys wait for the next prompt."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

try:
    import termios
except ImportError:  # a system without termios
    termios = None  # type: ignore[assignment]

_INPUT, _LOCAL = 0, 3  # indices into the terminal attributes


class Quiet:
    """Context manager that switches the terminal's echo off. It does nothing if stdin is not a terminal.

    With `by_key`, an editor reads the waiting keys, so they are passed on one by one. Ctrl-Z restores the terminal for
    the shell. Ctrl-C is ignored when no answer is running, because it may arrive just after an answer has ended.
    """

    def __init__(self, by_key: bool) -> None:
        self._by_key = by_key
        self._before: list[object] | None = None

    def __enter__(self) -> Quiet:
        if termios is not None and sys.stdin.isatty() and threading.current_thread() is threading.main_thread():
            self._before = termios.tcgetattr(sys.stdin.fileno())
            self._stops = signal.signal(signal.SIGTSTP, self._stop)
            self._interrupts = signal.signal(signal.SIGINT, _ignored)
            self.apply()
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            self._set(self._before)
            signal.signal(signal.SIGTSTP, self._stops)
            signal.signal(signal.SIGINT, self._interrupts)
            self._before = None

    def apply(self) -> None:
        """Switch the echo off again, in case another program has switched it on."""
        if self._before is None:
            return
        quiet = list(self._before)
        local, keys = quiet[_LOCAL], quiet[_INPUT]
        assert isinstance(local, int)
        assert isinstance(keys, int)
        # Without NOFLSH, Ctrl-C would discard waiting keys and part of the output.
        quiet[_LOCAL] = (local | termios.NOFLSH) & ~termios.ECHO & ~(termios.ICANON if self._by_key else 0)
        quiet[_INPUT] = keys & ~(termios.ICRNL if self._by_key else 0)
        self._set(quiet)

    @contextmanager
    def paused(self, interrupts: bool = False) -> Iterator[None]:
        """Restore the terminal within the block, for another program. With `interrupts`, Ctrl-C works too."""
        if self._before is None:
            yield
            return
        self._set(self._before)
        try:
            if interrupts:
                signal.signal(signal.SIGINT, self._interrupts)
            yield
        finally:
            signal.signal(signal.SIGINT, _ignored)
            self.apply()

    def _set(self, attributes: list[object]) -> None:
        descriptor = sys.stdin.fileno()
        with suppress(OSError, termios.error):  # the terminal may be gone
            if os.tcgetpgrp(descriptor) == os.getpgrp():  # in the background, setting it would stop the program
                termios.tcsetattr(descriptor, termios.TCSANOW, attributes)  # type: ignore[arg-type]

    def _stop(self, number: int, frame: FrameType | None) -> None:
        assert self._before is not None
        self._set(self._before)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # execution continues here after fg
        signal.signal(signal.SIGTSTP, self._stop)
        self.apply()


def _ignored(number: int, frame: FrameType | None) -> None:
    """Ignore Ctrl-C. Unlike SIG_IGN, child processes do not inherit this handler."""

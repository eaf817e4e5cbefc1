"""Keys that are typed while a program writes: they are not shown in its output, and wait for the next prompt."""

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
except ImportError:  # a system without such terminals
    termios = None  # type: ignore[assignment]

_INPUT, _LOCAL = 0, 3  # indices into the attributes of a terminal


class Quiet:
    """Context manager: within it the terminal does not echo. It does nothing if stdin is not a terminal.

    `by_key`: an editor reads the waiting keys, so they are passed on one by one. Ctrl-Z gives the shell the terminal as
    it was before. Ctrl-C means nothing where nobody listens: it may come just when an answer has ended.
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
        """Switch the echo off, also if another program has switched it on."""
        if self._before is None:
            return
        quiet = list(self._before)
        local, keys = quiet[_LOCAL], quiet[_INPUT]
        assert isinstance(local, int)
        assert isinstance(keys, int)
        # Without NOFLSH, Ctrl-C would drop the waiting keys and a part of the output.
        quiet[_LOCAL] = (local | termios.NOFLSH) & ~termios.ECHO & ~(termios.ICANON if self._by_key else 0)
        quiet[_INPUT] = keys & ~(termios.ICRNL if self._by_key else 0)
        self._set(quiet)

    @contextmanager
    def paused(self, interrupts: bool = False) -> Iterator[None]:
        """Within the block the terminal is as before, for another program; with `interrupts` Ctrl-C counts, too."""
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
        os.kill(os.getpid(), signal.SIGTSTP)  # continues here
        signal.signal(signal.SIGTSTP, self._stop)
        self.apply()


def _ignored(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C by doing nothing. Programs that are started do not inherit this, unlike SIG_IGN."""

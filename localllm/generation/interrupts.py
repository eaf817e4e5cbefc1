"""Holds Ctrl-C back while a model is in the middle of a step, whose lists and blocks it would leave half changed."""

from __future__ import annotations

from _signal import getsignal, signal  # type: ignore[import-not-found]
from signal import SIGINT, default_int_handler
from threading import get_ident, main_thread
from types import FrameType

# Every token enters a block. The functions of the module `signal` would take 10 microseconds, for enums.
_SIGINT = int(SIGINT)


class Uninterrupted:
    """Inside the block, KeyboardInterrupt waits until the end of the block.

    A handler that the program itself has set for SIGINT stays.
    """

    pending = False  # whether Ctrl-C has been pressed
    _held = False

    def __enter__(self) -> Uninterrupted:
        if get_ident() == main_thread().ident and getsignal(_SIGINT) is default_int_handler:
            signal(_SIGINT, self._hold)
            self._held = True
        return self

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self.pending = True

    def __exit__(self, *error: object) -> None:
        if self._held:
            signal(_SIGINT, default_int_handler)
            if self.pending:
                raise KeyboardInterrupt

"""A lock for an engine. Cleanups run when it is free."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Exclusive:
    """`with` enters it, and waits for a thread that is inside. A thread may enter it again."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._cleanups = deque[Callable[[], None]]()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        try:
            while self._depth == 1 and self._cleanups:
                self._cleanups.popleft()()
        finally:
            self._depth -= 1
            self._lock.release()
        self._clean()

    def afterwards(self, cleanup: Callable[[], None]) -> None:
        """Clean up when no thread is inside: now, or when the one inside leaves. Never waits."""
        self._cleanups.append(cleanup)
        self._clean()

    def _clean(self) -> None:
        """Run cleanups unless a thread is inside; that thread runs them when it leaves."""
        while self._cleanups and self._lock.acquire(blocking=False):
            try:
                if self._depth:  # this thread itself is inside
                    return
                self._depth += 1
                try:
                    while self._cleanups:
                        self._cleanups.popleft()()
                finally:
                    self._depth -= 1
            finally:
                self._lock.release()

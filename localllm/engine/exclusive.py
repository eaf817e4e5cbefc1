"""A lock for an engine, with cleanup functions that run when it is released."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Exclusive:
    """A reentrant lock. `with` waits until no other thread holds it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._cleanups = deque[Callable[[], None]]()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        try:
            while self._cleanups and self._depth == 1:
                self._cleanups.popleft()()
        finally:
            self._depth -= 1
            self._lock.release()
        if self._cleanups:
            self._clean()

    def afterwards(self, cleanup: Callable[[], None]) -> None:
        """Run `cleanup` while no other thread holds the lock: now, or when the holder releases it. Never blocks."""
        self._cleanups.append(cleanup)
        self._clean()

    def _clean(self) -> None:
        """Run the cleanups unless another thread holds the lock; that thread runs them on release."""
        while self._cleanups and self._lock.acquire(blocking=False):
            try:
                if self._depth:  # this thread holds the lock
                    return
                self._depth += 1
                try:
                    while self._cleanups:
                        self._cleanups.popleft()()
                finally:
                    self._depth -= 1
            finally:
                self._lock.release()

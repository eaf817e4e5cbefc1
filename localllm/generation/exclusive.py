"""One thread at a time in an engine: a second one gets an error at once, instead of wrong tokens.

Answers of several generators may alternate, in one thread or in several: only calls that overlap in time are refused.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

from localllm.errors import LocalLLMError

T = TypeVar("T")


class ModelBusy(LocalLLMError):
    """Another thread is using the model; that thread is not disturbed."""


class Exclusive:
    """`with` enters it. A thread may enter it again; another one gets ModelBusy while it is inside."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a generator may be collected, and cleaned up, at any point
        self._thread: int | None = None  # the one inside
        self._depth = 0
        self._cleanups = deque[Callable[[], None]]()

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._lock:
            if self._thread is not None and self._thread != me:
                raise ModelBusy(
                    "another thread is using this model, which takes one call at a time: put a lock around each call "
                    "and each step of an answer, or load the model once for every thread"
                )
            self._thread = me
            self._depth += 1

    def __exit__(self, *error: object) -> None:
        try:
            while (cleanup := self._next_cleanup()) is not None:
                cleanup()
        except BaseException:
            with self._lock:
                self._leave()
            raise

    def afterwards(self, cleanup: Callable[[], None]) -> None:
        """Clean up when no thread is inside: now, or when the one inside leaves. Never waits, and never raises
        ModelBusy."""
        with self._lock:
            self._cleanups.append(cleanup)
            if self._thread is not None:
                return
            self._thread, self._depth = threading.get_ident(), 1
        self.__exit__()

    def each(self, steps: Generator[T]) -> Iterator[T]:
        """Yield what `steps` yields. Each of its steps runs inside; between them others may enter."""
        try:
            while True:
                with self:
                    try:
                        found = next(steps)
                    except StopIteration:
                        return
                yield found
        finally:
            self.afterwards(steps.close)

    def _next_cleanup(self) -> Callable[[], None] | None:
        """Return a cleanup to run before this thread leaves, or leave and return None."""
        with self._lock:
            if self._depth == 1 and self._cleanups:
                return self._cleanups.popleft()
            self._leave()
            return None

    def _leave(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._thread = None

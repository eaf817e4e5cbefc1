"""Confined child processes of the program, with short time limits, each used for many cases."""

from __future__ import annotations

import os
from types import TracebackType

from localllm.sandbox import Confined, ResourceLimits


class PerProcess:
    """One confined child for this process, and another for each process forked from it.

    As a context manager it yields the child and keeps it running. A single `Confined(...)` would stop it.
    """

    def __init__(self, task: str, limits: ResourceLimits) -> None:
        self._task, self._limits = task, limits
        self._child: tuple[int, Confined] | None = None  # with the id of the process that started the child

    def get(self) -> Confined:
        if self._child is None or self._child[0] != os.getpid():
            self._child = os.getpid(), Confined(self._task, self._limits)
        return self._child[1]

    def __enter__(self) -> Confined:
        return self.get()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

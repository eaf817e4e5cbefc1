"""Keeps Ray's own lines out of the terminal while this process is connected.

Ray has no option for them: one of its threads prints the errors of the cluster on stdout, such as "Task
ServeController.listen_for_change failed" whenever Serve ends, and asyncio reports errors that Ray's tasks leave.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

THREADS = "ray_"  # the names of Ray's threads begin so
_MODULES = "ray."  # and the modules of its errors


class _Stdout:
    """A text stream that ignores Ray's threads."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return len(text) if threading.current_thread().name.startswith(THREADS) else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _is_ours(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not type(error).__module__.startswith(_MODULES)


@contextmanager
def quiet() -> Iterator[None]:
    """Within the block, print no lines of Ray."""
    tasks, before = logging.getLogger("asyncio"), sys.stdout
    tasks.addFilter(_is_ours)
    sys.stdout = cast(TextIO, _Stdout(before))
    try:
        yield
    finally:
        sys.stdout = before
        tasks.removeFilter(_is_ours)

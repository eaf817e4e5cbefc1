"""Reading at a position of a file, by any number of threads at once."""

from __future__ import annotations

import io
import os
from threading import Lock

_MOST = 1 << 30  # bytes of one read: Linux reads at most 2 GiB - 4 KiB, macOS 2 GiB - 1
_SEEKING = Lock()  # where a read moves the file's position, only one thread at a time may read


def read_at(file: io.FileIO, target: memoryview, offset: int) -> int:
    """Read into `target` (bytes, not empty) from `offset` on, and return how many bytes came; 0 at the end.

    OSError if the system cannot read, ValueError if the file is closed.
    """
    target = target[:_MOST]
    if hasattr(os, "preadv"):
        return os.preadv(file.fileno(), [target], offset)
    with _SEEKING:  # Windows, and macOS before 11
        file.seek(offset)
        return file.readinto(target) or 0

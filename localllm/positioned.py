"""Reading at a position of a file, by any number of threads at once."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from contextlib import suppress
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


def expect(file: io.FileIO, offsets: Iterable[int], size: int) -> None:
    """Tell the system, if it can be told, which pieces of `size` bytes come next, so that it fetches them at once."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError, ValueError):  # the read itself says what is wrong
            number = file.fileno()
            for offset in offsets:
                os.posix_fadvise(number, offset, size, os.POSIX_FADV_WILLNEED)

"""Read from a position in a file, safely from several threads."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from contextlib import suppress
from threading import Lock

_MOST = 1 << 30  # bytes per read; Linux reads at most 2 GiB - 4 KiB, macOS 2 GiB - 1
_SEEKING = Lock()  # without positional reads, only one thread may read at a time


def read_at(file: io.FileIO, target: memoryview, offset: int) -> int:
    """Read into `target` (bytes, not empty) from `offset`. Return the number of bytes read, which is 0 at the end.

    Raises OSError if the read fails, and ValueError if the file is closed.
    """
    target = target[:_MOST]
    if hasattr(os, "preadv"):
        return os.preadv(file.fileno(), [target], offset)
    with _SEEKING:  # Windows, and macOS before 11, lack positional reads
        file.seek(offset)
        return file.readinto(target) or 0


def expect(file: io.FileIO, offsets: Iterable[int], size: int) -> None:
    """Announce the ranges of `size` bytes that are read next, so that the operating system can prefetch them."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError, ValueError):  # the read itself reports errors
            number = file.fileno()
            for offset in offsets:
                os.posix_fadvise(number, offset, size, os.POSIX_FADV_WILLNEED)

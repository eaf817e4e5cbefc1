"""The heap of the C library: its size, and how to return unused pages to the system.

Compiling a grammar or reading a large text allocates many small blocks. glibc keeps freed blocks in one heap per
thread, by default with up to 64 MB free at the end of each heap. With other C libraries these functions do nothing.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt
_SPARE = 4 << 20


class _Info(ctypes.Structure):
    """glibc's struct mallinfo2, from version 2.33"""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


@cache
def _library() -> Any:
    """Return the C library if it is glibc, otherwise None."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    if not all(hasattr(library, name) for name in ("gnu_get_libc_version", "mallopt", "malloc_trim")):
        return None
    library.malloc_trim.argtypes = [ctypes.c_size_t]
    if hasattr(library, "mallinfo2"):
        library.mallinfo2.restype = _Info
    return library


def heap_in_use() -> int | None:
    """Return the bytes that this process has allocated from the C library, or None if unknown."""
    library = _library()
    if library is None or not hasattr(library, "mallinfo2"):
        return None
    info = library.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def limit_spare() -> None:
    """Keep at most 4 MB free at the end of each heap, and return larger blocks to the system when they are freed.

    By default, glibc raises both thresholds when a large block is freed. `return_pages` cannot return the end of a
    heap, except in the main thread's heap.
    """
    library = _library()
    if library is not None:
        library.mallopt(_MMAP_THRESHOLD, _SPARE)
        library.mallopt(_TRIM_THRESHOLD, _SPARE)


def return_pages() -> None:
    """Return the free pages of all heaps to the system.

    A call takes 1 to 20 ms, or 200 ms for 300 MB. Other threads continue, but may block on allocations.
    """
    library = _library()
    if library is not None:
        library.malloc_trim(0)

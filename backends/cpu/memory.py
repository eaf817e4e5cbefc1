"""Memory for kernels: aligned anonymous mappings, with huge pages if the system provides them."""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import BackendError
from localllm.base.notices import Notice, Setting

LINE = 64

# Shared mappings, Python's default, get no huge pages.
PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


def aligned(size: int) -> int:
    return -(-size // LINE) * LINE


class Arena:
    """One zeroed mapping, allocated front to back. A page uses physical memory once it is touched."""

    def __init__(self, size: int, what: str) -> None:
        self.size = size
        try:
            self._map = mmap.mmap(-1, max(size, 1) + LINE, **PRIVATE)
        except (OSError, OverflowError, ValueError) as error:
            problem = f"cannot reserve {size / 2**30:.1f} GiB for {what}: {error}"
            advice = ("use a smaller model or context (", Setting("ctx_size"), ")")
            raise BackendError(Notice(problem, "; ", *advice)) from error
        if hasattr(mmap, "MADV_HUGEPAGE") and size >= 1 << 22:
            with suppress(OSError):  # without huge pages kernels are only slower
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(self._map, np.uint8)
        start = -self._bytes.ctypes.data % LINE
        self.address = self._bytes.ctypes.data + start
        self._start, self._used = start, 0

    def take(self, size: int) -> int:
        """Return the address of `size` unused bytes."""
        address = self.address + self._used
        self._used += aligned(size)
        assert self._used <= aligned(self.size), "the arena is too small"
        return address

    def view(self, address: int, size: int) -> NDArray[np.uint8]:
        at = self._start + address - self.address
        return self._bytes[at : at + size]


def address(array: NDArray[np.generic]) -> int:
    return int(array.ctypes.data)

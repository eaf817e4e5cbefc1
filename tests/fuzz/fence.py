"""Kernel buffers that end at an inaccessible page, so that an access beyond the end raises a signal.

`install` replaces the memory allocation of the CPU backend in this process. Activations start as NaN, so that a read of
unwritten memory changes the logits. One engine serves all models, so kernels are compiled and loaded once.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

import localllm.backends.cpu.backend
import localllm.backends.cpu.buffers
import localllm.backends.cpu.cache_blocks
import localllm.backends.cpu.inputs
import localllm.backends.cpu.sharing
import localllm.backends.cpu.storage
import localllm.backends.cpu.weights
from localllm.backends.allocation import Buffer
from localllm.backends.base import BackendError
from localllm.backends.cpu.jit import Library
from localllm.backends.cpu.memory import aligned
from localllm.backends.cpu.storage import Storage

PAGE = mmap.PAGESIZE
MODULES = (
    localllm.backends.cpu.storage,
    localllm.backends.cpu.cache_blocks,
    localllm.backends.cpu.weights,
)  # modules whose `Arena` is replaced
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def fenced(size: int) -> int:
    """Return the address of `size` zero bytes, rounded up to whole cache lines, between two inaccessible pages.

    The memory is never freed.
    """
    size = aligned(max(size, 1))
    inside = -(-size // PAGE) * PAGE
    begin = _libc.mmap(None, inside + 2 * PAGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if begin in (None, 2**64 - 1) or _libc.mprotect(begin + PAGE, inside, _READ_WRITE):
        raise MemoryError(f"{size} bytes")
    return int(begin) + PAGE + inside - size


def at(address: int, size: int) -> NDArray[np.uint8]:
    return np.frombuffer((ctypes.c_uint8 * max(size, 1)).from_address(address), np.uint8, size)


def moved(array: NDArray[Any]) -> NDArray[Any]:
    """Return a copy of the array that ends at an inaccessible page."""
    array = np.ascontiguousarray(array)
    target = at(fenced(array.nbytes), array.nbytes).view(array.dtype).reshape(array.shape)
    target[...] = array
    return target


class FencedArena:
    """Replaces `Arena`: an inaccessible page follows every allocation, or the whole arena if it has no allocations."""

    def __init__(self, size: int, what: str) -> None:
        self.size, self._what, self._left = size, what, aligned(size)
        self._address = 0

    @property
    def address(self) -> int:
        if not self._address:
            self._address = self._fenced(self.size)
        return self._address

    def take(self, size: int) -> int:
        self._left -= aligned(size)
        assert self._left >= 0, "the arena is too small"
        taken = self._fenced(size)
        self._address = self._address or taken
        return taken

    def view(self, address: int, size: int) -> NDArray[np.uint8]:
        return at(address, size)

    def _fenced(self, size: int) -> int:
        try:
            return fenced(size)
        except MemoryError:
            raise BackendError(f"cannot reserve {size} bytes for {self._what}; use a smaller model") from None


class _Zeros:
    """Replaces NumPy in modules that pass addresses to kernels. An inaccessible page follows arrays from `zeros`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def zeros(self, *words: Any) -> NDArray[Any]:
        return moved(np.zeros(*words))


def install() -> None:
    """Install the fences in the CPU backend of this process and of its children."""
    for module in MODULES:
        assert hasattr(module, "Arena"), module
        module.Arena = FencedArena  # type: ignore[attr-defined]
    Storage.address_of = _address  # type: ignore[method-assign]
    for name in ("dense_vector", "expert_vectors"):
        setattr(localllm.backends.cpu.weights, name, _then_moved(getattr(localllm.backends.cpu.weights, name)))
    localllm.backends.cpu.weights.address = lambda array: moved(array).ctypes.data  # rows that kernels read as stored
    for module in (localllm.backends.cpu.storage, localllm.backends.cpu.inputs, localllm.backends.cpu.sharing):
        module.np = _Zeros()  # type: ignore[attr-defined]
    localllm.backends.cpu.backend.Library = cache(Library)  # type: ignore[misc]


def _then_moved(function: Callable[..., NDArray[Any]]) -> Callable[..., NDArray[Any]]:
    return lambda *words: moved(function(*words))


def _address(self: Storage, buffer: Buffer) -> int:
    fences: dict[int, int] = self.activations.__dict__.setdefault("fences", {})  # each step's memory has its own
    if buffer.number not in fences:
        size = self._buffers.bytes(buffer)
        fences[buffer.number] = found = fenced(size)
        at(found, min(size, 1 << 22))[:] = 0xFF  # NaN
    return fences[buffer.number]

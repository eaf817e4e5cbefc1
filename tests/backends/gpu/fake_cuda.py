"""An imitation of the parts of PyCUDA and libcuda that `backends.cuda` uses: memory, a stream, events, graphs. Kernels
are emulated.

It is as strict as a GPU. Queued work runs at synchronization, and reads page-locked memory only then.
Copies must stay within an allocation. A stream under capture runs nothing. Every call requires a current context.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.backends.cuda import backend
from localllm.backends.cuda.nvrtc import Compiled
from tests.backends.gpu.emulation import EmulatedDevice

FREE, TOTAL = 1 << 30, 2 << 30


class Error(Exception):
    """An imitation of pycuda.driver.Error."""


class MemoryError(Error):
    """An imitation of pycuda.driver.MemoryError."""


class Card:
    """One GPU, with libcuda's graph functions and the `pycuda.driver` module."""

    def __init__(self, folder: Path, compute: str) -> None:
        self.folder, self.emulated = folder, EmulatedDevice(folder, compute)
        self.queue: list[Callable[[], None]] = []
        self.captured: list[Callable[[], None]] | None = None
        self.graphs: list[list[Callable[[], None]] | None] = []
        self.contexts, self.launches, self.most = 0, 0, TOTAL
        self.memory: dict[int, NDArray[np.uint8]] = {}
        self.locked: list[NDArray[Any]] = []

    def ask(self, work: Callable[[], None], recordable: bool = False) -> None:
        if not self.contexts:
            raise Error("invalid device context")
        if self.captured is None:
            self.queue.append(work)
        elif recordable:
            self.captured.append(work)
        else:
            raise Error("operation not permitted when stream is capturing")

    def wait(self) -> None:
        if self.captured is not None:
            raise Error("operation not permitted when stream is capturing")
        queue, self.queue = self.queue, []
        for work in queue:
            work()

    def at(self, address: int, size: int) -> NDArray[np.uint8]:
        """Return the device memory at an address."""
        for start, memory in self.memory.items():
            if start <= address <= start + len(memory) - size:
                return memory[address - start : address - start + size]
        raise Error("invalid argument: beyond an allocation")

    def copy(self, target: NDArray[Any], source: NDArray[Any]) -> None:
        self.ask(lambda: target.__setitem__(slice(None), source))

    # -- libcuda, as called through ctypes -----------------------------------------------------------------------------

    def cuStreamBeginCapture_v2(self, stream: Any, mode: int) -> int:
        self.captured = []
        return 0

    def cuStreamEndCapture(self, stream: Any, graph: Any) -> int:
        self.graphs.append(self.captured)
        self.captured, graph._obj.value = None, len(self.graphs)
        return 0

    def cuGraphInstantiateWithFlags(self, made: Any, graph: Any, flags: Any) -> int:
        self.graphs.append(self.graphs[graph.value - 1])
        made._obj.value = len(self.graphs)
        return 0

    def cuGraphLaunch(self, made: Any, stream: Any) -> int:
        works = self.graphs[made.value - 1]
        if works is None or not self.contexts:
            return 400
        self.queue += works
        return 0

    def cuGraphDestroy(self, graph: Any) -> int:
        self.graphs[graph.value - 1] = None
        return 0

    cuGraphExecDestroy = cuGraphDestroy

    def cuGetErrorString(self, result: int, text: Any) -> int:
        text._obj.value = b"invalid handle"
        return 0


class Allocation:
    def __init__(self, card: Card, size: int) -> None:
        if sum(map(len, card.memory.values())) + size > card.most:
            raise MemoryError("cuMemAlloc failed: out of memory")
        self._card, memory = card, card.emulated.alloc(size, "")
        memory[:] = 0xFF  # NaNs
        self._start = memory.ctypes.data
        card.memory[self._start] = memory

    def __int__(self) -> int:
        return self._start

    def free(self) -> None:
        del self._card.memory[self._start]


class Function:
    def __init__(self, card: Card, library: bytes) -> None:
        self._card, self._run = card, ctypes.CDLL(library.decode()).run
        self._run.restype = ctypes.c_char_p

    def _launch_kernel(self, grid: Any, block: Any, packed: bytes, local_bytes: int, stream: Any) -> None:
        pointers = (ctypes.c_void_p * (len(packed) // 8)).from_buffer_copy(packed)
        for pointer in pointers:
            assert pointer in self._card.memory

        def work() -> None:
            self._card.launches += 1
            failure = self._run(pointers, (ctypes.c_int * 3)(*grid), block[0], local_bytes, 0)
            if failure is not None:
                raise Error(failure.decode())

        self._card.ask(work, recordable=True)


def driver(card: Card) -> ModuleType:
    """Return the imitation of the module `pycuda.driver`."""

    class Device:
        max_shared_memory_per_block = 48 << 10

        def __init__(self, number: int) -> None:
            assert number == 0

        @staticmethod
        def count() -> int:
            return 1

        def name(self) -> str:
            return "Emulated card"

        def compute_capability(self) -> tuple[int, int]:
            return divmod(int(card.emulated.facts.compute[3:]), 10)

        def retain_primary_context(self) -> Any:
            return Context()

    class Context:
        def push(self) -> None:
            card.contexts += 1

        def pop(self) -> None:
            card.contexts -= 1

        def detach(self) -> None:
            assert not card.contexts

    class Stream:
        handle = 0x5EED

        def synchronize(self) -> None:
            card.wait()

    class Event:
        def record(self, stream: Stream) -> None:
            card.ask(lambda: None)

        def synchronize(self) -> None:
            card.wait()

        def time_till(self, other: Event) -> float:
            return 2.5

    class Module:
        def __init__(self, library: bytes) -> None:
            self._library = library

        def get_function(self, name: str) -> Function:
            return Function(card, self._library)

    def pagelocked_zeros(size: int, type: Any) -> NDArray[Any]:
        card.locked.append(np.zeros(size, type))
        return card.locked[-1]

    def memset(target: Allocation, value: int, size: int, stream: Stream) -> None:
        card.copy(card.at(int(target), size), np.full(size, value, np.uint8))

    def host_to_device(target: Any, data: NDArray[Any], stream: Stream) -> None:
        assert data.flags.c_contiguous
        source = data.reshape(-1).view(np.uint8)
        locked = any(np.may_share_memory(data, other) for other in card.locked)
        card.copy(card.at(int(target), data.nbytes), source if locked else source.copy())

    def device_to_host(into: NDArray[Any], source: int, stream: Stream) -> None:
        assert into.flags.c_contiguous
        card.copy(into.reshape(-1).view(np.uint8), card.at(source, into.nbytes))

    def device_to_device(target: int, source: int, size: int, stream: Stream) -> None:
        card.copy(card.at(target, size), card.at(source, size))

    found = ModuleType("pycuda.driver")
    found.__dict__.update(
        Error=Error, MemoryError=MemoryError, Device=Device, Stream=Stream, Event=Event, module_from_buffer=Module,
        init=lambda: None, mem_get_info=lambda: (FREE, TOTAL), get_driver_version=lambda: 13000,
        mem_alloc=lambda size: Allocation(card, size), memset_d8_async=memset, memcpy_htod_async=host_to_device,
        memcpy_dtoh_async=device_to_host, memcpy_dtod_async=device_to_device, pagelocked_zeros=pagelocked_zeros,
    )  # fmt: skip
    return found


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, compute: str = "sm_90") -> Card:
    """Make `backends.cuda` find this GPU, and replace NVRTC with another compiler."""
    card = Card(folder, compute)
    package, module = ModuleType("pycuda"), driver(card)
    package.driver = module  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "pycuda", package)
    monkeypatch.setitem(__import__("sys").modules, "pycuda.driver", module)
    real = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name, *rest: card if name == "libcuda.so.1" else real(name, *rest))

    class Compiler:
        version = "13.0"

        def compile(self, source: str, name: str, architecture: str) -> Compiled:
            assert architecture == compute
            return Compiled(str(card.emulated.library(source, name)).encode(), 0, 0, 0)

    monkeypatch.setattr(backend, "Nvrtc", Compiler)
    return card

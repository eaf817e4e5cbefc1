"""The CUDA backend: a PyCUDA device for the executable of `backends.gpu`.

The kernels have been compiled for four compute types (benchmarks/results), but never run on a GPU. Tests run the
kernels, and the calls of PyCUDA 2026.1, on an emulated GPU (tests/backends/gpu).
"""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import BackendError
from localllm.backends.cuda.graph import Graph
from localllm.backends.cuda.nvrtc import OPTIONS, Nvrtc
from localllm.backends.gpu.backend import GpuBackend, pick
from localllm.backends.gpu.compiled import CompiledStore
from localllm.backends.gpu.conformance.verdicts import Conformance
from localllm.backends.gpu.device import Explaining, Facts, Grid, out_of_memory
from localllm.base.notices import Notice, Setting
from localllm.quant.codecache import default_folder


def _pycuda() -> Any:
    """Return pycuda.driver, initialized. Raises BackendError if PyCUDA, the driver or a GPU is missing."""
    try:
        import pycuda.driver as cuda
    except ImportError as error:  # also raised if libcuda.so.1 is missing
        if isinstance(error, ModuleNotFoundError):
            reason = "PyCUDA is not installed; pip install 'localllm[cuda]'"
        else:
            reason = f"no CUDA driver: {error}"
        raise BackendError(Notice(f"{reason}, or use ", Setting("backend", "cpu"))) from None
    try:
        cuda.init()
        count = cuda.Device.count()
    except cuda.Error as error:
        problem = f"the CUDA driver does not start: {error}"
        raise BackendError(Notice(problem, "; use ", Setting("backend", "cpu"))) from None
    if not count:
        raise BackendError(Notice("the CUDA driver finds no card; use ", Setting("backend", "cpu")))
    return cuda


def cuda_devices() -> list[Any]:
    """Return PyCUDA's devices. Raises BackendError if there is no device."""
    cuda = _pycuda()
    return [cuda.Device(number) for number in range(cuda.Device.count())]


class CudaDevice(Explaining):
    """A GPU with its primary context and one stream."""

    generic = False

    def __init__(self, device: Any, cache: Path | Literal["default"] | None = "default") -> None:
        self._cuda = cuda = _pycuda()
        self.errors: tuple[type[Exception], ...] = (cuda.Error,)
        self._nvrtc = Nvrtc()
        self._context: Any = None
        self._modules: dict[str, Any] = {}
        self._graphs: WeakSet[Graph] = WeakSet()
        try:
            own = device.retain_primary_context()
            own.push()
            self._context = own
            atexit.register(self.close)
            self._stream = cuda.Stream()
        except cuda.Error as error:
            with suppress(cuda.Error):
                self.close()
            raise BackendError(f"{device.name()} cannot be opened: {error}") from None
        self._driver = ctypes.CDLL("libcuda.so.1")  # the library that PyCUDA has already loaded
        self.store = CompiledStore(default_folder("gpu") if cache == "default" else cache)
        major, minor = device.compute_capability()
        free, total = cuda.mem_get_info()
        version = cuda.get_driver_version()
        self.facts = Facts(
            name=device.name(),
            api=f"CUDA driver {version // 1000}.{version % 1000 // 10}, NVRTC {self._nvrtc.version}",
            compute=f"sm_{major}{minor}",
            memory=total,
            free=free,
            local_memory=device.max_shared_memory_per_block,
        )
        self._cubins: dict[str, bytes] = {}  # compiled kernels that are not loaded yet

    def alloc(self, size: int, what: str) -> Any:
        cuda = self._cuda
        with self._explaining(f"{size / 2**30:.2f} GiB for {what}"):
            buffer = cuda.mem_alloc(max(size, 4))
        cuda.memset_d8_async(buffer, 0, max(size, 4), self._stream)
        return buffer

    def free(self, buffer: Any) -> None:
        with suppress(self._cuda.Error):
            self._stream.synchronize()
            buffer.free()

    def upload(self, target: Any, offset: int, data: NDArray[Any]) -> None:
        with self._explaining("an upload"):
            self._cuda.memcpy_htod_async(int(target) + offset, np.ascontiguousarray(data), self._stream)
            self._stream.synchronize()

    def staging(self, size: int) -> NDArray[np.int32]:
        try:
            found: NDArray[np.int32] = self._cuda.pagelocked_zeros(size, np.int32)
        except self._cuda.Error:  # the system refuses to pin more memory
            return np.zeros(size, np.int32)
        return found

    def send(self, target: Any, data: NDArray[Any]) -> None:
        with self._explaining("a step"):
            self._cuda.memcpy_htod_async(target, data, self._stream)

    def download(self, source: Any, offset: int, into: NDArray[Any]) -> None:
        with self._explaining("a step"):
            self._cuda.memcpy_dtoh_async(into, int(source) + offset, self._stream)
        self.sync()

    def copy(self, source: Any, source_offset: int, target: Any, target_offset: int, size: int) -> None:
        self._cuda.memcpy_dtod_async(int(target) + target_offset, int(source) + source_offset, size, self._stream)

    def translate(self, source: str, kernel: str) -> None:
        if source not in self._modules:
            self._cubins[source] = self._cubin(source, kernel)

    def compile(self, source: str, kernel: str) -> Any:
        module = self._modules.get(source)
        if module is None:
            cubin = self._cubins.pop(source, None) or self._cubin(source, kernel)
            with self._explaining("the kernels"):
                module = self._modules[source] = self._cuda.module_from_buffer(cubin)
        return module.get_function(kernel)

    def _cubin(self, source: str, kernel: str) -> bytes:
        key = (source, self.facts.compute, self._nvrtc.version, *OPTIONS)
        return self.store.get(key, lambda: self._nvrtc.compile(source, kernel, self.facts.compute).cubin)

    def prepare(self, kernel: Any, size: int, local_bytes: int, arguments: Sequence[Any]) -> Callable[[Grid], None]:
        packed = np.array([int(argument) for argument in arguments], np.uint64).tobytes()
        block, stream = (size, 1, 1), self._stream
        call = kernel._launch_kernel  # PyCUDA's public launch calls use it, but pack the arguments every time

        def launch(grid: Grid) -> None:
            try:
                call(grid, block, packed, local_bytes, stream)
            except self._cuda.Error as error:
                raise self._explained(error, "a step") from None

        return launch

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = Graph(self._driver, self._stream.handle, work)
        self._graphs.add(graph)
        return graph

    def sync(self) -> None:
        with self._explaining("a step"):
            self._stream.synchronize()

    def seconds(self, work: Callable[[], None]) -> float:
        start, end = self._cuda.Event(), self._cuda.Event()
        start.record(self._stream)
        work()
        end.record(self._stream)
        end.synchronize()
        return float(start.time_till(end)) / 1e3

    def _explained(self, error: Exception, what: str) -> BackendError:
        if isinstance(error, self._cuda.MemoryError):
            return out_of_memory(self.facts.name, what)
        return BackendError(Notice(f"{self.facts.name}: {error} at ", what))

    def close(self) -> None:
        """Close the context. Python also calls this at exit, because PyCUDA aborts if a context is still open then."""
        atexit.unregister(self.close)
        for graph in self._graphs:
            graph.destroy()
        self._modules = {}
        if self._context is not None:
            self._context.pop()
            self._context.detach()  # otherwise the destructor would make a call that is invalid for primary contexts
            self._context = None


class CudaBackend(GpuBackend):
    """A backend on one CUDA GPU. `device` is the driver's device number, or part of the device's name."""

    name = "cuda"
    device: CudaDevice

    def __init__(
        self,
        device: str | int = "",
        cache: Path | Literal["default"] | None = "default",
        conformance: Conformance | None = None,
    ) -> None:
        found = cuda_devices()
        own = found[pick(self.name, [each.name() for each in found], device)]
        super().__init__(CudaDevice(own, cache), conformance)

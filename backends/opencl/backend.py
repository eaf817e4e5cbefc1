"""The OpenCL backend: a PyOpenCL device for the executable of `backends.gpu`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import BackendError
from localllm.backends.gpu.backend import GpuBackend, pick
from localllm.backends.gpu.compiled import CompiledStore
from localllm.backends.gpu.conformance.verdicts import Conformance
from localllm.backends.gpu.device import Explaining, Facts, Grid, out_of_memory
from localllm.backends.opencl.devices import kind_of, of_kinds, package, reason_of
from localllm.base.notices import Notice
from localllm.quant.codecache import default_folder

OPTIONS = ("-cl-std=CL1.2",)
NO_MEMORY = ("MEM_OBJECT_ALLOCATION_FAILURE", "OUT_OF_RESOURCES", "OUT_OF_HOST_MEMORY", "INVALID_BUFFER_SIZE")


def _complaint(log: str) -> str:
    """Return the errors in a compiler log, without PyOpenCL's additions."""
    lines = [line.strip() for line in log.replace("\\n", "\n").splitlines()]
    found = [line for line in lines if "error" in line.lower() and not line.startswith("clBuildProgram")]
    return "; ".join(found[:8])[:2000] or log[:2000]


class OpenClDevice(Explaining):
    """An OpenCL device with one queue. `options` go to its compiler."""

    options = OPTIONS

    def __init__(self, device: Any, cache: Path | Literal["default"] | None = "default") -> None:
        self._cl = cl = package()
        self.errors: tuple[type[Exception], ...] = (cl.Error,)
        self._device = device
        try:
            self._context = cl.Context([device])
            self._queue = cl.CommandQueue(self._context)
        except cl.Error as error:
            raise BackendError(f"{device.name.strip()} cannot be opened: {reason_of(error)}") from None
        self.store = CompiledStore(default_folder("gpu") if cache == "default" else cache)
        self.facts = Facts(
            name=device.name.strip(),
            api=f"{device.version.strip()}, driver {device.driver_version.strip()}",
            compute=kind_of(device),
            memory=device.global_mem_size,
            free=device.global_mem_size,  # total memory, as OpenCL does not report free memory
            local_memory=device.local_mem_size,
        )
        # PoCL runs kernels on the CPU, takes a second to compile each, and caches them on disk. If a program's binary
        # is requested, PoCL compiles again for every work-group size.
        self.generic = "pocl" in device.version.lower()
        self._programs: dict[str, Any] = {}
        self._tape: list[tuple[Any, Grid, Grid]] | None = None  # launches of the recording in progress

    def alloc(self, size: int, what: str) -> Any:
        cl = self._cl
        with self._explaining(f"{size / 2**30:.2f} GiB for {what}"):
            buffer = cl.Buffer(self._context, cl.mem_flags.READ_WRITE, max(size, 4))
            cl.enqueue_fill_buffer(self._queue, buffer, np.uint8(0), 0, max(size, 4))
        return buffer

    def free(self, buffer: Any) -> None:
        with suppress(self._cl.Error):
            buffer.release()

    def upload(self, target: Any, offset: int, data: NDArray[Any]) -> None:
        with self._explaining("an upload"):
            self._cl.enqueue_copy(self._queue, target, data, dst_offset=offset, is_blocking=True)

    def staging(self, size: int) -> NDArray[np.int32]:
        return np.zeros(size, np.int32)

    def send(self, target: Any, data: NDArray[Any]) -> None:
        with self._explaining("a step"):
            self._cl.enqueue_copy(self._queue, target, data, is_blocking=False)

    def download(self, source: Any, offset: int, into: NDArray[Any]) -> None:
        with self._explaining("a step"):
            self._cl.enqueue_copy(self._queue, into, source, src_offset=offset, is_blocking=True)

    def copy(self, source: Any, source_offset: int, target: Any, target_offset: int, size: int) -> None:
        self._cl.enqueue_copy(
            self._queue, target, source, src_offset=source_offset, dst_offset=target_offset, byte_count=size
        )

    def translate(self, source: str, kernel: str) -> None: ...

    def compile(self, source: str, kernel: str) -> Any:
        cl = self._cl
        program = self._programs.get(source)
        if program is None and self.generic:
            program = self._programs[source] = self._from_source(source)
        if program is None:
            key = (source, self.facts.name, self.facts.api, *self.options)
            binary = self.store.get(key, lambda: self._binary(source))
            try:
                program = cl.Program(self._context, [self._device], [binary]).build(list(self.options))
            except cl.Error:  # the driver no longer accepts this binary
                program = self._from_source(source)
            self._programs[source] = program
        return program, kernel

    def _binary(self, source: str) -> bytes:
        return bytes(self._from_source(source).get_info(self._cl.program_info.BINARIES)[0])

    def _from_source(self, source: str) -> Any:
        try:
            return self._cl.Program(self._context, source).build(list(self.options), cache_dir=False)
        except self._cl.RuntimeError as error:
            raise BackendError(f"{self.facts.name}: its compiler refuses a kernel: {_complaint(str(error))}") from None

    def prepare(self, kernel: Any, size: int, local_bytes: int, arguments: Sequence[Any]) -> Callable[[Grid], None]:
        cl, queue, local = self._cl, self._queue, (size, 1, 1)
        program, name = kernel
        made = cl.Kernel(program, name)  # one kernel object per launch, so that its arguments stay set
        made.set_args(*arguments, *([cl.LocalMemory(local_bytes)] if local_bytes else []))

        def launch(grid: Grid) -> None:
            items = (grid[0] * size, grid[1], grid[2])
            if self._tape is not None:
                self._tape.append((made, items, local))
                return
            try:
                cl.enqueue_nd_range_kernel(queue, made, items, local)
            except cl.Error as error:
                raise self._explained(error, "a step") from None

        return launch

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record launches in a list: OpenCL 1.2 has no graphs."""
        tape: list[tuple[Any, Grid, Grid]] = []
        self._tape = tape
        try:
            work()
        finally:
            self._tape = None
        queue, enqueue = self._queue, self._cl.enqueue_nd_range_kernel

        def replay() -> None:
            with self._explaining("a step"):
                for kernel, items, local in tape:
                    enqueue(queue, kernel, items, local)

        return replay

    def sync(self) -> None:
        with self._explaining("a step"):
            self._queue.finish()

    def seconds(self, work: Callable[[], None]) -> float:
        self.sync()
        start = perf_counter()
        work()
        self.sync()
        return perf_counter() - start

    def close(self) -> None:
        self._programs = {}

    def _explained(self, error: Exception, what: str) -> BackendError:
        if isinstance(error, self._cl.MemoryError) or any(name in str(error) for name in NO_MEMORY):
            return out_of_memory(self.facts.name, what)
        return BackendError(Notice(f"{self.facts.name}: {reason_of(error)} at ", what))


class OpenClBackend(GpuBackend):
    """A backend on one OpenCL device. `device` is a number among the devices of these kinds, or part of a name."""

    name = "opencl"
    device: OpenClDevice

    def __init__(
        self,
        device: str | int = "",
        cache: Path | Literal["default"] | None = "default",
        kinds: tuple[str, ...] = ("GPU", "CPU", "other"),
        conformance: Conformance | None = None,
    ) -> None:
        found = of_kinds(kinds)
        own = found[pick(self.name, [each.name.strip() for each in found], device)]
        super().__init__(OpenClDevice(own, cache), conformance)

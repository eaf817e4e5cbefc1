"""The interface of a graphics device: hold bytes, compile sources, launch kernels, measure time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import BackendError
from localllm.notice import N, Notice, Setting

Grid = tuple[int, int, int]  # work-groups
LEAST_LOCAL = 32 << 10  # bytes of local memory that OpenCL promises every work-group; no kernel needs more there


@dataclass(frozen=True, slots=True)
class Facts:
    """Properties of a device."""

    name: str
    api: str  # "CUDA 13.0, compute 9.0", "OpenCL 3.0 PoCL ..."
    compute: str  # "sm_90", "CPU", "GPU": the type that kernels are compiled for
    memory: int  # bytes
    free: int  # bytes; equal to `memory` if the driver does not say
    local_memory: int  # maximum bytes of a work-group


LESS_MEMORY = Notice(
    "use fewer layers on it (", Setting("gpu_layers", N), "), a smaller context (", Setting("ctx_size", N),
    ") or a smaller model",
)  # fmt: skip


def out_of_memory(device: str, what: str) -> BackendError:
    """The error to raise; `what` names the allocation or the call that failed."""
    return BackendError(Notice(f"{device}: out of memory at ", what, "; ", LESS_MEMORY))


class Device(Protocol):
    """One opened device with one queue: its calls take effect in order."""

    facts: Facts
    errors: tuple[type[Exception], ...]  # of the driver; a method that promises no BackendError may raise them
    generic: bool  # whether kernels get shapes at run time, because compiling is slow and their speed does not matter

    def alloc(self, size: int, what: str) -> Any:
        """Allocate a buffer of zeros. BackendError, naming `what`, if there is no room."""
        ...

    def free(self, buffer: Any) -> None: ...

    def upload(self, target: Any, offset: int, data: NDArray[Any]) -> None:
        """Copy a contiguous array to a buffer. The caller may change the array afterwards."""
        ...

    def staging(self, size: int) -> NDArray[np.int32]:
        """Allocate int32 (size,) of zeros that `send` and `download` copy at full speed."""
        ...

    def send(self, target: Any, data: NDArray[Any]) -> None:
        """Copy a `staging` array to the start of a buffer. It must not change before the next download or sync."""
        ...

    def download(self, source: Any, offset: int, into: NDArray[Any]) -> None:
        """Copy a buffer to a contiguous array; complete on return."""
        ...

    def copy(self, source: Any, source_offset: int, target: Any, target_offset: int, size: int) -> None: ...

    def translate(self, source: str, kernel: str) -> None:
        """Do the slow part of `compile` ahead; several threads may call it. May do nothing."""
        ...

    def compile(self, source: str, kernel: str) -> Any:
        """Compile a kernel of a source, or load it from the cache on disk."""
        ...

    def prepare(self, kernel: Any, size: int, local_bytes: int, arguments: Sequence[Any]) -> Callable[[Grid], None]:
        """Set a kernel's buffers once; a call of the result queues a launch of a grid.

        Work-groups have `size` items and `local_bytes` of local memory.
        """
        ...

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record the launches that `work` makes, without running them; a call of the result queues all of them.

        BackendError if the device cannot record.
        """
        ...

    def sync(self) -> None:
        """Wait for everything in the queue. BackendError if some of it failed."""
        ...

    def seconds(self, work: Callable[[], None]) -> float:
        """Return the device time of everything that `work` queues."""
        ...

    def close(self) -> None: ...

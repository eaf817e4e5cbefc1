"""The interface of a graphics device: store bytes, compile sources, launch kernels, measure time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import BackendError
from localllm.base.notices import N, Notice, Setting

Grid = tuple[int, int, int]  # work-groups
LEAST_LOCAL = 32 << 10  # bytes of local memory that OpenCL guarantees; no kernel needs more on such devices


@dataclass(frozen=True, slots=True)
class Facts:
    """Properties of a device."""

    name: str
    api: str  # "CUDA 13.0, compute 9.0", "OpenCL 3.0 PoCL ..."
    compute: str  # compile target: "sm_90", "CPU", "GPU"
    memory: int  # bytes
    free: int  # bytes; equal to `memory` if the driver does not report it
    local_memory: int  # maximum bytes per work-group


LESS_MEMORY = Notice(
    "use fewer layers on it (", Setting("gpu_layers", N), "), a smaller context (", Setting("ctx_size", N),
    ") or a smaller model",
)  # fmt: skip


def out_of_memory(device: str, what: str) -> BackendError:
    """Return the error to raise; `what` names the allocation or the call that failed."""
    return BackendError(Notice(f"{device}: out of memory at ", what, "; ", LESS_MEMORY))


class Device(Protocol):
    """One opened device with one queue: its calls take effect in order."""

    facts: Facts
    # exceptions of the driver; methods may raise them unless they document BackendError
    errors: tuple[type[Exception], ...]
    generic: bool  # whether kernels get shapes at run time, because compiling is slow and kernel speed does not matter

    def alloc(self, size: int, what: str) -> Any:
        """Allocate a zeroed buffer. BackendError, naming `what`, if memory is insufficient."""
        ...

    def free(self, buffer: Any) -> None: ...

    def upload(self, target: Any, offset: int, data: NDArray[Any]) -> None:
        """Copy a contiguous array to a buffer. The caller may change the array afterwards."""
        ...

    def staging(self, size: int) -> NDArray[np.int32]:
        """Allocate zeros int32 (size,) that `send` and `download` copy at full speed."""
        ...

    def send(self, target: Any, data: NDArray[Any]) -> None:
        """Copy a `staging` array to the start of a buffer. It must not change before the next download or sync."""
        ...

    def download(self, source: Any, offset: int, into: NDArray[Any]) -> None:
        """Copy a buffer to a contiguous array; complete on return."""
        ...

    def copy(self, source: Any, source_offset: int, target: Any, target_offset: int, size: int) -> None: ...

    def translate(self, source: str, kernel: str) -> None:
        """Do the slow part of `compile` in advance; several threads may call it. May do nothing."""
        ...

    def compile(self, source: str, kernel: str) -> Any:
        """Compile a kernel of a source, or load it from the cache on disk."""
        ...

    def prepare(self, kernel: Any, size: int, local_bytes: int, arguments: Sequence[Any]) -> Callable[[Grid], None]:
        """Set a kernel's buffers once; calling the result queues a launch with a grid.

        Work-groups have `size` items and `local_bytes` of local memory.
        """
        ...

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record the launches that `work` makes, without running them; calling the result queues all of them.

        Raise BackendError if the device cannot record.
        """
        ...

    def sync(self) -> None:
        """Wait for everything in the queue. BackendError if some of it failed."""
        ...

    def seconds(self, work: Callable[[], None]) -> float:
        """Return the device time of everything that `work` queues."""
        ...

    def close(self) -> None: ...

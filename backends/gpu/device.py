"""The interface of a GPU device: stores bytes, compiles sources, launches kernels, and measures time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import BackendError
from localllm.base.notices import N, Notice, Setting

Grid = tuple[int, int, int]  # number of work-groups in each dimension
LEAST_LOCAL = 32 << 10  # bytes of local memory that OpenCL guarantees; on such devices no kernel needs more


@dataclass(frozen=True, slots=True)
class Facts:
    """Properties of a device."""

    name: str
    api: str  # for example "CUDA 13.0, compute 9.0" or "OpenCL 3.0 PoCL ..."
    compute: str  # compile target: "sm_90", "CPU" or "GPU"
    memory: int  # total bytes
    free: int  # free bytes; equal to `memory` if the driver does not report them
    local_memory: int  # maximum bytes per work-group


LESS_MEMORY = Notice(
    "use fewer layers on it (", Setting("gpu_layers", N), "), a smaller context (", Setting("ctx_size", N),
    ") or a smaller model",
)  # fmt: skip


def out_of_memory(device: str, what: str) -> BackendError:
    """Return the error to raise. `what` names the allocation or the call that failed."""
    return BackendError(Notice(f"{device}: out of memory at ", what, "; ", LESS_MEMORY))


class Explaining:
    """What the devices of all drivers share: BackendError in place of the driver's errors."""

    errors: tuple[type[Exception], ...]

    def _explained(self, error: Exception, what: str) -> BackendError:
        raise NotImplementedError

    @contextmanager
    def _explaining(self, what: str) -> Iterator[None]:
        """Context manager around calls of the driver. `what` names the calls in the error."""
        try:
            yield
        except self.errors as error:
            raise self._explained(error, what) from None


class Device(Protocol):
    """One opened device with one in-order queue."""

    facts: Facts
    # exceptions of the driver; methods may raise them unless they document BackendError
    errors: tuple[type[Exception], ...]
    generic: bool  # whether kernels get shapes at run time, because compiling is slow and kernel speed does not matter

    def alloc(self, size: int, what: str) -> Any:
        """Allocate a zeroed buffer. If memory is insufficient, BackendError names `what`."""
        ...

    def free(self, buffer: Any) -> None: ...

    def upload(self, target: Any, offset: int, data: NDArray[Any]) -> None:
        """Copy a contiguous array to a buffer. The caller may overwrite the array afterwards."""
        ...

    def staging(self, size: int) -> NDArray[np.int32]:
        """Allocate zeroed host memory int32 (size,) that `send` and `download` copy at full speed."""
        ...

    def send(self, target: Any, data: NDArray[Any]) -> None:
        """Copy a `staging` array to the start of a buffer.

        The array must not change before the next download or sync.
        """
        ...

    def download(self, source: Any, offset: int, into: NDArray[Any]) -> None:
        """Copy a buffer to a contiguous array. The copy is complete on return."""
        ...

    def copy(self, source: Any, source_offset: int, target: Any, target_offset: int, size: int) -> None: ...

    def translate(self, source: str, kernel: str) -> None:
        """Do the slow part of `compile` in advance, or nothing. Several threads may call it."""
        ...

    def compile(self, source: str, kernel: str) -> Any:
        """Compile a kernel of a source, or load it from the cache on disk."""
        ...

    def prepare(self, kernel: Any, size: int, local_bytes: int, arguments: Sequence[Any]) -> Callable[[Grid], None]:
        """Set a kernel's buffers once. The function returned queues a launch on a grid.

        Work-groups have `size` work-items and `local_bytes` of local memory.
        """
        ...

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record the launches that `work` makes without running them.

        The function returned queues all the recorded launches. Raises BackendError if the device cannot record.
        """
        ...

    def sync(self) -> None:
        """Wait until the queue is empty. Raises BackendError if a queued operation failed."""
        ...

    def seconds(self, work: Callable[[], None]) -> float:
        """Return the device time in seconds of the operations that `work` queues."""
        ...

    def close(self) -> None: ...

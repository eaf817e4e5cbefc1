"""What a graphics device must do for us: hold bytes, compile a source, launch kernels, tell the time. Nothing more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import BackendError
from localllm.notice import N, Notice, Setting

Grid = tuple[int, int, int]  # work-groups


@dataclass(frozen=True, slots=True)
class Facts:
    """What a device says of itself."""

    name: str
    api: str  # "CUDA 13.0, compute 9.0", "OpenCL 3.0 PoCL ..."
    compute: str  # "sm_90", "CPU", "GPU": the type that kernels are compiled for
    memory: int  # bytes
    free: int  # bytes; as much as `memory` where the driver does not say
    local_memory: int  # bytes a work-group may have


LESS_MEMORY = Notice(
    "use fewer layers on it (", Setting("gpu_layers", N), "), a smaller context (", Setting("ctx_size", N),
    ") or a smaller model",
)  # fmt: skip


def out_of_memory(device: str, what: str) -> BackendError:
    """The one line of it."""
    return BackendError(Notice(f"{device}: out of memory at ", what, "; ", LESS_MEMORY))


class Device(Protocol):
    """One opened device with one queue: what is asked of it happens in order."""

    facts: Facts
    generic: bool  # whether kernels get shapes at run time: where compiling is slow, and the speed of kernels no aim

    def alloc(self, size: int, what: str) -> Any:
        """A buffer of zeros; BackendError, which names `what`, where there is no room."""
        ...

    def free(self, buffer: Any) -> None: ...

    def upload(self, target: Any, offset: int, data: NDArray[Any]) -> None:
        """Bytes of a contiguous array to a buffer; the array may be changed afterwards."""
        ...

    def staging(self, size: int) -> NDArray[np.int32]:
        """int32 (size,) of zeros that `send` and `download` copy from and to at full speed."""
        ...

    def send(self, target: Any, data: NDArray[Any]) -> None:
        """Bytes of a `staging` array to the start of a buffer; it stays as it is until the next download or sync."""
        ...

    def download(self, source: Any, offset: int, into: NDArray[Any]) -> None:
        """Bytes of a buffer to a contiguous array, complete on return."""
        ...

    def copy(self, source: Any, source_offset: int, target: Any, target_offset: int, size: int) -> None: ...

    def translate(self, source: str, kernel: str) -> None:
        """The slow part of `compile`, ahead of it and by several threads at a time; nothing where they may not."""
        ...

    def compile(self, source: str, kernel: str) -> Any:
        """A kernel of a source, through the cache on disk."""
        ...

    def prepare(self, kernel: Any, size: int, local_bytes: int, arguments: Sequence[Any]) -> Callable[[Grid], None]:
        """A launch with its arguments (buffers) set once: work-groups of `size` items with `local_bytes` of local
        memory. Calling it with a grid queues it."""
        ...

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """The launches that `work` asks for, which are not made now, as one that can be made again and again.

        BackendError where the device does not allow it."""
        ...

    def sync(self) -> None:
        """Wait for all that was queued; BackendError where it failed."""
        ...

    def seconds(self, work: Callable[[], None]) -> float:
        """How long the device takes for what `work` queues."""
        ...

    def close(self) -> None: ...

"""Measures a machine for a stage: free memory, read bandwidth, and the backend that opens there."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

import localllm
from localllm.backends import open_backend
from localllm.backends.base import Backend, BackendError, DeviceBackend
from localllm.base.machine.memory import memory
from localllm.base.machine.processor import usable_threads
from localllm.base.notices import said
from localllm.loading.loader import UNKNOWN_MEMORY

READ = 128 << 20  # bytes read per pass, if memory permits: more than most caches hold
PASSES = 7
UNKNOWN_BANDWIDTH = 10e9  # bytes per second, where none can be measured


@dataclass(frozen=True, slots=True)
class Request:
    """Which backend a stage should use."""

    backend: str = "auto"
    device: str = ""
    checked: bool = True  # whether a graphics card must pass its check
    threads: int | None = None

    def opened(self, most_threads: int) -> Backend:
        """Open the backend. Raises BackendError."""
        threads = min(self.threads or most_threads, most_threads)
        return open_backend(self.backend, threads, self.device, checked=self.checked)


@dataclass(frozen=True, slots=True)
class Facts:
    """A machine, as its own process measured it. `problem` says why it cannot run a stage."""

    version: str
    sources: str  # hash of the program's files
    host: str
    request: Request = Request()
    threads: int = 0
    free: int = 0  # bytes
    bandwidth: float = 0.0  # bytes per second
    backend: str = ""
    device: str = ""
    problem: str = ""


def measure(request: Request, most_threads: int) -> Facts:
    """Open the backend, measure, and close it: about 0.2 s on a CPU."""
    own = localllm.__version__, sources(), socket.gethostname(), request
    threads = max(1, min(most_threads or usable_threads(), usable_threads(), request.threads or 1 << 10))
    try:
        backend = request.opened(threads)
    except BackendError as error:
        return Facts(*own, threads, problem=str(said(error)))
    try:
        found = memory()
        free = found.free if found.total else UNKNOWN_MEMORY
        if isinstance(backend, DeviceBackend):
            free = backend.free_memory()
        bandwidth = _bandwidth(backend, free)
        return Facts(*own, threads, free, bandwidth, backend.name, backend.describe())
    except BackendError as error:
        return Facts(*own, threads, problem=str(said(error)))
    finally:
        backend.close()


def _bandwidth(backend: Backend, free: int) -> float:
    """Return the median rate of some passes over memory. It includes the effect of other programs."""
    from localllm.backends.cpu.backend import CpuBackend
    from localllm.backends.cpu.memory import Arena
    from localllm.backends.cpu.roofs import read_rates

    if isinstance(backend, DeviceBackend):
        from localllm.backends.gpu.backend import GpuBackend
        from localllm.backends.gpu.budget import copy_bandwidth

        return copy_bandwidth(backend.device, READ) if isinstance(backend, GpuBackend) else UNKNOWN_BANDWIDTH
    backend = getattr(backend, "backend", backend)  # the CPU, where a card was expected
    if not isinstance(backend, CpuBackend):
        return UNKNOWN_BANDWIDTH
    arena = Arena(max(1 << 20, min(READ, free // 8)), "a measurement of bandwidth")
    at = arena.take(arena.size)
    arena.view(at, arena.size)[:] = 1  # unwritten pages all map to one cached page
    rates = read_rates(backend.library, backend.pool, at, arena.size, PASSES)
    return median(rates) if rates else UNKNOWN_BANDWIDTH


@cache
def sources() -> str:
    """Return a hash of the program's Python files, which differs between two states of a checkout too."""
    digest = hashlib.sha256()
    root = Path(localllm.__file__).parent
    for name, path in sorted(_python_files(root)):
        digest.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _python_files(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files that decide what a stage computes. The program's other folders may be links (a checkout)."""
    for folder, inner, files in os.walk(root, followlinks=True):
        inner[:] = [each for each in inner if each not in ("__pycache__", "cli", "server", "demo", "hub")]
        yield from ((str(Path(folder, f).relative_to(root)), Path(folder, f)) for f in files if f.endswith(".py"))

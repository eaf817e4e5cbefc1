"""How operations run: the table of backends. Opening a backend imports its packages; nothing else does."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from localllm.backends.base import F16_CACHE, Backend, BackendError, CacheTypes, Executable, Limits, Progress
from localllm.notice import Notice, Setting, said
from localllm.plan import Plan, Value

__all__ = ["BACKENDS", "BackendError", "open_backend"]


def _cpu(threads: int | None, device: str) -> Backend:
    from localllm.backends.cpu.backend import CpuBackend

    return CpuBackend(threads)


def _cuda(threads: int | None, device: str) -> Backend:
    from localllm.backends.cuda.backend import CudaBackend

    return CudaBackend(device)


def _opencl(threads: int | None, device: str) -> Backend:
    from localllm.backends.opencl.backend import OpenClBackend

    return OpenClBackend(device)


def _opencl_card(threads: int | None, device: str) -> Backend:
    """OpenCL on a graphics card, not on the CPU."""
    from localllm.backends.opencl.backend import OpenClBackend

    return OpenClBackend(device, kinds=("GPU",))


def _reference(threads: int | None, device: str) -> Backend:
    from localllm.backends.reference import ReferenceBackend

    return ReferenceBackend()


BACKENDS: dict[str, Callable[[int | None, str], Backend]] = {
    "cpu": _cpu,
    "cuda": _cuda,
    "opencl": _opencl,
    "reference": _reference,
}
# The backends that "auto" tries, and files that exist if a driver does: looking at files is cheaper than an import.
_CARDS = ((_cuda, ("/dev/nvidiactl", "/dev/dxg")), (_opencl_card, ("/etc/OpenCL/vendors",)))


@dataclass(slots=True)
class _Instead:
    """A backend that replaces one that did not open, and tells the reason."""

    name: str
    backend: Backend
    reason: str

    def describe(self) -> str:
        return f"{self.backend.describe()} ({self.reason})"

    def bind(
        self,
        plan: Plan,
        limits: Limits,
        cache: CacheTypes = F16_CACHE,
        progress: Progress | None = None,
        keep: Collection[Value] = (),
    ) -> Executable:
        return self.backend.bind(plan, limits, cache, progress, keep)

    def close(self) -> None:
        self.backend.close()


def _auto(threads: int | None) -> Backend:
    """Open a graphics card if there is one, else the CPU, with the reason if a driver seems to be installed."""
    reasons = []
    for opened, signs in _CARDS:
        if any(Path(sign).exists() for sign in signs):
            try:
                return opened(threads, "")
            except BackendError as error:
                reasons.append(str(error).split(";")[0].split(", or use")[0])
    backend = _cpu(threads, "")
    return _Instead(backend.name, backend, "; ".join(reasons)) if reasons else backend


def _with_device(threads: int | None, device: str) -> Backend:
    """Open the first backend that has the named device, even if that device is the CPU."""
    reasons: list[str] = []
    for opened in (_cuda, _opencl):
        try:
            return opened(threads, device)
        except BackendError as error:
            reasons += ["; ", said(error)]
    raise BackendError(Notice(*reasons[1:]))


def open_backend(name: str, threads: int | None = None, device: str = "") -> Backend:
    """Open the backend called `name`; "auto" is the fastest of this machine. BackendError lists the backends.

    `device` is a number, or part of the name, of a device as `localllm devices` lists them.
    """
    if name != "auto" and name not in BACKENDS:
        raise BackendError(f"unknown backend '{name}'; there are: auto, {', '.join(BACKENDS)}")
    if device and name not in ("auto", "cuda", "opencl"):
        problem = f": the {name} backend has no devices to choose from; leave one out"
        raise BackendError(Notice(Setting("device", device), problem))
    if name == "auto":
        return _with_device(threads, device) if device else _auto(threads)
    return BACKENDS[name](threads, device)

"""The registry of backends. A backend's package is imported only when the backend is opened.

May import: base (printable, notices, files), quant, plan.
Begin with: base.py (the interface), then reference_operations.py, which defines every operation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.backends.base import F16_CACHE, Backend, BackendError, CacheTypes, Executable, Limits, Progress
from localllm.base.notices import Notice, Setting, said
from localllm.plan import Plan, Value

if TYPE_CHECKING:
    from localllm.backends.gpu.conformance.verdicts import Conformance

__all__ = ["BACKENDS", "BackendError", "open_backend"]


def _cpu(threads: int | None, device: str, checked: bool = True) -> Backend:
    from localllm.backends.cpu.backend import CpuBackend

    return CpuBackend(threads)


def _cuda(threads: int | None, device: str, checked: bool = True) -> Backend:
    from localllm.backends.cuda.backend import CudaBackend

    return CudaBackend(device, conformance=_conformance(checked))


def _opencl(threads: int | None, device: str, checked: bool = True) -> Backend:
    from localllm.backends.opencl.backend import OpenClBackend

    return OpenClBackend(device, conformance=_conformance(checked))


def _opencl_card(threads: int | None, device: str, checked: bool = True) -> Backend:
    """Open OpenCL on a GPU. Raises BackendError if OpenCL offers only a CPU device."""
    from localllm.backends.opencl.devices import of_kinds

    of_kinds(("GPU",))  # fail before the expensive import of the GPU code
    from localllm.backends.opencl.backend import OpenClBackend

    return OpenClBackend(device, kinds=("GPU",), conformance=_conformance(checked))


def _conformance(checked: bool) -> Conformance | None:
    """Return the conformance check for a device, or None if `checked` is false.

    Its results are cached next to the compiled kernels.
    """
    if not checked:
        return None
    from localllm.backends.gpu.conformance.verdicts import Conformance
    from localllm.quant.codecache import default_folder

    return Conformance(default_folder("gpu"))


def _reference(threads: int | None, device: str, checked: bool = True) -> Backend:
    from localllm.backends.reference import ReferenceBackend

    return ReferenceBackend()


BACKENDS: dict[str, Callable[[int | None, str, bool], Backend]] = {
    "cpu": _cpu,
    "cuda": _cuda,
    "opencl": _opencl,
    "reference": _reference,
}
# GPU backends that "auto" tries, each with files that show that its driver is installed. Checking files is cheap;
# importing the package is slow. OpenCL counts only if its package is installed, since many OpenCL drivers are for CPUs.
_CARDS = ((_cuda, ("/dev/nvidiactl", "/dev/dxg"), ""), (_opencl_card, ("/etc/OpenCL/vendors",), "pyopencl"))


@dataclass(slots=True)
class _Instead:
    """A fallback for a backend that failed to open; `describe` includes the reason."""

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


def _auto(threads: int | None, checked: bool) -> Backend:
    """Open a GPU backend if there is one, otherwise the CPU backend.

    If a GPU was expected, the CPU backend's description says why it was not used.
    """
    reasons = []
    for opened, signs, required in _CARDS:
        if any(Path(sign).exists() for sign in signs) and (not required or find_spec(required) is not None):
            try:
                return opened(threads, "", checked)
            except BackendError as error:
                reasons.append(str(error).split(";")[0].split(", or use")[0])
    backend = _cpu(threads, "")
    return _Instead(backend.name, backend, "; ".join(reasons)) if reasons else backend


def _with_device(threads: int | None, device: str, checked: bool) -> Backend:
    """Open the first backend that has the device.

    OpenCL on the CPU is allowed here, because the user named the device.
    """
    reasons: list[str] = []
    for opened in (_cuda, _opencl):
        try:
            return opened(threads, device, checked)
        except BackendError as error:
            reasons += ["; ", said(error)]
    raise BackendError(Notice(*reasons[1:]))


def open_backend(name: str, threads: int | None = None, device: str = "", checked: bool = True) -> Backend:
    """Open the backend `name`. "auto" picks the fastest backend on this machine.

    Raises BackendError, which lists the backends, if none opens. `device` is a device number or part of a device name,
    as listed by `localllm devices`. If `checked`, a GPU backend binds a plan only if the device passes the conformance
    checks of the plan's operations (`gpu.conformance`).
    """
    if name != "auto" and name not in BACKENDS:
        raise BackendError(f"unknown backend '{name}'; supported: auto, {', '.join(BACKENDS)}")
    if device and name not in ("auto", "cuda", "opencl"):
        problem = f": the {name} backend has no devices to choose from; leave one out"
        raise BackendError(Notice(Setting("device", device), problem))
    if name == "auto":
        return _with_device(threads, device, checked) if device else _auto(threads, checked)
    return BACKENDS[name](threads, device, checked)

"""Lists the OpenCL devices of this machine, without the import of the GPU code, which takes a tenth of a second."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from localllm.backends.base import BackendError
from localllm.base.notices import Notice, Setting

SIMULATOR = "oclgrind"  # a simulator for tests, which reports itself as a GPU but is a thousand times slower


def package() -> Any:
    """Import PyOpenCL. Raises BackendError if it is missing."""
    try:
        import pyopencl
    except ImportError as error:
        problem = f"the opencl backend needs PyOpenCL ({error}); pip install 'localllm[opencl]', or use "
        raise BackendError(Notice(problem, Setting("backend", "cpu"))) from None
    return pyopencl


def opencl_devices() -> list[Any]:
    """Return PyOpenCL's devices, GPUs first. Raises BackendError if PyOpenCL, a driver or a device is missing."""
    cl = package()
    try:
        platforms = [each for each in cl.get_platforms() if SIMULATOR not in each.name.lower()]
        found = [device for platform in platforms for device in platform.get_devices()]
    except cl.Error as error:
        instead = "install the card's driver, or pip install pocl-binary-distribution to run OpenCL on the CPU"
        raise BackendError(f"no OpenCL driver ({reason_of(error)}); {instead}") from None
    if not found:
        problem = "OpenCL finds no device; install the card's driver, or use "
        raise BackendError(Notice(problem, Setting("backend", "cpu")))
    return sorted(found, key=lambda device: kind_of(device) != "GPU")


def of_kinds(kinds: Collection[str]) -> list[Any]:
    """Return the OpenCL devices of the given kinds. Raises BackendError if none exists."""
    found = [each for each in opencl_devices() if kind_of(each) in kinds]
    if not found:
        raise BackendError(Notice(f"OpenCL finds no {' or '.join(kinds)}; use ", Setting("backend", "cpu")))
    return found


def kind_of(device: Any) -> str:
    types = package().device_type
    return "GPU" if device.type & types.GPU else "CPU" if device.type & types.CPU else "other"


def reason_of(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

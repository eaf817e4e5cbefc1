"""`localllm devices`: the devices that can run models, and the copy bandwidth of each device's memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from time import perf_counter
from typing import Any

from localllm.base.machine.memory import SystemMemory, memory
from localllm.base.machine.processor import processor_name
from localllm.cli.flags import typed
from localllm.cli.options import DevicesOptions
from localllm.cli.terminal.console import say
from localllm.cli.terminal.formatting import in_columns, size

MEASURED = 256 << 20  # bytes copied per measurement: several times the size of any CPU cache


def devices(own: DevicesOptions) -> None:
    """List the devices. For a kind of device that cannot be used, print the reason."""
    found, reasons = find_devices()
    if own.json:
        print(json.dumps({"devices": found, "missing": reasons}, indent=2))
        return
    for device in found:
        print(f"{device['backend']} {device['number']}: {device['name']}")
        print(in_columns(device_lines(device), indent=2))
    for backend, reason in reasons.items():
        say(f"{backend}: {reason}")


def device_lines(device: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the properties of a device as (label, text)."""
    free = f", {size(device['free'])} free" if device["free"] < device["memory"] else ""
    copies = f"{device['copy_bandwidth'] / 1e9:.1f} GB/s, read and written" if device["copy_bandwidth"] else ""
    return [
        ("type", device["compute"]),
        ("driver", device["driver"]),
        ("memory", size(device["memory"]) + free),
        ("copies", copies or device["unmeasured"]),
    ]


def find_devices() -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the properties of every device, and the reason for every backend without a device."""
    from localllm.backends.base import BackendError

    found: list[dict[str, Any]] = [_processor()]
    reasons = {}
    for backend, opening in openings().items():
        try:
            found += [_facts(backend, number, opened) for number, opened in enumerate(opening())]
        except BackendError as error:
            reasons[backend] = typed(error)
    return found, reasons


def _facts(backend: str, number: int, open_device: Callable[[], Any]) -> dict[str, Any]:
    """Return the reported properties of a device, and the measured copy bandwidth or the reason why there is no
    measurement."""
    from localllm.backends.base import BackendError
    from localllm.backends.gpu.budget import copy_bandwidth

    named = {"backend": backend, "number": number}
    try:
        opened = open_device()
    except BackendError as error:
        nothing = {"name": "cannot be opened", "compute": "", "driver": "", "memory": 0, "free": 0}
        return {**named, **nothing, "copy_bandwidth": 0.0, "unmeasured": typed(error)}
    facts, speed, reason = opened.facts, 0.0, ""
    try:
        speed = copy_bandwidth(opened, MEASURED)
    except BackendError as error:
        reason = typed(error)
    finally:
        opened.close()
    return {
        **named, "name": facts.name, "compute": facts.compute, "driver": facts.api, "memory": facts.memory,
        "free": facts.free, "copy_bandwidth": speed, "unmeasured": reason,
    }  # fmt: skip


def openings() -> dict[str, Callable[[], list[Callable[[], Any]]]]:
    """Return, for each backend, a function that lists its devices. Each device is a function that opens the device.

    The function raises BackendError if the backend has no device.
    """
    return {"cuda": _cuda, "opencl": _opencl}


def _cuda() -> list[Callable[[], Any]]:
    from localllm.backends.cuda.backend import CudaDevice, cuda_devices

    return [partial(CudaDevice, device) for device in cuda_devices()]


def _opencl() -> list[Callable[[], Any]]:
    from localllm.backends.opencl.backend import OpenClDevice
    from localllm.backends.opencl.devices import opencl_devices

    return [partial(OpenClDevice, device) for device in opencl_devices()]


def _processor() -> dict[str, Any]:
    import numpy as np

    from localllm.backends.cpu.isa import host

    isa, main = host(), memory()
    size = copied(main)
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    best = 0.0
    for _ in range(3):
        start = perf_counter()
        np.copyto(target, source)
        best = max(best, 2 * size / (perf_counter() - start))
    return {
        "backend": "cpu", "number": 0, "name": processor_name(), "compute": f"{isa.name} ({isa.cpu})",
        "driver": f"llvmlite {version('llvmlite')}", "memory": main.total, "free": main.free,
        "copy_bandwidth": best, "unmeasured": "",
    }  # fmt: skip


def copied(main: SystemMemory) -> int:
    """Return the number of bytes that a measurement may copy, which is less than MEASURED if memory is short."""
    return max(1 << 20, min(MEASURED, main.free // 8 or MEASURED))

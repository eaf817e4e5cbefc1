"""`localllm devices`: what models can run on here, and how fast each copies within its memory."""

from __future__ import annotations

import json
import os
from time import perf_counter
from typing import Any

from localllm.cli.console import say
from localllm.cli.options import Devices
from localllm.cli.text import columns, size

MEASURED = 64 << 20  # bytes copied


def devices(own: Devices) -> None:
    """List them; why a kind of device cannot be used is said, not hidden."""
    found, reasons = _found()
    if own.json:
        print(json.dumps({"devices": found, "missing": reasons}, indent=2))
        return
    for device in found:
        print(f"{device['backend']} {device['number']}: {device['name']}")
        lines = [("type", device["compute"]), ("driver", device["driver"]), ("memory", _memory(device))]
        if device["copy_bandwidth"]:
            lines.append(("copies", f"{device['copy_bandwidth'] / 1e9:.1f} GB/s, read and written"))
        print(columns(lines, indent=2))
    for backend, reason in reasons.items():
        say(f"{backend}: {reason}")


def _memory(device: dict[str, Any]) -> str:
    free = f", {size(device['free'])} free" if device["free"] < device["memory"] else ""
    return size(device["memory"]) + free


def _found() -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Facts of every device, and the reason of every backend that has none."""
    from backends.base import BackendError
    from backends.gpu.budget import copy_bandwidth

    found: list[dict[str, Any]] = [_processor()]
    reasons = {}
    for backend in ("cuda", "opencl"):
        try:
            for number, opened in enumerate(_open_each(backend)):
                facts = opened.facts
                found.append(
                    {
                        "backend": backend, "number": number, "name": facts.name, "compute": facts.compute,
                        "driver": facts.api, "memory": facts.memory, "free": facts.free,
                        "copy_bandwidth": copy_bandwidth(opened, MEASURED),
                    }
                )  # fmt: skip
                opened.close()
        except BackendError as error:
            reasons[backend] = str(error)
    return found, reasons


def _open_each(backend: str) -> Any:
    if backend == "cuda":
        from backends.cuda.backend import CudaDevice, devices

        return (CudaDevice(device) for device in devices())
    from backends.opencl.backend import OpenClDevice
    from backends.opencl.backend import devices as opencl_devices

    return (OpenClDevice(device) for device in opencl_devices())


def _processor() -> dict[str, Any]:
    from backends.cpu.isa import host

    isa = host()
    source, target = bytes(MEASURED), bytearray(MEASURED)
    best = 0.0
    for _ in range(3):
        start = perf_counter()
        target[:] = source
        best = max(best, 2 * MEASURED / (perf_counter() - start))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return {
        "backend": "cpu", "number": 0, "name": isa.cpu, "compute": isa.name, "driver": "llvmlite", "memory": memory,
        "free": memory, "copy_bandwidth": best,
    }  # fmt: skip

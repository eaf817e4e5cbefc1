"""`localllm devices`: the devices that can run models, and the copy speed of each within its memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

from localllm.cli.flags import typed
from localllm.cli.options import Devices
from localllm.cli.terminal.console import say
from localllm.cli.terminal.formatting import columns, size

MEASURED = 256 << 20  # bytes copied: several times the size of any processor cache


def devices(own: Devices) -> None:
    """List the devices. If a kind of device cannot be used, print the reason."""
    found, reasons = _found()
    if own.json:
        print(json.dumps({"devices": found, "missing": reasons}, indent=2))
        return
    for device in found:
        print(f"{device['backend']} {device['number']}: {device['name']}")
        free = f", {size(device['free'])} free" if device["free"] < device["memory"] else ""
        lines = [("type", device["compute"]), ("driver", device["driver"]), ("memory", size(device["memory"]) + free)]
        copies = f"{device['copy_bandwidth'] / 1e9:.1f} GB/s, read and written" if device["copy_bandwidth"] else ""
        lines.append(("copies", copies or device["unmeasured"]))
        print(columns(lines, indent=2))
    for backend, reason in reasons.items():
        say(f"{backend}: {reason}")


def _found() -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the facts of every device, and the reason for every backend without a device."""
    from localllm.backends.base import BackendError

    found: list[dict[str, Any]] = [_processor()]
    reasons = {}
    for backend, opening in (("cuda", _cuda), ("opencl", _opencl)):
        try:
            found += [_facts(backend, number, opened) for number, opened in enumerate(opening())]
        except BackendError as error:
            reasons[backend] = typed(error)
    return found, reasons


def _facts(backend: str, number: int, open_device: Callable[[], Any]) -> dict[str, Any]:
    """Return what a device reports, and its copy speed or why it could not be measured."""
    from localllm.backends.base import BackendError
    from localllm.backends.gpu.budget import copy_bandwidth

    named = {"backend": backend, "number": number}
    try:
        opened = open_device()
    except BackendError as error:
        nothing = {"name": "does not open", "compute": "", "driver": "", "memory": 0, "free": 0}
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


def _cuda() -> list[Callable[[], Any]]:
    """Return functions that open each device."""
    from localllm.backends.cuda.backend import CudaDevice, devices

    return [partial(CudaDevice, device) for device in devices()]


def _opencl() -> list[Callable[[], Any]]:
    from localllm.backends.opencl.backend import OpenClDevice, devices

    return [partial(OpenClDevice, device) for device in devices()]


def _processor() -> dict[str, Any]:
    import numpy as np

    from localllm.backends.cpu.isa import host

    isa = host()
    source, target = np.ones(MEASURED, np.uint8), np.zeros(MEASURED, np.uint8)
    best = 0.0
    for _ in range(3):
        start = perf_counter()
        np.copyto(target, source)
        best = max(best, 2 * MEASURED / (perf_counter() - start))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return {
        "backend": "cpu", "number": 0, "name": isa.cpu, "compute": isa.name, "driver": "llvmlite", "memory": memory,
        "free": memory, "copy_bandwidth": best, "unmeasured": "",
    }  # fmt: skip

"""`localllm doctor --gpu`: check every kernel on every device, print a table, and write a report file."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm import __version__
from localllm.base.errors import LocalLLMError
from localllm.base.files.outputs import check_target, new_file
from localllm.base.printable import printable
from localllm.cli.commands.devices import openings
from localllm.cli.commands.doctor_versions import installed_packages
from localllm.cli.flags import typed
from localllm.cli.terminal.console import say

if TYPE_CHECKING:
    from localllm.backends.gpu.conformance.running import Verdict
    from localllm.backends.gpu.device import Device

PACKAGES = ("numpy", "pyopencl", "pycuda", "nvidia-cuda-nvrtc")


def check_devices(output: str) -> None:
    """Check the devices and write the report. Raise LocalLLMError if a device fails or no device is found."""
    path = Path(output or f"localllm-gpu-{datetime.now():%Y%m%d-%H%M%S}.json")
    check_target(path, False)
    devices: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    for backend, number, opened in _devices(missing):
        devices.append(_checked(backend, number, opened))
    for backend, reason in missing.items():
        say(f"{backend}: {reason}")
    report = {
        "localllm": __version__, "python": platform.python_version(), "system": platform.platform(),
        "packages": installed_packages(PACKAGES), "devices": devices, "missing": missing,
    }  # fmt: skip
    with new_file(path) as file:
        file.write(json.dumps(report, indent=1).encode())
    say(f"{path}: the report, without private data; please attach it to an issue")
    if not devices:
        raise LocalLLMError("no device was checked; localllm devices says why")
    problems = [f"{device['name']}: {device['error']}" for device in devices if device["error"]]
    failed = [device["name"] for device in devices if device["failed"] and not device["error"]]
    if failed:
        problems.append(f"{', '.join(failed)}: some kernels give wrong results; models that need them are refused")
    if problems:
        raise LocalLLMError("; ".join(problems))


def _devices(missing: dict[str, str]) -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """Yield (backend, number, function that opens the device) for every device.

    For each backend without a device, add the reason to `missing`.
    """
    from localllm.backends.base import BackendError

    for backend, found in openings().items():
        try:
            yield from ((backend, number, opened) for number, opened in enumerate(found()))
        except BackendError as error:
            missing[backend] = typed(error)


def _checked(backend: str, number: int, open_device: Callable[[], Any]) -> dict[str, Any]:
    """Check a device, print a line for each operation, and return the device's part of the report."""
    from localllm.backends.base import BackendError
    from localllm.backends.gpu.conformance.running import uncompiled

    named: dict[str, Any] = {"backend": backend, "number": number}
    try:
        device: Device = open_device()
    except BackendError as error:
        _show(f"{backend} {number}: {typed(error)}")
        return {**named, "name": f"{backend} {number}", "error": typed(error), "failed": 1, "operations": []}
    facts = device.facts
    rows: list[dict[str, Any]] = []
    broken = ""
    try:
        title, reason = f"{backend} {number}: {facts.name}, {facts.api}", uncompiled(device)
        if reason:
            broken = f"no kernel compiles: {reason}"
            _show(f"{title}: {broken}")
        else:
            _show(title)
            broken = _check(device, rows)
    finally:
        with suppress(*device.errors):  # closing a failed device may fail too
            device.close()
    counts = {status: sum(row["status"] == status for row in rows) for status in ("passed", "failed", "skipped")}
    if rows:
        print(", ".join(f"{count} {status}" for status, count in counts.items()))
    return {**named, **asdict(facts), **counts, "error": broken, "operations": rows}


def _show(text: str) -> None:
    """Print one line, escaped: device names and driver errors may contain control characters."""
    print(printable(text, None), flush=True)


def _check(device: Device, rows: list[dict[str, Any]]) -> str:
    """Fill `rows` with the result of every operation. Return "", or the reason why the check is inconclusive."""
    from localllm.backends.gpu.conformance.catalogue import LIMITS, catalogue
    from localllm.backends.gpu.conformance.verdicts import examine

    for about, segments, cache in catalogue():
        for segment in segments:
            (verdict,) = examine(device, [segment], LIMITS, cache)
            _show(_line(about, verdict))
            rows.append({
                "about": about, "operation": verdict.operation, "kernels": list(verdict.kernels),
                "cache": [cache.keys, cache.values], "status": verdict.status, "error": verdict.error,
                "limit": verdict.limit, "problem": verdict.problem or verdict.skipped,
            })  # fmt: skip
            if verdict.lost:
                return f"{verdict.operation}: {verdict.problem}; later operations were not checked"
    return "" if any(row["status"] != "skipped" for row in rows) else "no operation could be checked"


def _line(about: str, verdict: Verdict) -> str:
    error = f"{verdict.error:.0e} of {verdict.limit:.0e}" if verdict.status == "passed" else verdict.problem
    return f"  {verdict.status:7}  {about}: {verdict.operation}: {error or verdict.skipped}"

"""Main memory: total, available, and the peak use of this process."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from localllm.base.machine.system import output, read_system_text, sysctl, windows_library

_GROUP = "/sys/fs/cgroup"  # control group file system, with the limits of a container
_STATUS, _RESET = "/proc/self/status", "/proc/self/clear_refs"


@dataclass(frozen=True, slots=True)
class SystemMemory:
    """Bytes of main memory; 0 if unknown."""

    total: int
    free: int  # available to programs, including reclaimable file caches
    limit: int = 0  # memory limit of the container that this process runs in; 0: no limit


def memory() -> SystemMemory:
    """Return the memory of this computer. In a container, the limit of the container caps `free`."""
    return _SYSTEMS.get(sys.platform, _posix)()


def _linux() -> SystemMemory:
    found = {
        key: int(kib) << 10 for key, kib in re.findall(r"^(\w+):\s+(\d+) kB", read_system_text("/proc/meminfo"), re.M)
    }
    if "MemTotal" not in found:
        return _posix()
    total, free = found["MemTotal"], found.get("MemAvailable", found.get("MemFree", 0))
    limit, used = (read_system_text(f"{_GROUP}/memory.{name}").strip() for name in ("max", "current"))
    if not limit.isdecimal() or int(limit) >= total:
        return SystemMemory(total, free)
    files = re.search(r"^inactive_file (\d+)$", read_system_text(f"{_GROUP}/memory.stat"), re.M)
    kept = int(used) - (int(files[1]) if files else 0) if used.isdecimal() else 0
    return SystemMemory(total, max(0, min(free, int(limit) - kept)), int(limit))


def _macos() -> SystemMemory:
    total = sysctl("hw.memsize")
    if not total.isdecimal():
        return _posix()
    pages = output("/usr/bin/vm_stat")
    size = re.search(r"page size of (\d+) bytes", pages)
    names = ("free", "inactive", "speculative", "purgeable")
    counts = [re.search(rf"^Pages {name}:\s+(\d+)", pages, re.M) for name in names]
    free = sum(int(count[1]) for count in counts if count) * int(size[1]) if size else 0
    return SystemMemory(int(total), min(free, int(total)) or int(total))


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX of Windows."""

    _fields_ = [
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in (
            "total", "free", "total_page", "free_page", "total_virtual", "free_virtual", "extended",
        )),
    ]  # fmt: skip


def _windows() -> SystemMemory:
    kernel = windows_library("kernel32")
    status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    if kernel is None or not kernel.GlobalMemoryStatusEx(ctypes.byref(status)):
        return SystemMemory(0, 0)
    return SystemMemory(status.total, status.free)


def _posix() -> SystemMemory:
    """Return the total memory, also as `free`, since these systems do not report free memory."""
    if not hasattr(os, "sysconf"):
        return SystemMemory(0, 0)
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return SystemMemory(0, 0)
    return SystemMemory(total, total)


_SYSTEMS: dict[str, Callable[[], SystemMemory]] = {"linux": _linux, "darwin": _macos, "win32": _windows}


# -- of this process -------------------------------------------------------------------------------------------------


class _ProcessMemory(ctypes.Structure):
    """PROCESS_MEMORY_COUNTERS of Windows."""

    _fields_ = [
        ("length", ctypes.c_uint32),
        ("faults", ctypes.c_uint32),
        *((name, ctypes.c_size_t) for name in (
            "peak", "now", "peak_paged", "paged", "peak_other", "other", "file", "peak_file",
        )),
    ]  # fmt: skip


def reset_peak() -> bool:
    """Restart the measurement of this process's peak memory; return False if the system does not support it."""
    try:
        with open(_RESET, "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        return False
    return True


def peak_memory() -> int:
    """Return the peak memory of this process in bytes since `reset_peak`, or 0 if unknown."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", read_system_text(_STATUS), re.M)
    if found:
        return int(found[1]) << 10
    if sys.platform == "win32":
        return _windows_peak()
    try:
        resource: Any = import_module("resource")
    except ImportError:
        return 0
    used = int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return used if sys.platform == "darwin" else used << 10


def _windows_peak() -> int:
    library, kernel = windows_library("psapi"), windows_library("kernel32")
    if library is None or kernel is None:
        return 0
    counters = _ProcessMemory(length=ctypes.sizeof(_ProcessMemory))
    process = ctypes.c_void_p(kernel.GetCurrentProcess())
    told = library.GetProcessMemoryInfo(process, ctypes.byref(counters), counters.length)
    return int(counters.peak) if told else 0

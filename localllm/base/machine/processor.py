"""The processor's name in the vendor's spelling, and the number of processors that this process may use."""

from __future__ import annotations

import math
import os
import platform
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from localllm.base.machine.system import read_system_text, registry, sysctl
from localllm.base.notices import Notice, NotUsed, Setting

_NAME_KEYS = ("model name", "Model Name", "cpu model", "cpu", "Processor", "uarch", "Hardware")  # x86 first
_BOARD = "/sys/firmware/devicetree/base/model"
_GROUP, _OWN_GROUPS = "/sys/fs/cgroup", "/proc/self/cgroup"
_WINDOWS_KEY = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"

# On Arm, the kernel reports numbers instead of a name. Keys are (implementer, part) from the vendors' manuals.
_ARM_PARTS = {
    (0x41, 0xD03): "Arm Cortex-A53",
    (0x41, 0xD05): "Arm Cortex-A55",
    (0x41, 0xD07): "Arm Cortex-A57",
    (0x41, 0xD08): "Arm Cortex-A72",
    (0x41, 0xD09): "Arm Cortex-A73",
    (0x41, 0xD0A): "Arm Cortex-A75",
    (0x41, 0xD0B): "Arm Cortex-A76",
    (0x41, 0xD0C): "Arm Neoverse N1",
    (0x41, 0xD0D): "Arm Cortex-A77",
    (0x41, 0xD40): "Arm Neoverse V1",
    (0x41, 0xD41): "Arm Cortex-A78",
    (0x41, 0xD44): "Arm Cortex-X1",
    (0x41, 0xD46): "Arm Cortex-A510",
    (0x41, 0xD47): "Arm Cortex-A710",
    (0x41, 0xD48): "Arm Cortex-X2",
    (0x41, 0xD49): "Arm Neoverse N2",
    (0x41, 0xD4D): "Arm Cortex-A715",
    (0x41, 0xD4E): "Arm Cortex-X3",
    (0x41, 0xD4F): "Arm Neoverse V2",
    (0xC0, 0xAC3): "Ampere-1",
    (0xC0, 0xAC4): "Ampere-1A",
}


@dataclass(frozen=True, slots=True)
class Processor:
    """The processor of this computer."""

    name: str
    threads: int  # hardware threads of the computer
    usable: int  # hardware threads that this process may run on


def processor() -> Processor:
    """Return the processor's name and threads."""
    return Processor(processor_name(), os.cpu_count() or 1, usable_threads())


def usable_threads() -> int:
    """Return the number of processors that this process may use: its affinity mask, capped by the quota of a container.

    A quota of one and a half processors counts as two.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    found = len(affinity(0)) if affinity is not None else (os.cpu_count() or 1)
    return max(1, math.ceil(min(found, _quota())))


def threads_for(asked: int | None) -> int:
    """Return the number of CPU threads to start: `asked`, capped at the usable processors with a notice.

    None means all usable processors. With more threads than processors, threads would wait for each other.
    """
    usable = usable_threads()
    if asked is None or asked <= usable:
        return asked if asked is not None else usable
    told = f": reduced to {usable}, the number of processors that this process may use"
    note = Notice(Setting("threads", asked), told)
    warnings.warn(note, NotUsed, stacklevel=2)
    return usable


def _quota() -> float:
    """Return the processors that Linux control groups allow this process; infinity without a limit.

    Every group between the process's own and the root may have a limit. In a container, the root is the container's.
    """
    found = math.inf
    for line in read_system_text(_OWN_GROUPS).splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts) + 1):
            group = "/".join(["", *parts[:depth]])
            if controllers:  # version 1
                names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
                words = [read_system_text(f"{_GROUP}/cpu{group}/{name}").strip() for name in names]
            else:
                words = read_system_text(f"{_GROUP}{group}/cpu.max").split()
            if len(words) == 2 and all(word.isdecimal() and int(word) for word in words):
                found = min(found, int(words[0]) / int(words[1]))
    return found


def processor_name() -> str:
    """Return the name, such as "AMD Ryzen 9 7950X 16-Core Processor", or the machine type if the system has no better
    name."""
    find = _SYSTEMS.get(sys.platform)
    found = find() if find is not None else ""
    return re.sub(r"\s+", " ", found).strip("\0 ") or platform.processor() or platform.machine() or "unknown"


def _linux() -> str:
    facts: dict[str, list[str]] = {}
    for key, value in _fields(read_system_text("/proc/cpuinfo")):
        facts.setdefault(key, []).append(value)
    if "CPU part" not in facts:
        return next((facts[key][0] for key in _NAME_KEYS if key in facts and not facts[key][0].isdecimal()), "")
    parts = zip(facts.get("CPU implementer", []), facts["CPU part"], strict=False)
    cores = list(dict.fromkeys(_arm_core(*part) for part in parts))  # fast and slow cores, in their order
    return ", ".join(cores) + (f" ({board})" if (board := read_system_text(_BOARD).strip("\0\n ")) else "")


def _fields(cpuinfo: str) -> Iterator[tuple[str, str]]:
    for line in cpuinfo.splitlines():
        key, colon, value = line.partition(":")
        if colon and value.strip():
            yield key.strip(), value.strip()


def _arm_core(implementer: str, part: str) -> str:
    try:
        numbers = int(implementer, 0), int(part, 0)
    except ValueError:
        return f"Arm core {part}"
    return _ARM_PARTS.get(numbers, f"Arm core {implementer}/{part}")


_SYSTEMS: dict[str, Callable[[], str]] = {
    "linux": _linux,
    "darwin": lambda: sysctl("machdep.cpu.brand_string") or sysctl("hw.model"),
    "win32": lambda: registry(_WINDOWS_KEY, "ProcessorNameString"),
}

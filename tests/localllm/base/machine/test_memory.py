"""System memory on each platform, as read from simulated system interfaces."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from localllm.base.machine import memory as module
from localllm.base.machine.memory import SystemMemory, memory, peak_memory, reset_peak

MIB = 1 << 20
MEMINFO = "MemTotal:       16384 kB\nMemFree:         1024 kB\nMemAvailable:   12288 kB\n"
VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               1000.
Pages active:                            90000.
Pages inactive:                           2000.
Pages speculative:                          30.
Pages wired down:                        50000.
Pages purgeable:                             4.
"""


def on_linux(monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(module, "read_system_text", lambda path: files.get(path, ""))


def test_linux_tells_it_in_meminfo(monkeypatch: pytest.MonkeyPatch) -> None:
    on_linux(monkeypatch, {"/proc/meminfo": MEMINFO})
    assert memory() == SystemMemory(16 * MIB, 12 * MIB)


@pytest.mark.parametrize(
    ("limit", "used", "files", "expected"),
    [
        # free memory is 8 - (5 - 2), because file cache can be reclaimed
        (8, 5, 2, SystemMemory(16 * MIB, 5 * MIB, 8 * MIB)),
        # the computer has less free memory than the limit allows
        (15, 1, 0, SystemMemory(16 * MIB, 12 * MIB, 15 * MIB)),
        (4, 6, 0, SystemMemory(16 * MIB, 0, 4 * MIB)),
        (64, 1, 0, SystemMemory(16 * MIB, 12 * MIB)),  # a limit above the total memory is ignored
    ],
)
def test_a_container_leaves_less(
    monkeypatch: pytest.MonkeyPatch, limit: int, used: int, files: int, expected: SystemMemory
) -> None:
    group = "/sys/fs/cgroup/memory."
    on_linux(monkeypatch, {
        "/proc/meminfo": MEMINFO, f"{group}max": f"{limit * MIB}\n", f"{group}current": f"{used * MIB}\n",
        f"{group}stat": f"anon 7\ninactive_file {files * MIB}\nactive_file 9\n",
    })  # fmt: skip
    assert memory() == expected


def test_macos_counts_pages_that_can_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(module, "sysctl", lambda name: {"hw.memsize": str(1 << 34)}[name])
    monkeypatch.setattr(module, "output", lambda program: {"/usr/bin/vm_stat": VM_STAT}[program])
    assert memory() == SystemMemory(1 << 34, 3034 * 16384)


class Kernel:
    """Simulated kernel32 and psapi of Windows, called through ctypes."""

    def GlobalMemoryStatusEx(self, place: Any) -> int:
        status = place._obj
        if status.length != 64:
            return 0
        status.load, status.total, status.free, status.total_page = 25, 1 << 35, 3 << 33, 1
        return 1

    def GetCurrentProcess(self) -> int:
        return -1

    def GetProcessMemoryInfo(self, process: Any, place: Any, length: int) -> int:
        assert process.value == ctypes.c_void_p(-1).value
        counters = place._obj
        if length != 72:
            return 0
        counters.faults, counters.peak, counters.now = 1, 123 * MIB, 5
        return 1


@pytest.mark.skipif(ctypes.sizeof(ctypes.c_size_t) != 8, reason="sizes of 64-bit Windows")
def test_windows_fills_structures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(kernel32=Kernel(), psapi=Kernel()), raising=False)
    monkeypatch.setattr(module, "read_system_text", lambda path: "")
    assert memory() == SystemMemory(1 << 35, 3 << 33)
    assert peak_memory() == 123 * MIB


@pytest.mark.parametrize("system", ["linux", "darwin", "freebsd14"])
def test_a_system_that_tells_no_more_has_all_memory_free(monkeypatch: pytest.MonkeyPatch, system: str) -> None:
    monkeypatch.setattr(sys, "platform", system)
    for name in ("read_system_text", "sysctl", "output"):
        monkeypatch.setattr(module, name, lambda *asked: "")
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}[name])
    assert memory() == SystemMemory(4096000, 4096000)
    monkeypatch.delattr(os, "sysconf")
    assert memory() == SystemMemory(0, 0)


def test_the_peak_is_that_of_this_process() -> None:
    before = peak_memory()
    block = np.ones(64 * MIB, np.uint8)
    high = peak_memory()
    assert high >= before
    assert high >= block.nbytes
    del block
    if not reset_peak():
        pytest.skip("this system does not forget a peak")
    assert peak_memory() < high - 32 * MIB


def test_without_linux_the_peak_comes_from_the_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda who: SimpleNamespace(ru_maxrss=7 * MIB))
    monkeypatch.setitem(sys.modules, "resource", usage)
    monkeypatch.setattr(module, "read_system_text", lambda path: "")
    monkeypatch.setattr(sys, "platform", "darwin")  # reports ru_maxrss in bytes
    assert peak_memory() == 7 * MIB
    monkeypatch.setattr(sys, "platform", "freebsd14")  # reports ru_maxrss in KiB
    assert peak_memory() == 7 << 30


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's own file")
def test_the_real_numbers_agree_with_the_system() -> None:
    found = memory()
    total = re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())
    assert total is not None
    assert found.total == int(total[1]) << 10
    assert 0 < found.free <= found.total

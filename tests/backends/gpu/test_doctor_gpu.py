"""`localllm doctor --gpu`: it checks every kernel, format and cache type, and writes a report."""

from __future__ import annotations

import json
import os
import platform
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localllm.backends.base import BackendError
from localllm.backends.gpu.bind import program
from localllm.backends.gpu.cachetypes import CACHE
from localllm.backends.gpu.conformance.catalogue import LIMITS as catalogue_limits
from localllm.backends.gpu.conformance.catalogue import catalogue
from localllm.backends.gpu.conformance.segments import segments
from localllm.backends.gpu.formats import FORMATS
from localllm.backends.opencl.backend import OpenClDevice
from localllm.backends.opencl.devices import opencl_devices
from localllm.cli.main import main
from tests.backends.gpu.conftest import UNOPTIMIZED, pocl
from tests.backends.gpu.faults import FAULTS, LIMITS, Q4_0, Raising, activated
from tests.backends.gpu.small import PLANS, Small, table
from tests.backends.support import record


def test_the_catalogue_needs_every_kernel_format_and_cache_type() -> None:
    found = {
        (kernel.name, kernel.weight_format)
        for _, own, cache in catalogue()
        for each in own
        for compute in ("", "sm_90")
        for kernel in program(each.plan, catalogue_limits, cache, (), compute).kernels()
    }
    every = {
        (kernel.name, kernel.weight_format)
        for small in (small for group in PLANS.values() for small in group)
        for compute in ("", "sm_90")
        for kernel in program(record(small.table, small.build), LIMITS, small.cache, (), compute).kernels()
    }
    assert {name for name, _ in every} == {name for name, _ in found}
    for name in ("embed", "matvec", "matmul", "matvec_gated", "matvec_together"):
        assert set(FORMATS) == {format for kernel, format in found if kernel == name}, name
    assert {cache.keys for _, _, cache in catalogue()} == set(CACHE)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Provide a device with two plans to check, and an empty result folder."""
    small = {"rows": Small(activated, table(40)), "products": Q4_0}
    found = [(name, segments(record(each.table, each.build)), each.cache) for name, each in small.items()]
    monkeypatch.setattr("localllm.backends.gpu.conformance.catalogue.catalogue", lambda: iter(found))
    own = pocl().device._device
    monkeypatch.setattr(OpenClDevice, "options", UNOPTIMIZED)
    monkeypatch.setattr("localllm.backends.opencl.devices.opencl_devices", lambda: [own])
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("few")
def test_doctor_shows_each_operation_and_writes_a_report(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert main(["doctor", "--gpu"]) == 0
    out, err = capsys.readouterr()
    (path,) = tmp_path.iterdir()
    assert path.name in err
    assert re.search(r"^  passed   products: linear Q4_0 5 x 96: \de-\d\d of 2e-05$", out, re.MULTILINE)
    assert re.search(r"^\d+ passed, 0 failed, 0 skipped$", out, re.MULTILINE)
    text = path.read_text(encoding="utf-8")
    report = json.loads(text)
    (device,) = report["devices"]
    assert device["failed"] == 0
    assert {row["status"] for row in device["operations"]} == {"passed"}
    assert len(device["operations"]) == device["passed"] > 3
    private = (str(Path.home()), os.path.expanduser("~"), platform.node(), str(tmp_path))
    assert not [word for word in private if word not in ("", "/") and word in text]

    own = OpenClDevice.compile
    fault = FAULTS["layout: halves of a block"]
    monkeypatch.setattr(OpenClDevice, "compile", lambda self, s, k: own(self, s.replace(fault.old, fault.new), k))
    assert main(["doctor", "--gpu", "-o", "other.json"]) == 1
    out, err = capsys.readouterr()
    assert re.search(r"^  failed   products: linear Q4_0 5 x 96: 70 rows: off by ", out, re.MULTILINE)
    assert "some kernels give wrong results" in err
    assert json.loads(Path("other.json").read_text(encoding="utf-8"))["devices"][0]["failed"] > 0
    assert main(["doctor", "--gpu", "-o", "other.json"]) == 1  # refused before the check starts, which takes minutes
    assert "exists" in capsys.readouterr().err
    assert main(["doctor", "-o", "x.json"]) == 2


def reported(tmp_path: Path) -> dict[str, Any]:
    """Return the device in the only report of a folder."""
    (path,) = tmp_path.iterdir()
    (device,) = json.loads(path.read_text(encoding="utf-8"))["devices"]
    return dict(device)


def test_doctor_says_in_a_line_that_no_kernel_compiles(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def compile_(self: OpenClDevice, source: str, kernel: str) -> Any:
        raise BackendError(f"{self.facts.name}: its compiler refuses a kernel: unknown CPU \x1b[31m\nand more")

    own = opencl_devices()[0]
    monkeypatch.setattr(OpenClDevice, "compile", compile_)
    monkeypatch.setattr("localllm.backends.opencl.devices.opencl_devices", lambda: [own])
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--gpu"]) == 1
    out, err = capsys.readouterr()
    (line,) = out.splitlines()
    told = r"no kernel compiles: its compiler refuses a kernel: unknown CPU \x1b[31m"
    assert line.startswith("opencl 0: ")
    assert told in line
    assert re.search(rf"^error: .*{re.escape(told)}", err, re.MULTILINE)
    assert told in reported(tmp_path)["error"]


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("fatal", [False, True], ids=["one call fails", "the device is lost"])
def test_doctor_keeps_its_report_when_the_driver_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fatal: bool
) -> None:
    monkeypatch.setattr("localllm.backends.opencl.backend.OpenClDevice", Raising)
    monkeypatch.setattr(Raising, "fatal", fatal)
    assert main(["doctor", "--gpu"]) == 1
    out, err = capsys.readouterr()
    problem = "clEnqueueNDRangeKernel failed: \\x1b[31mDEVICE LOST" + "; the device no longer responds" * fatal
    failed = [line for line in out.splitlines() if line.startswith("  failed ")]
    assert failed
    assert all(line.endswith(problem) for line in failed)
    device = reported(tmp_path)
    assert device["failed"] == len(failed)
    assert device["passed"] > 0
    assert ("later operations were not checked" in device["error"]) == fatal
    assert ("later operations were not checked" in err) == fatal
    assert ("some kernels give wrong results" in err) != fatal


@pytest.mark.usefixtures("few")
def test_names_and_errors_of_drivers_are_printed_as_one_harmless_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Named(OpenClDevice):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.facts = replace(self.facts, name="Card\x1b]0;title\x07", api="1.0\n  passed   nothing")

    monkeypatch.setattr("localllm.backends.opencl.backend.OpenClDevice", Named)
    assert main(["doctor", "--gpu"]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first == r"opencl 0: Card\x1b]0;title\x07, 1.0\n  passed   nothing"
    assert not [line for line in others if "nothing" in line]

"""Devices that fail during a check: what they hold is freed, their error is reported, and they are disabled."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import localllm
import localllm.quant.codecache
from localllm.backends.base import BackendError, WrongResults
from localllm.backends.gpu.conformance.running import run_segments
from localllm.backends.gpu.conformance.segments import segments
from localllm.backends.opencl.backend import OpenClDevice
from localllm.backends.opencl.devices import opencl_devices
from localllm.cli.main import main
from tests.backends.gpu.conftest import UNOPTIMIZED, pocl
from tests.backends.gpu.faults import LIMITS, Raising, activated, added, bound, checked
from tests.backends.gpu.small import Small, table
from tests.backends.support import record
from tests.localllm.support import write_model
from tests.pocl import needed


class Counted(OpenClDevice):
    """A device that counts unfreed buffers and compiles nothing. The call named by `failing` raises an error."""

    failing = ""
    made = 0

    def __init__(self) -> None:
        (own, *_) = [each for each in opencl_devices() if "pocl" in each.version.lower()]
        super().__init__(own, cache=None)
        self.held: set[int] = set()

    def _fail(self, call: str) -> None:
        if call == self.failing:
            raise BackendError(f"{call} fails")

    def alloc(self, size: int, what: str) -> Any:
        buffer = super().alloc(size, what)
        self.held.add(id(buffer))
        self.made += 1
        return buffer

    def free(self, buffer: Any) -> None:
        self.held.remove(id(buffer))
        super().free(buffer)

    def compile(self, source: str, kernel: str) -> Any:
        self._fail(f"compile {kernel}")
        return kernel, ""

    def prepare(self, kernel: Any, size: int, local_bytes: int, arguments: Any) -> Any:
        self._fail(f"prepare {kernel[0]}")
        return lambda grid: self._fail(f"launch {kernel[0]}")


@pytest.mark.parametrize(
    "failing", [f"{call} {kernel}" for call in ("compile", "prepare", "launch") for kernel in ("leave", "elements")]
)
def test_memory_of_a_check_that_fails_is_freed_at_once(failing: str) -> None:
    device = Counted()
    device.failing = failing
    small = Small(activated, table(40))
    (segment,) = [s for s in segments(record(small.table, small.build)) if s.title.startswith("activate")]
    kept = []  # a kept traceback keeps every object of the check alive
    try:
        run_segments(device, segment, LIMITS, small.cache)
    except BackendError as error:
        kept.append(error)
    assert device.made or "compile" in failing
    assert not device.held


@pytest.fixture
def raising() -> Iterator[Raising]:
    with_pocl = pocl()
    device = Raising(with_pocl.device._device, cache=None)
    device.options = UNOPTIMIZED
    yield device
    with_pocl.close()


@pytest.mark.parametrize("after", [0, 2])
def test_an_error_of_the_driver_fails_its_check_alone(raising: Raising, after: int, tmp_path: Path) -> None:
    raising.after = after
    found = checked(raising, Small(added, table(64)))
    assert {verdict.status for verdict in found} == {"passed", "failed"}
    for verdict in found:
        assert verdict.failed == ("matvec" in verdict.kernels)
        assert not verdict.lost
        if verdict.failed:
            assert verdict.problem == "clEnqueueNDRangeKernel failed: \\x1b[31mDEVICE LOST"
    raising.after = after
    with pytest.raises(WrongResults, match="failed its check"):
        bound(raising, tmp_path)
    assert not list(tmp_path.iterdir())  # no result is stored, because the driver may work again after a restart
    raising.kernel = ""
    bound(raising, tmp_path)
    assert list(tmp_path.iterdir())


def test_nothing_more_is_checked_on_a_device_that_is_lost(raising: Raising) -> None:
    raising.fatal = True
    small = Small(lambda r, x: r.activate(added(r, x), "relu"), table(64))
    found = checked(raising, small)
    assert len(found) < len(list(segments(record(small.table, small.build))))
    *earlier, last = found
    assert last.failed
    assert last.lost
    assert last.problem.endswith("DEVICE LOST; the device no longer responds")
    assert not [verdict for verdict in earlier if verdict.status != "passed"]


@pytest.fixture
def hello(tmp_path: Path) -> list[str]:
    """Provide a command that runs a small model, because PoCL's unoptimized kernels are slow."""
    return ["run", str(write_model(tmp_path / "small.gguf")), "Hello", "-n", "4", "--temp", "0"]


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Provide PoCL with a bug injected into the norms, as the only device. Results go to a folder of the test."""
    needed()
    own = OpenClDevice.compile

    def compile_(self: OpenClDevice, source: str, kernel: str) -> Any:
        return own(self, source.replace("/ (float)K + EPS", "/ (float)K * 1.01f + EPS"), kernel)

    monkeypatch.setattr(OpenClDevice, "compile", compile_)
    monkeypatch.setattr(OpenClDevice, "options", UNOPTIMIZED)
    monkeypatch.setattr("localllm.backends._CARDS", ((localllm.backends.BACKENDS["opencl"], ("/",), ""),))
    kept = localllm.quant.codecache.default_folder
    monkeypatch.setattr(
        "localllm.quant.codecache.default_folder", lambda kind: tmp_path / kind if kind == "gpu" else kept(kind)
    )
    monkeypatch.setattr("sys.stdin", io.StringIO())


@pytest.mark.usefixtures("broken")
def test_a_device_that_fails_is_refused_by_name_and_replaced_by_the_cpu_otherwise(
    capsys: pytest.CaptureFixture[str], hello: list[str]
) -> None:
    assert main([*hello, "--backend", "cpu"]) == 0
    truth = capsys.readouterr().out
    assert main([*hello, "--backend", "opencl"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(r"failed its check, so it is not used \(norm rms.*: 70 rows: off by .*\); use --backend cpu", line)
    assert "--force" in line
    assert main(hello) == 0
    out, err = capsys.readouterr()
    assert out == truth
    (line,) = err.splitlines()
    assert re.search(r"failed its check, so it is not used .*; everything runs on cpu: ", line)
    assert main([*hello, "-ngl", "1"]) == 1  # error, because the GPU was requested explicitly
    assert "failed its check" in capsys.readouterr().err
    assert main([*hello, "--backend", "opencl", "--force"]) == 0
    assert "failed" not in capsys.readouterr().err

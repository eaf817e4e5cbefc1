"""The check of a device before a model uses it: the check detects injected bugs, stores its results, and
disables failing devices.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import localllm
import localllm.quant.codecache
from localllm.backends.base import F16_CACHE, Backend, BackendError, CacheTypes, Limits, WrongResults
from localllm.backends.gpu.bind import program
from localllm.backends.gpu.cachetypes import CACHE
from localllm.backends.gpu.conformance import verdicts
from localllm.backends.gpu.conformance.catalogue import LIMITS as catalogue_limits
from localllm.backends.gpu.conformance.catalogue import catalogue
from localllm.backends.gpu.conformance.running import Verdict, run_segments
from localllm.backends.gpu.conformance.segments import segments
from localllm.backends.gpu.conformance.verdicts import Conformance, examine
from localllm.backends.gpu.formats import FORMATS
from localllm.backends.opencl.backend import OpenClBackend, OpenClDevice
from localllm.backends.opencl.devices import opencl_devices
from localllm.cli.main import main
from localllm.plan import BLOCK, Recorder, Value
from tests.backends.attending import Heads
from tests.backends.gpu.conftest import UNOPTIMIZED, pocl
from tests.backends.gpu.small import PLANS, Small, attended, experts, layer, products, rows, table
from tests.backends.support import LLAMA, plan, record
from tests.localllm.support import write_model
from tests.models.support import MemoryWeight
from tests.plan.support import MODELS, tiny_plan
from tests.pocl import needed

LIMITS = Limits(80, 80, 5, 5 * BLOCK)


class Faulty(OpenClDevice):
    """A device with an injected bug: it replaces a snippet of kernel source before compiling. `met` is True once the
    snippet occurred.
    """

    old = new = ""
    met = False

    def compile(self, source: str, kernel: str) -> Any:
        if self.old and self.old in source:
            self.met, source = True, source.replace(self.old, self.new)
        return super().compile(source, kernel)


@pytest.fixture(scope="module")
def device() -> Iterator[Faulty]:
    with_pocl = pocl()
    faulty = Faulty(with_pocl.device._device, cache=None)
    faulty.options = UNOPTIMIZED
    yield faulty
    with_pocl.close()


def checked(device: OpenClDevice, small: Small, kernel: str = "") -> list[Verdict]:
    """Return the verdicts of a plan; with `kernel`, only of the segments that launch it."""
    own = [
        each
        for each in segments(record(small.table, small.build))
        if not kernel or any(k.name == kernel for k in program(each.plan, LIMITS, small.cache).kernels())
    ]
    assert own
    return examine(device, own, LIMITS, small.cache)


# -- planted faults ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """An injected bug: a snippet of kernel source, its replacement, a plan, and the affected kernel."""

    old: str
    new: str
    small: Small
    kernel: str


def glued(r: Recorder, x: Value) -> Value:
    return r.glu(r.linear(x, MATRIX), r.linear(x, replace(MATRIX, name="other")), "silu")


def added(r: Recorder, x: Value) -> Value:
    return r.add(x, r.linear(x, MATRIX))


def activated(r: Recorder, x: Value) -> Value:
    return r.activate(x, "relu")


MATRIX = MemoryWeight.of("matrix", table(64).values()[:37, :].repeat(2, axis=0)[:64], "Q8_0")
Q4_0, Q5_1, PLAIN = (products(name, depth=96) for name in ("Q4_0", "Q5_1", "F16"))
HEADS, ODD = attended(Heads(4, 2, 16)), attended(Heads(2, 2, 7))
WINDOW, LAYER = attended(Heads(2, 2, 16, window=9)), Small(layer, table(32))
MIXTURE = experts("F32 F32 F32", 2, "softmax", False, 1.5, "silu", count=5)
LOGITS = Small(lambda r, x: r.select_rows(x), table(700))
NORMS = Small(rows, table(96))

FAULTS: dict[str, Fault] = {
    "layout: halves of a block": Fault(
        "q[i] = less(nibbles(words[i], 0), 8);\n    q[i + 4] = less(nibbles(words[i], 1), 8);",
        "q[i] = less(nibbles(words[i], 1), 8);\n    q[i + 4] = less(nibbles(words[i], 0), 8);", Q4_0, "matvec",
    ),
    "layout: sign of the minimum": Fault("FMA(-m[0], low + high, sum)", "FMA(m[0], low + high, sum)", Q5_1, "matvec"),
    "barrier: before a tile is read": Fault(
        "    BARRIER();\n    int xq[4][8];", "    int xq[4][8];", Q4_0, "matmul",
    ),
    "barrier: before a query is read": Fault(
        "  BARRIER();\n\n  float score[2][GROUPED];", "  float score[2][GROUPED];", HEADS, "attend_partition",
    ),
    "barrier: before scores are read": Fault(
        "    BARRIER();\n    for (int i = ITEM; i < TILE_KEYS * VALUE_UNITS; i += 128) {",
        "    for (int i = ITEM; i < TILE_KEYS * VALUE_UNITS; i += 128) {", HEADS, "attend_tile",
    ),
    "tail: last row of a matrix": Fault(
        "(ITEM & 31) == 0 && row < N && j < columns", "(ITEM & 31) == 0 && row < N - 1 && j < columns", PLAIN, "matvec",
    ),
    "tail: last row of a batch": Fault(
        "smaller(step[COUNT_AT] - (column), COLUMNS)", "smaller(step[COUNT_AT] - 1 - (column), COLUMNS)", PLAIN,
        "matvec",
    ),
    "tail: last numbers of a row": Fault("c < K / 32; c += 32", "c < K / 32 - 1; c += 32", Q4_0, "matvec"),
    "NaN: lost where a row is rounded to bytes": Fault(
        "*scale = largest / 127.0f;", "*scale = largest <= -LOWEST ? largest / 127.0f : 0.0f;", Q4_0, "elements",
    ),
    "NaN: lost in an activation": Fault(
        "float relu(float x) { return x < 0.0f ? 0.0f : x; }", "float relu(float x) { return FMAX(x, 0.0f); }",
        Small(activated, table(40)), "elements",
    ),
    "sub-group: 16 for 32 work-items": Fault(
        "SEGMENT(sum32, float, 16, v + w)", "SEGMENT(sum32, float, 8, v + w)", PLAIN, "matvec",
    ),
    "sub-group: 32 for 16 work-items": Fault(
        "SEGMENT(sum16, int, 8, v + w)", "SEGMENT(sum16, int, 16, v + w)", Q5_1, "elements",
    ),
    "cache: one block further": Fault(
        "table[position / BLOCK_TOKENS] * KV_HEADS", "table[(position + 1) / BLOCK_TOKENS] * KV_HEADS", HEADS,
        "attend_partition",
    ),
    "cache: one slot further": Fault(
        "slot % BLOCK_TOKENS / EVERY", "(slot + 1) % BLOCK_TOKENS / EVERY", HEADS, "append",
    ),
    "cache: keys for values": Fault("(second ? v : k)", "(second ? k : v)", HEADS, "append"),
    "scale: of a row in bytes": Fault("*scale = largest / 127.0f;", "*scale = largest / 128.0f;", Q4_0, "elements"),
    "scale: of a half block": Fault(
        "FMA(s[1], d * (float)second, FMA(s[0]", "FMA(s[0], d * (float)second, FMA(s[0]",
        products("Q6_K", depth=256), "matvec",
    ),
    "rope: pairs of the other style": Fault(
        "return d < N_ROT / 2 ? d + N_ROT / 2 : d - N_ROT / 2;", "return d ^ 1;", LAYER, "append",
    ),
    "rope: the other direction": Fault(
        "second ? other * sine + x * cosine : x * cosine - other * sine",
        "second ? x * cosine - other * sine : other * sine + x * cosine", LAYER, "append",
    ),
    "rope: the next position": Fault(
        "of = table + (size_t)POSITIONS_OF(step)[row] * N_ROT",
        "of = table + (size_t)(POSITIONS_OF(step)[row] + 1) * N_ROT",
        LAYER, "append",
    ),
    "mask: a row sees the next": Fault(
        "int position = POSITIONS_OF(step)[row];\n  if (CAUSAL) return position;",
        "int position = POSITIONS_OF(step)[row];\n  if (CAUSAL) return position + 1;", HEADS, "attend_partition",
    ),
    "mask: a window one shorter": Fault(
        "larger(0, position + 1 - WINDOW)", "larger(0, position + 2 - WINDOW)", WINDOW, "attend_partition",
    ),
    "memory: numbers of an earlier kernel, local": Fault(
        "own[i] = g < heads && d < size ? q[((size_t)row * HEADS + head0 + g) * size + d] : 0.0f;",
        "if (g < heads && d < size) own[i] = q[((size_t)row * HEADS + head0 + g) * size + d];", ODD,
        "attend_partition",
    ),
    "memory: numbers of an earlier step, global": Fault(
        "if (i < width) y[i] = v;", "if (i < width && i != 5) y[i] = v;", NORMS, "norm_rows",
    ),
    "experts: another than the chosen": Fault(
        "expert = choices[column]", "expert = (choices[column] + 1) % EXPERTS", MIXTURE, "matvec",
    ),
    "experts: the worst for the best": Fault("best[other] > best[ITEM]", "best[other] < best[ITEM]", MIXTURE, "route"),
    "gate and up": Fault("= OPERATION(g, u);", "= OPERATION(u, g);", Small(glued, table(64)), "matvec_gated"),
    "a residual twice": Fault("v += residual[", "v += 2.0f * residual[", Small(added, table(64)), "matvec"),
    "logits: smallest for largest": Fault("? 0u : bits >> 31", "? 0u : bits >> 31 == 0", LOGITS, "largest"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_kernel_is_caught(device: Faulty, name: str) -> None:
    fault = FAULTS[name]
    device.old, device.new, device.met = fault.old, fault.new, False
    try:
        found = checked(device, fault.small, fault.kernel)
    finally:
        device.old = ""
    assert device.met, "the kernels no longer have this text"
    failed = [verdict for verdict in found if verdict.failed]
    assert failed
    assert all(fault.kernel in verdict.kernels for verdict in failed)
    assert not [verdict for verdict in found if verdict.skipped]


@pytest.mark.parametrize("name", PLANS)
def test_without_faults_everything_passes(gpu: Backend, name: str) -> None:
    """The check covers every kernel, format and cache type."""
    for small in PLANS[name]:
        for verdict in examine(gpu.device, segments(record(small.table, small.build)), LIMITS, small.cache):
            assert verdict.status == "passed", verdict


@pytest.mark.parametrize("name", MODELS)
def test_the_kernels_that_are_checked_are_those_of_the_model(name: str) -> None:
    """The checked kernels have the same constants as the model's kernels: nothing is compiled twice, and none is
    missing.
    """
    own = tiny_plan(name)
    for compute in ("", "sm_90"):
        for cache in (F16_CACHE, CacheTypes("q8_0", "q4_0")):
            wanted = set(program(own, LIMITS, cache, (), compute).kernels())
            found = {k for each in segments(own) for k in program(each.plan, LIMITS, cache, (), compute).kernels()}
            assert wanted <= found


# -- devices that fail during a check ------------------------------------------------------------------------------


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


class Raising(OpenClDevice):
    """A device whose driver fails after a number of launches. With `fatal`, all later calls fail too."""

    after, fatal = 0, False
    kernel = "matvec"
    dead = False

    def _raise(self) -> None:
        raise self._cl.RuntimeError("clEnqueueNDRangeKernel failed: \x1b[31mDEVICE LOST\nagain")

    def prepare(self, kernel: Any, size: int, local_bytes: int, arguments: Any) -> Any:
        own = super().prepare(kernel, size, local_bytes, arguments)

        def launch(grid: Any) -> None:
            if kernel[1] == self.kernel:
                self.after -= 1
                if self.after < 0:
                    self.dead = self.fatal
                    self._raise()
            own(grid)

        return launch

    def upload(self, *data: Any) -> None:
        if self.dead:
            self._raise()
        super().upload(*data)

    def sync(self) -> None:
        if self.dead:
            raise BackendError("the context is lost")
        super().sync()


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


# -- stored results --------------------------------------------------------------------------------------------------


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of segments in each check."""
    found: list[int] = []

    def counting(device: Any, own: Any, *others: Any) -> list[Verdict]:
        found.append(len(own))
        return examine(device, own, *others)

    monkeypatch.setattr(verdicts, "examine", counting)
    return found


def bound(device: OpenClDevice, folder: Path) -> None:
    """Bind a small model in the way that the program does."""
    backend = OpenClBackend(device.facts.name, cache=None, conformance=Conformance(folder))
    backend.device = device
    backend.bind(plan("F32", LLAMA), LIMITS).close()


def test_a_result_is_kept_for_device_driver_and_kernels(device: Faulty, tmp_path: Path, runs: list[int]) -> None:
    for _ in range(3):
        bound(device, tmp_path)
    assert len(runs) == 1
    assert len(list(tmp_path.iterdir())) == 1
    facts = device.facts
    try:
        device.facts = replace(facts, api=facts.api + " (updated)")
        bound(device, tmp_path)
        assert len(runs) == 2
    finally:
        device.facts = facts
    bound(device, tmp_path)
    assert len(runs) == 2


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"null", b'{"verdicts": [{"operation": 3}]}', b'{"verdicts": []}', b"\xff" * 99]
)
def test_a_damaged_result_is_ignored(device: Faulty, tmp_path: Path, runs: list[int], content: bytes) -> None:
    bound(device, tmp_path)
    (kept,) = tmp_path.iterdir()
    for damaged in (content, hashlib.sha256(content).digest() + content):
        kept.write_bytes(damaged)
        bound(device, tmp_path)
    assert len(runs) == 3


# -- failing devices are disabled ------------------------------------------------------------------------------------


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


# -- localllm doctor --gpu ---------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("limits", [Limits(1, 1, 1, BLOCK), Limits(17, 3, 2, 20), Limits(600, 600, 12, 700)], ids=str)
def test_limits_of_any_size_can_be_checked(device: Faulty, tmp_path: Path, limits: Limits) -> None:
    backend = OpenClBackend(device.facts.name, cache=None, conformance=Conformance(tmp_path))
    backend.device = device
    backend.bind(plan("F32", LLAMA), limits).close()
    assert len(list(tmp_path.iterdir())) == 1

"""benchmarks/gpu.py completes on PoCL, and gives a reason for each skipped measurement."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from pkgutil import iter_modules

import pytest

from benchmarks.gpu_compile import every_kernel
from localllm.backends.gpu import kernels
from localllm.backends.gpu.kernels.kernel import Kernel
from tests import pocl

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[int, list[dict[str, object]]]]]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu

    def run(folder: Path, *words: str) -> tuple[int, list[dict[str, object]]]:
        code = gpu.main([*words, "--out", str(folder / "rows.jsonl")])
        return code, [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]

    yield run
    for name in ("gpu", "gpu_report", "gpu_speed", "gpu_weights", "make_model"):
        sys.modules.pop(name, None)


def test_the_whole_way(gpu, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    pocl.needed()
    code, rows = gpu(tmp_path, "--backend", "opencl", "--quick", "--minutes", "60")
    ends = {row["stage"]: row for row in rows if "status" in row}
    assert code == 0
    assert {name for name, row in ends.items() if row["status"] == "ok"} == {
        "packages", "open", "golden", "conformance", "bandwidth", "model", "kernel",
    }  # fmt: skip
    assert ends["dense"]["reason"] == "PyTorch measures it on CUDA only"
    assert ends["llama.cpp"]["reason"] == "neither --llama-bench nor --llama-source is given"
    decoded = [row for row in rows if row["stage"] == "decode"]
    assert [(row["type"], row["depth"]) for row in decoded] == [
        ("Q4_K_M", 0), ("Q4_K_M", 300), ("F16", 0), ("F16", 300),
    ]  # fmt: skip
    for row in decoded:
        assert row["replayed"]
        assert row["finite"]
        assert row["tokens_per_s"] * row["step_ms"] == pytest.approx(1e3, rel=1e-3)
        assert "pthread" in row["card"] or "cpu" in row["card"]
    (numbers,) = (row for row in rows if row["stage"] == "bandwidth" and "status" not in row)
    assert decoded[0]["of_copy"] == pytest.approx(decoded[0]["gb_per_s"] / numbers["copy_gb_per_s"], rel=1e-3)
    assert "| decode: model | type | depth |" in capsys.readouterr().out


def test_no_card_and_no_time_are_said(gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setitem(sys.modules, "pycuda", None)
    code, rows = gpu(tmp_path, "--quick")
    assert code == 1
    (opened,) = (row for row in rows if row["stage"] == "open")
    assert (opened["status"], opened["card"]) == ("failed", "none")
    assert "PyCUDA is not installed" in opened["reason"] or "no CUDA driver" in opened["reason"]
    assert {row["stage"] for row in rows} == {"packages", "open", "llama.cpp"}

    code, rows = gpu(tmp_path / "..", "--backend", "opencl", "--quick", "--minutes", "0.05")
    assert code == 1
    reasons = [row["reason"] for row in rows if row.get("status") == "skipped"]
    assert reasons
    assert all("of the 0.05 minutes are left" in reason for reason in reasons[:1])


def test_every_kernel_is_compiled() -> None:
    """`benchmarks/gpu_compile.py` covers every kernel that a plan may use."""
    for module in iter_modules(kernels.__path__, f"{kernels.__name__}."):
        importlib.import_module(module.name)
    compiled = {type(kernel).__name__ for _, kernel in every_kernel("sm_80")}
    assert {kind.__name__ for kind in kinds_of(Kernel) if not kind.__subclasses__()} <= compiled


def kinds_of(kind: type) -> set[type]:
    return {kind}.union(*map(kinds_of, kind.__subclasses__()))

"""Check a GPU, then time it, in eight minutes. A stage that fails or runs out of time becomes a row with the reason.

    python benchmarks/gpu.py [--backend cuda] [--minutes 8] [--llama-bench PATH | --llama-source FOLDER]
    python benchmarks/gpu.py --backend opencl --quick        # all stages on PoCL, with a tiny model: no useful timings

The checks cover packages, compiling and loading a kernel, the conformance table (pytest), and the bundled model against
the CPU. The timings cover copy bandwidth, dense matrix products (by PyTorch if installed), the kernels of every format,
and then decode, verify and prefill of Llama geometries whose weights are generated in memory. A JSON line per row goes
to --out, a table to stdout. CONTRIBUTING.md has the commands.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from gpu_report import Report, Skipped, run, table
from gpu_speed import FULL, QUICK, Size, bandwidth, dense, kernel, model
from gpu_weights import Weights

import localllm
from localllm.backends import open_backend

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("numpy", "pycuda", "nvidia-cuda-nvrtc", "pyopencl")

# -- checks ------------------------------------------------------------------------------------------------------------


def packages(report: Report) -> None:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    report.row("packages", python=sys.version.split()[0], **found)


def conformance(tests: Sequence[str]) -> Callable[[Report], None]:
    def work(report: Report) -> None:
        command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", *tests]
        output = run(command, min(report.left - 60, 150), cwd=ROOT)
        counts = {what: int(number) for number, what in re.findall(r"(\d+) (passed|skipped)", output)}
        skips = [line for line in output.splitlines() if line.startswith("SKIPPED")]
        report.row("conformance", **counts, skips=skips[:12])
        if not counts.get("passed"):
            raise Skipped(skips[0] if skips else "pytest ran nothing")

    return work


def golden(backend: str) -> Callable[[Report], None]:
    def work(report: Report) -> None:
        texts = []
        for name in (backend, "cpu"):
            with localllm.load("demo", backend=name, ctx_size=512) as model:
                # after more than 16 tokens, the two largest logits are equal
                pieces = model.generate("Once upon a time", max_tokens=16, temperature=0.0)
                texts.append("".join(piece.text for piece in pieces))
        report.row("golden", text=texts[0])
        assert texts[0] == texts[1], f"on the CPU it is {texts[1]!r}"

    return work


# -- llama.cpp ---------------------------------------------------------------------------------------------------------


def built(report: Report, source: Path) -> Path:
    """Build llama-bench from llama.cpp's source for this GPU, next to the source. Return its path."""
    if shutil.which("nvcc") is None or shutil.which("cmake") is None:
        raise Skipped("nvcc or cmake is not there to build llama.cpp with")
    folder = source / "build-cuda"
    options = (
        "-DGGML_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=native", "-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_CURL=OFF",
        "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_SERVER=OFF",
    )  # fmt: skip
    run(["cmake", "-S", source, "-B", folder, *options], report.left - 60)
    run(["cmake", "--build", folder, "-j", os.cpu_count(), "--target", "llama-bench"], report.left - 60)
    return folder / "bin" / "llama-bench"


def side_by_side(bench: Path | None, source: Path | None, size: Size) -> Callable[[Report], None]:
    """Run the same GGUFs and tests in both programs, in alternation, twice."""

    def work(report: Report) -> None:
        if bench is None and source is None:
            raise Skipped("neither --llama-bench nor --llama-source is given")
        peer = bench or built(report, source)  # type: ignore[arg-type]
        tests = (*size.bench, "-r", 2, "-o", "json")
        for geometry, type_name in size.peers:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / f"{geometry}-{type_name}.gguf"
                run([sys.executable, ROOT / "benchmarks/make_model.py", geometry, type_name, file], report.left - 30)
                ours = [sys.executable, "-m", "localllm", "bench", file, "--backend", report.common["backend"], *tests]
                theirs = [peer, "-m", file, "-ngl", 99, "-fa", 1, *tests]
                rates: dict[str, tuple[list[float], list[float]]] = {}
                for who, command in ((0, ours), (1, theirs)) * 2:
                    for each in json.loads(run(command, report.left - 10, cwd=ROOT)):
                        name = f"pp{each['n_prompt']}" if each["n_prompt"] else f"tg{each['n_gen']}"
                        rates.setdefault(f"{name}@{each['n_depth']}", ([], []))[who].append(each["avg_ts"])
                for test, (mine, other) in rates.items():
                    ratio = median(a / b for a, b in zip(mine, other, strict=True))
                    report.row(
                        "llama.cpp", model=geometry, type=type_name, test=test, ours=max(mine), theirs=max(other),
                        ratio=ratio,
                    )  # fmt: skip

    return work


# -- all stages --------------------------------------------------------------------------------------------------------


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("cuda", "opencl"), default="cuda")
    parser.add_argument("--minutes", type=float, default=8.0, help="start nothing after this many minutes")
    parser.add_argument("--quick", action="store_true", help="use a tiny model, to check that everything runs")
    parser.add_argument(
        "--only", default="", help="stages to run, separated by commas: check,speed,kernels,models,llama"
    )
    parser.add_argument("--llama-bench", type=Path, help="llama.cpp's, built for this card")
    parser.add_argument("--llama-source", type=Path, help="llama.cpp's source, to build it here")
    parser.add_argument("--out", type=Path, help="[benchmarks/results/gpu.jsonl; with --quick nowhere]")
    own = parser.parse_args(words)
    size = QUICK if own.quick else FULL
    out = own.out or (None if own.quick else ROOT / "benchmarks" / "results" / "gpu.jsonl")
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    common = {"when": now, "commit": git.stdout.strip() or "?", "backend": own.backend, "card": "none", "driver": ""}
    report = Report(own.minutes, out, common)
    wanted = own.only.split(",") if own.only else ["check", "speed", "kernels", "models", "llama"]
    good = report.stage("packages", packages)
    opened: list[Any] = []
    report.stage("open", lambda r: opened.append(open_backend(own.backend, checked=False)))
    for backend in opened:
        common |= {"card": backend.device.facts.name, "driver": backend.device.facts.api}
        if "check" in wanted:
            good &= report.stage("golden", golden(own.backend), 20)
            good &= report.stage("conformance", conformance(size.tests), 90)
        if "speed" in wanted:
            report.stage("bandwidth", bandwidth(backend.device, (4 if own.quick else 256) << 20))
            report.stage("dense", dense, 40)
        weights = Weights()
        if "models" in wanted:
            for geometry, kind in size.models:
                work = model(backend, weights, geometry, kind, size)
                report.stage("model", work, size.seconds, model=geometry, type=kind)
        if "kernels" in wanted:
            for name in size.formats:
                report.stage("kernel", kernel(backend, weights, name, size), 8, format=name)
        backend.close()
    if "llama" in wanted:
        report.stage("llama.cpp", side_by_side(own.llama_bench, own.llama_source, size), size.seconds)
    print("\n" + table(report))
    return 0 if good and opened else 1


if __name__ == "__main__":
    sys.exit(main())

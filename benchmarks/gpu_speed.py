"""The timed stages of benchmarks/gpu.py: copies, dense products, kernels, and steps of models generated in memory."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from gpu_report import Report, Skipped, run
from gpu_weights import Weights, plan_of

from localllm.backends.base import Limits
from localllm.backends.gpu import formats
from localllm.backends.gpu.budget import copy_bandwidth
from localllm.backends.gpu.executable import GpuExecutable
from localllm.plan import BLOCK, Batch, Linear, Plan, Recorder
from localllm.quant import row_bytes

KEPT = 40  # number of largest logits that sampling reads
DENSE = """
import json, torch
def rate(make, multiply, n=8192):
    a, b = make(n), make(n).t()
    for _ in range(3): multiply(a, b)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10): multiply(a, b)
    end.record(); end.synchronize()
    return 2 * n**3 * 10 / (start.elapsed_time(end) / 1e3)
found = {"f16": rate(lambda n: torch.randn(n, n, device="cuda", dtype=torch.float16), torch.matmul)}
found["int8"] = rate(lambda n: torch.randint(-128, 127, (n, n), device="cuda", dtype=torch.int8), torch._int_mm)
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Size:
    """The scope of the measurements."""

    models: tuple[tuple[str, str], ...]  # (geometry, matrix type), the most important first
    depths: tuple[int, ...]
    formats: tuple[str, ...]
    shape: tuple[int, int]  # matrix shape for timing a format's kernels
    verified: tuple[int, ...]  # row counts of verify steps
    prompt: int  # rows per prompt chunk
    steps: int
    seconds: float  # maximum time per model, which is skipped if less time is left
    tests: tuple[str, ...]  # arguments of pytest
    peers: tuple[tuple[str, str], ...]  # models that llama.cpp also runs
    bench: tuple[object, ...]  # tests for these models, as options of `localllm bench` and llama-bench


TYPES = ("Q4_K_M", "Q4_0", "Q8_0", "F16")
USUAL = ("Q4_K", "Q4_0", "Q8_0", "Q6_K", "F16")
FULL = Size(
    tuple((g, t) for t in TYPES for g in ("llama-8b", "llama-1b")), (0, 4096),
    (*USUAL, *(name for name in formats.FORMATS if name not in USUAL)), (65536, 4096), tuple(range(1, 9)), 512, 64,
    40.0, ("-n", "12", "-m", "gpu", "tests/backends/gpu"), (("llama-1b", "Q4_K_M"), ("llama-8b", "Q4_K_M")),
    ("-p", 512, "-n", 64, "-d", "0,4096"),
)  # fmt: skip
QUICK = Size(
    (("tiny", "Q4_K_M"), ("tiny", "F16")), (0, 300), ("Q4_K", "F16"), (512, 256), (1, 3), 20, 3, 5.0,
    ("-k", "products and Q4_0", "tests/backends/gpu/test_formats.py"), (("tiny", "Q4_0"),),
    ("-p", 20, "-n", 2, "-d", "0,64"),
)  # fmt: skip


def bandwidth(device: Any, size: int) -> Callable[[Report], None]:
    def work(report: Report) -> None:
        report.copy = max(copy_bandwidth(device, size) for _ in range(3))
        report.row("bandwidth", copy_gb_per_s=report.copy / 1e9)

    return work


def dense(report: Report) -> None:
    if report.common["backend"] != "cuda":
        raise Skipped("PyTorch measures it on CUDA only")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    report.dense = json.loads(run([sys.executable, "-c", DENSE], min(60, report.left - 30), env=environment))
    report.row("dense", **{f"{kind}_top_per_s": rate / 1e12 for kind, rate in report.dense.items()})


def batch(rows: int, depth: int, wanted: Iterable[int], blocks: int) -> Batch:
    """Return a batch of rows of one sequence after `depth` tokens, with its cache blocks in order."""
    positions = np.arange(depth, depth + rows, dtype=np.int32)
    tables, logit_rows = np.arange(blocks, dtype=np.int32)[None], np.array(list(wanted), np.int32)
    return Batch(np.full(rows, 5, np.int32), positions, positions, np.zeros(rows, np.int32), tables, logit_rows)


def device_seconds(device: Any, executable: GpuExecutable, times: int) -> float:
    """Return the device time in seconds of the last step's launches, without host time."""
    executable.replay()
    return min(device.seconds(lambda: [executable.replay() for _ in range(times)]) / times for _ in range(3))  # type: ignore[arg-type, return-value]


def kernel(backend: Any, weights: Weights, name: str, size: Size) -> Callable[[Report], None]:
    """Time products of a matrix with one row, eight rows, and a prompt chunk of activations."""

    def work(report: Report) -> None:
        (n, k), recorder = size.shape, Recorder()
        x = recorder.embed(weights.of("e", "F32", (64, k)))
        plan = recorder.finish(recorder.linear(x, weights.of("w", name, (n, k))))
        blocks = -(-size.prompt // BLOCK)
        executable = backend.bind(plan, Limits(size.prompt, size.prompt, blocks, blocks * BLOCK))
        try:
            seconds = []
            for rows in (1, 8, size.prompt):
                for _ in range(2):
                    executable.step(batch(rows, 0, range(rows), blocks))
                seconds.append(device_seconds(backend.device, executable, 2 if rows > 8 else size.steps))
        finally:
            executable.close()
        one, eight = (n * row_bytes(name, k) / s for s in seconds[:2])
        rate = 2 * n * k * size.prompt / seconds[2]
        shares = {f"of_{kind}": rate / most for kind, most in report.dense.items()}
        report.row(
            "kernel", format=name, one_row_gb_per_s=one / 1e9, of_copy=report.share(one),
            eight_rows_gb_per_s=eight / 1e9, matmul_top_per_s=rate / 1e12, **shares,
        )  # fmt: skip

    return work


def model(backend: Any, weights: Weights, geometry: str, type_name: str, size: Size) -> Callable[[Report], None]:
    """Time decode at every depth, verify, and prefill."""

    def work(report: Report) -> None:
        blocks = -(-(max(size.depths) + size.prompt + size.steps) // BLOCK)
        plan = plan_of(geometry, type_name, weights, blocks * BLOCK)
        began = perf_counter()
        executable = backend.bind(plan, Limits(size.prompt, 16, blocks, blocks * BLOCK))
        try:
            of = {"model": geometry, "type": type_name}
            report.row("bind", **of, seconds=perf_counter() - began, weights_gb=executable.memory.weights / 1e9)
            for depth in size.depths:
                decode(report, backend.device, executable, depth, size.steps, blocks, of)
            verify(report, backend.device, executable, size, blocks, of)
            for depth in size.depths:
                prefill(report, backend.device, executable, plan, depth, size, blocks, of)
        finally:
            executable.close()

    return work


def decode(
    report: Report, device: Any, executable: GpuExecutable, depth: int, steps: int, blocks: int, of: dict[str, Any]
) -> None:
    walls = []
    for n in range(-3, steps):
        start = perf_counter()
        found = executable.step_top_k(batch(1, depth + max(n, 0), [0], blocks), KEPT)
        walls.append(perf_counter() - start)
    wall, own = median(walls[3:]), device_seconds(device, executable, min(20, steps))
    read = executable.memory.read_after(depth + steps / 2)
    report.row(
        "decode", **of, depth=depth, tokens_per_s=1 / wall, step_ms=1e3 * wall, device_ms=1e3 * own,
        gb_per_s=read / wall / 1e9, of_copy=report.share(read / wall), device_of_copy=report.share(read / own),
        replayed=not executable.replays.refused, refused=executable.replays.refused,
        finite=bool(np.isfinite(found.logits).all()),
    )  # fmt: skip


def verify(report: Report, device: Any, executable: GpuExecutable, size: Size, blocks: int, of: dict[str, Any]) -> None:
    """Compare the time of a step of several rows with a step of one row."""
    seconds = {}
    for rows in size.verified:
        for _ in range(2):
            executable.step(batch(rows, 128, range(rows), blocks))
        seconds[rows] = device_seconds(device, executable, min(10, size.steps))
    costs = {str(rows): round(s / seconds[1], 3) for rows, s in seconds.items()}
    report.row("verify", **of, depth=128, one_ms=1e3 * seconds[1], cost_of_rows=costs)


def prefill(
    report: Report,
    device: Any,
    executable: GpuExecutable,
    plan: Plan,
    depth: int,
    size: Size,
    blocks: int,
    of: dict[str, Any],
) -> None:
    """Time prompt chunks.

    Only matrix operations are counted, but the time includes attention. So the share of the dense throughput is a lower
    bound.
    """
    walls = []
    for _ in range(4):
        start = perf_counter()
        executable.step(batch(size.prompt, depth, [size.prompt - 1], blocks))
        walls.append(perf_counter() - start)
    wall = median(walls[1:])
    products = [op for op in plan.operations if isinstance(op, Linear)]
    rate = sum(op.flops * (1 if op.x.rows == "logits" else size.prompt) for op in products) / wall
    report.row(
        "prefill", **of, depth=depth, rows=size.prompt, tokens_per_s=size.prompt / wall, step_ms=1e3 * wall,
        device_ms=1e3 * device_seconds(device, executable, 1), matrices_top_per_s=rate / 1e12,
        **{f"of_{kind}": rate / most for kind, most in report.dense.items()},
    )  # fmt: skip

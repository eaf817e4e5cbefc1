"""Time the CPU's matrix kernels against the roofline, for every format with 1, 4 and 512 rows of activations.

    python benchmarks/kernels.py [--formats Q4_0,Q4_K] [-t 2] [--rounds 3]

One row is limited by memory bandwidth: the GB/s of packed weights are compared with a read-only loop in the same round.
512 rows are limited by arithmetic: billions of operations per second (two per weight and row) are compared with a loop
of int8 products. Weights are random and larger than any cache. One JSON line per format goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
from compare import RESULTS, ROOT, machine
from numpy.typing import NDArray

sys.path.append(str(ROOT))  # after an installed localllm, so that against.py can time another one

from localllm.backends.base import Limits
from localllm.backends.cpu.backend import CpuBackend, CpuExecutable
from localllm.backends.cpu.roofs import product_rates
from localllm.backends.cpu.unpack import FORMATS as KERNELS
from localllm.plan import BLOCK, Batch, Recorder
from localllm.quant import FORMATS, quantize, row_bytes

COLUMNS, ROWS, BATCH = 2048, 1 << 16, 512
TURNS = 1 << 16


class Random:
    """A weight of normally distributed values, or of random bytes if its format cannot be written.

    A few rows repeat.
    """

    def __init__(self, name: str, format_name: str, rows: int) -> None:
        self.name, self.format, self.shape = name, format_name, (rows, COLUMNS)
        size = row_bytes(format_name, COLUMNS)
        random = np.random.default_rng(0)
        if FORMATS[format_name].quantize is not None:
            values = random.standard_normal((1024, COLUMNS), np.float32)
            self._piece = quantize(values, format_name, np.ones(COLUMNS, np.float32))
        else:
            self._piece = random.integers(0, 256, (1024, size), np.uint8)
            self._piece &= 0xBF  # keeps scales finite in every format

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        return self._piece[np.arange(start, stop) % len(self._piece)]


def best(function: Callable[[], object], repeat: int = 3) -> float:
    times = []
    for _ in range(repeat):
        start = perf_counter()
        function()
        times.append(perf_counter() - start)
    return min(times)


def byte_peak(backend: CpuBackend) -> float:
    """Return the operations per second of a loop that only multiplies and adds bytes, on all threads."""
    return max(product_rates(backend.library, backend.pool, TURNS, 3))


def batch(rows: int) -> Batch:
    numbers = np.arange(rows, dtype=np.int32)
    tables = np.arange(-(-rows // BLOCK), dtype=np.int32)[None]
    return Batch(numbers, numbers, numbers, np.zeros(rows, np.int32), tables, numbers)


def product_seconds(executable: CpuExecutable, rows: int) -> float:
    """Return the seconds of a step that embeds tokens, quantizes their embeddings and multiplies.

    The product takes most of the time.
    """
    step = batch(rows)
    executable.step(step)
    return best(lambda: executable.step(step), 1 if rows > 4 else 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=",".join(KERNELS))
    parser.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "kernels.jsonl")
    arguments = parser.parse_args()
    backend = CpuBackend(arguments.threads)
    print("| format | bits | 1 row GB/s | of roof | 4 rows GB/s | 512 rows GOP/s | of byte peak |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name in arguments.formats.split(","):
        recorder = Recorder()
        x = recorder.embed(Random("e", "F32", BATCH))
        plan = recorder.finish(recorder.linear(x, Random("w", name, ROWS)))
        executable = backend.bind(plan, Limits(BATCH, BATCH, BATCH // BLOCK, BATCH))
        size = executable.memory.weights_per_token
        operations = 2 * ROWS * COLUMNS * BATCH
        rounds = []
        for _ in range(arguments.rounds):
            roof, peak = executable.read_bandwidth(), byte_peak(backend)
            one, four, many = (product_seconds(executable, rows) for rows in (1, 4, BATCH))
            rounds.append((size / one, roof, size / four, operations / many, peak))
        one, roof, four, many, peak = (median(column) for column in zip(*rounds, strict=True))
        share = median(r[0] / r[1] for r in rounds)
        of_peak = median(r[3] / r[4] for r in rounds)
        bits = 8 * size / (ROWS * COLUMNS)
        row = {
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "format": name,
            "bits_per_weight": bits,
            "shape": [ROWS, COLUMNS],
            "threads": arguments.threads,
            "device": backend.describe(),
            "one_row_gb_per_s": one / 1e9,
            "roof_gb_per_s": roof / 1e9,
            "roof_share": share,
            "four_rows_gb_per_s": four / 1e9,
            "matmul_gop_per_s": many / 1e9,
            "byte_peak_gop_per_s": peak / 1e9,
            "peak_share": of_peak,
            "machine": machine(),
        }
        with arguments.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        cells = (name, f"{bits:.2f}", f"{one / 1e9:.1f}", f"{share:.0%}", f"{four / 1e9:.1f}", f"{many / 1e9:.0f}")
        print(f"| {' | '.join(cells)} | {of_peak:.0%} |", flush=True)
        executable.close()
    backend.close()


if __name__ == "__main__":
    main()

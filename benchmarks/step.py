"""Break down the time of a decode step: kernels by kind, waiting at barriers, and time outside the plan.

    python benchmarks/step.py MODEL.gguf ... [-t 2] [--depth 128]

The plan's clock counts the cycles of thread 0. The rest of a step's wall time is spent in Python and NumPy. One JSON
line per model goes to benchmarks/results/step.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, median
from time import perf_counter

from compare import RESULTS, ROOT, machine

sys.path.insert(0, str(ROOT))

import localllm
from localllm.backends.cpu.backend import CpuExecutable
from localllm.backends.cpu.kernels.executor import Entry

STEPS = 64


def kind(label: str) -> str:
    """Return the role of a matrix independent of its layer, or the name of another operation."""
    return ".".join(part for part in label.split(".") if not part.isdigit())


def clocked(call: Callable[[], object]) -> float:
    """Return the duration of one call in seconds."""
    start = perf_counter()
    call()
    return perf_counter() - start


def measure(path: Path, threads: int, depth: int) -> dict[str, object]:
    with localllm.load(path, threads=threads, ctx_size=depth + 2 * STEPS) as model:
        executable = model.executable
        assert isinstance(executable, CpuExecutable)
        session = model.session()
        for start in range(0, depth, model.batch_rows):
            session.evaluate([1] * min(model.batch_rows, depth - start), logits=False)
        session.evaluate([1], logits=False)
        executable.entries[:, [Entry.ticks, Entry.waited]] = 0
        whole, plan = [], []
        for _ in range(STEPS):  # alternates, because the bandwidth of a shared machine drifts
            whole.append(clocked(lambda: session.evaluate([1], logits=False)))
            plan.append(clocked(executable.replay))
        # The counter's frequency is unknown, so the plan's share of the time is measured by replaying the plan alone.
        seconds, plan_seconds = mean(whole), mean(plan)
        outside = median(a - b for a, b in zip(whole, plan, strict=True))
        profile = executable.profile()
        total = sum(ticks for _, ticks, _ in profile)
        kinds: dict[str, float] = defaultdict(float)
        for label, ticks, waited in profile:
            kinds[kind(label)] += (ticks - waited) / total * plan_seconds
        return {
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "model": path.name,
            "device": model.device,
            "depth": depth,
            "step_ms": seconds * 1e3,
            "barrier_ms": sum(waited for *_, waited in profile) / total * plan_seconds * 1e3,
            "outside_ms": outside * 1e3,
            "kernels_ms": {name: t * 1e3 for name, t in sorted(kinds.items(), key=lambda item: -item[1])},
            "roof_ms": executable.memory.weights_per_token / executable.read_bandwidth() * 1e3,
            "machine": machine(),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--depth", type=int, default=128)
    parser.add_argument("--out", type=Path, default=RESULTS / "step.jsonl")
    arguments = parser.parse_args()
    for path in arguments.models:
        row = measure(path, arguments.threads, arguments.depth)
        with arguments.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        kernels = row.pop("kernels_ms")
        assert isinstance(kernels, dict)
        print(f"{path.name}: " + ", ".join(f"{key} {row[key]:.2f}" for key in row if key.endswith("_ms")))
        print("  " + ", ".join(f"{name} {t:.2f}" for name, t in kernels.items() if t >= 0.01))


if __name__ == "__main__":
    main()

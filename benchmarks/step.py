"""Break down the time of a decode step: kernels by kind, waiting at barriers, and time outside the plan.

    python benchmarks/step.py MODEL.gguf ... [-t 2] [--depth 128]
    python benchmarks/step.py MODEL.gguf ... --prompt 512 [--rounds 5]

The plan's clock counts the cycles of thread 0. The rest of a step's wall time is spent in Python and NumPy. With
`--prompt`, one thread runs the kernels of a prompt one by one, and the CPU time of each is taken: other programs on the
machine do not count. The result is the time of all operations over that of the matrix products, for the model, for its
recurrent layers and for their mixers alone. One JSON line per model goes to benchmarks/results/step.jsonl.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, median
from time import perf_counter, thread_time

import numpy as np
from compare import RESULTS, ROOT, machine
from numpy.typing import NDArray

sys.path.insert(0, str(ROOT))

import localllm
from localllm.backends.cpu.backend import CpuExecutable
from localllm.backends.cpu.kernels.executor import Entry
from localllm.plan import Convolve, Experts, HeadLinear, Linear, LinearAdd, LinearAttention, SelectiveScan, Wkv

STEPS = 64
PRODUCTS = (Experts, HeadLinear, Linear, LinearAdd)
RECURRENT = (Convolve, LinearAttention, SelectiveScan, Wkv)
MIXER_OUTPUTS = ("ssm_out", "shortconv.out_proj", "attn_output")


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


def cpu_times(executable: CpuExecutable, rounds: int) -> NDArray[np.float64]:
    """Return the CPU seconds of every kernel call of the last batch on this thread: the minimum over the rounds."""
    kernel = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)
    calls = [(kernel(int(e[Entry.kernel])), int(e[Entry.arguments])) for e in executable.entries]
    best = np.full(len(calls), np.inf)
    for _ in range(rounds):
        executable._storage.counters[:] = 0
        for number, (call, arguments) in enumerate(calls):
            start = thread_time()
            call(arguments, 0, 1)
            best[number] = min(best[number], thread_time() - start)
    return best


def parts(executable: CpuExecutable) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which calls are parts of matrix products, of recurrent layers, and of their mixers."""
    products = np.array([isinstance(op, PRODUCTS) for op in executable.operations])
    layers, layer = [], -1
    for label in executable.labels:
        fields = label.split(".")
        layer = int(fields[1]) if fields[0] == "blk" and fields[1].isdigit() else layer
        layers.append(layer)
    layer_of = np.array(layers)
    recurrent, mixer = np.zeros(len(layer_of), bool), np.zeros(len(layer_of), bool)
    for layer in {n for n, op in zip(layers, executable.operations, strict=True) if isinstance(op, RECURRENT)}:
        own = np.flatnonzero(layer_of == layer)
        recurrent[own] = True
        last = max(n for n in own if any(name in executable.labels[n] for name in MIXER_OUTPUTS))
        mixer[own[0] : last + 1] = True
    return products, recurrent, mixer


def measure_prompt(path: Path, rows: int, rounds: int) -> dict[str, object]:
    with localllm.load(path, threads=1, ctx_size=rows) as model:
        executable = model.executable
        assert isinstance(executable, CpuExecutable)
        rows = min(rows, model.batch_rows)
        model.session().evaluate([1] * rows, logits=False)
        times = cpu_times(executable, rounds) * 1e3
        products, recurrent, mixer = parts(executable)
        kinds: dict[str, float] = defaultdict(float)
        for label, t in zip(executable.labels, times.tolist(), strict=True):
            kinds[kind(label)] += t
        found: dict[str, object] = {
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "model": path.name,
            "device": model.device,
            "prompt": rows,
        }
        for name, which in (("model", products | True), ("recurrent_layers", recurrent), ("mixers", mixer)):
            if which.any():
                found[f"{name}_cpu_ms"] = float(times[which].sum())
                found[f"{name}_products_ms"] = float(times[which & products].sum())
        kernels = dict(sorted(kinds.items(), key=lambda item: -item[1]))
        return found | {"kernels_ms": kernels, "machine": machine()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--depth", type=int, default=128)
    parser.add_argument("--prompt", type=int, help="time a prompt of this many tokens instead, at most one pass")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of --prompt")
    parser.add_argument("--note", default="", help="kept with the results")
    parser.add_argument("--out", type=Path, default=RESULTS / "step.jsonl")
    arguments = parser.parse_args()
    for path in arguments.models:
        if arguments.prompt:
            row = measure_prompt(path, arguments.prompt, arguments.rounds)
        else:
            row = measure(path, arguments.threads, arguments.depth)
        row |= {"note": arguments.note} if arguments.note else {}
        with arguments.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        kernels = row.pop("kernels_ms")
        assert isinstance(kernels, dict)
        print(f"{path.name}: " + ", ".join(f"{key} {row[key]:.2f}" for key in row if key.endswith("_ms")))
        print("  " + ", ".join(f"{name} {t:.2f}" for name, t in kernels.items() if t >= 0.01))


if __name__ == "__main__":
    main()

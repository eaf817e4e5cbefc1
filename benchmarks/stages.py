"""Run a model in one process and in two stages (two processes, ZeroMQ on 127.0.0.1) in turn, one thread per process.

    python benchmarks/stages.py MODEL.gguf [--rounds 9]

Times are the shortest of all rounds: a decode step of one sequence and of two, and a prompt of 512 tokens. A hop costs
half of the difference between both steps: hidden states go to the second process, and the logits or their top 40 come
back. Ratios are medians over rounds. The ratio of the prompt shows the gain from micro-batches.
One JSON line per model
goes to benchmarks/results/stages.jsonl.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter

from compare import RESULTS, ROOT, machine

sys.path.insert(0, str(ROOT))

from localllm.backends.base import F16_CACHE, Backend
from localllm.backends.cpu.backend import CpuBackend
from localllm.cluster.backend import SplitBackend
from localllm.cluster.cut import even_cut
from localllm.engine import BlockPool, Engine, SequenceRows
from localllm.gguf import open_gguf
from localllm.loading.loader import limits_of
from localllm.loading.recording import Recording
from localllm.plan import BLOCK, Plan
from tests.localllm.cluster.support import Processes

PROMPT, STEPS, CONTEXT = 512, 16, 1024


class Timed:
    """An engine whose steps are timed in milliseconds."""

    def __init__(self, plan: Plan, backend: Backend) -> None:
        limits = limits_of(CONTEXT, plan, 4)
        windowed = BlockPool(limits.window_blocks, BLOCK, plan.window) if limits.window_blocks else None
        executable = backend.bind(plan, limits, F16_CACHE)
        self.engine = Engine(executable, BlockPool(limits.blocks, BLOCK, windowed=windowed), limits)

    def prompt(self) -> float:
        sequence = self.engine.add()
        began = perf_counter()
        self.engine.step([SequenceRows(sequence, [(7 * i) % 200 for i in range(PROMPT)])])
        seconds = perf_counter() - began
        self.engine.release(sequence)
        return 1000 * seconds

    def decode(self, streams: int, top_k: int = 0) -> float:
        sequences = [self.engine.add() for _ in range(streams)]
        self.engine.step([SequenceRows(sequence, [1, 2, 3], "last") for sequence in sequences])
        times = []
        for token in range(STEPS):
            began = perf_counter()
            self.engine.step([SequenceRows(sequence, [token], "last", top_k) for sequence in sequences])
            times.append(perf_counter() - began)
        for sequence in sequences:
            self.engine.release(sequence)
        return 1000 * min(times)


def measure(path: Path, rounds: int) -> dict[str, object]:
    recording, backend = Recording(CONTEXT), CpuBackend(1)
    cases = ["1 stream", "1 stream, top 40", "2 streams", "2 streams, top 40", "prompt"]
    times: dict[tuple[str, str], list[float]] = {(where, case): [] for where in ("whole", "split") for case in cases}
    with open_gguf(path) as file:
        plan = recording.plan(file)
        processes = Processes(path, recording)
        split = SplitBackend(backend, lambda plan: even_cut(plan, 2), processes.connect)
        engines = {"whole": Timed(plan, backend), "split": Timed(plan, split)}
        for number in range(rounds + 1):
            for where, engine in engines.items():
                found = [engine.decode(n, k) for n in (1, 2) for k in (0, 40)]
                for case, value in zip(cases, [*found, engine.prompt()], strict=True):
                    if number:  # the first round warms up
                        times[where, case].append(value)
        for engine in engines.values():
            engine.engine.executable.close()
    ms = {f"{where}, {case}": round(min(values), 3) for (where, case), values in times.items()}
    hops = {case: round((ms[f"split, {case}"] - ms[f"whole, {case}"]) / 2, 3) for case in cases[:4]}
    prompts = [a / b for a, b in zip(times["whole", "prompt"], times["split", "prompt"], strict=True)]
    streams = [2 * a / b for a, b in zip(times["split", cases[1]], times["split", cases[3]], strict=True)]
    return {
        "model": path.name, "ms": ms, "ms per hop": hops, "prompt: one process / two stages": round(median(prompts), 2),
        "two streams / one, on two stages": round(median(streams), 2),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    for path in given.models:
        found = measure(path, given.rounds)
        print(json.dumps(found, indent=1))
        line = {"when": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine(), **found}
        with (RESULTS / "stages.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()

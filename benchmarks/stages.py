"""Run a model in one process and in two stages (two processes, ZeroMQ on 127.0.0.1) in turn, one thread per process.

    python benchmarks/stages.py MODEL.gguf [--rounds 9] [--cut LAYER]

Times are the shortest of all rounds: a decode step of one sequence and of two, and a prompt of 512 tokens. A hop costs
half of the difference between both steps: hidden states go to the second process, and the logits or their top 40 come
back. Ratios are medians over rounds. The ratio of the prompt shows the gain from micro-batches.

Then the generation loop answers 1, 2, 4 and 8 requests at a time, with two steps in flight on two stages: tokens per
second of all of them, the best of all rounds. `--cut` is the first layer of the second stage, to balance the times; by
default both stages have about equally many bytes. `--waiting MS` replaces the computation of a step by a pause of MS,
half of it in each stage: this measures the loop and the messages, even if the cores of this machine are busy. One JSON
line per model goes to benchmarks/results/stages.jsonl.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, sleep

from compare import RESULTS, ROOT, machine

sys.path.insert(0, str(ROOT))

from localllm.backends.base import F16_CACHE, Backend
from localllm.backends.cpu.backend import CpuBackend
from localllm.cluster.backend import SplitBackend
from localllm.cluster.cut import Cut, cut_at, even_cut
from localllm.engine import BlockPool, Engine, SequenceRows
from localllm.generation.core import Core
from localllm.generation.interfaces import SchedulerLimits
from localllm.generation.request import Event, Request, Token
from localllm.generation.request_state import Ticket
from localllm.gguf import open_gguf
from localllm.loading.loader import limits_of
from localllm.loading.recording import Recording
from localllm.options import SamplingOptions
from localllm.plan import BLOCK, Plan
from localllm.sampling.sampler import Sampler
from tests.localllm.cluster.support import Processes, Threads
from tests.models.kit import KIT
from tests.models.support import plan_of

PROMPT, STEPS, CONTEXT = 512, 16, 1024
STREAMS = (1, 2, 4, 8)


class Timed:
    """An engine whose steps are timed in milliseconds."""

    def __init__(self, plan: Plan, backend: Backend) -> None:
        limits = limits_of(CONTEXT, plan, max(STREAMS))
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

    def answer(self, streams: int) -> float:
        """Return the tokens per second of this many greedy answers of the loop, while all of them decode."""
        core = Core(self.engine, None, Sampler, SchedulerLimits(parallel=streams))
        tokens = [0] * streams

        def listener(number: int, event: Event) -> None:
            tokens[number] += isinstance(event, Token)

        for number in range(streams):
            greedy, prompt = SamplingOptions(temperature=0), [3 + number, 4, 5]
            request = Request(prompt, greedy, 2 * STEPS, ignore_eos=True, reuse=False)
            ticket = Ticket(request, partial(listener, number))
            core.running.waiting.append(core.new_state(ticket))
        while min(tokens) < 2:
            core.step()
        began, before = perf_counter(), sum(tokens)
        while max(tokens) < STEPS + 2:
            core.step()
        rate = (sum(tokens) - before) / (perf_counter() - began)
        core.running.end(None)
        return rate


def measure(path: Path, rounds: int, layer: int) -> dict[str, object]:
    recording, backend = Recording(CONTEXT), CpuBackend(1)
    cases = ["1 stream", "1 stream, top 40", "2 streams", "2 streams, top 40", "prompt"]
    times: dict[tuple[str, str], list[float]] = {(where, case): [] for where in ("whole", "split") for case in cases}
    with open_gguf(path) as file:
        plan = recording.plan(file)
        processes = Processes(path, recording)

        def cut(plan: Plan) -> Cut:
            return cut_at(plan, (0, layer)) if layer else even_cut(plan, 2)

        split = SplitBackend(backend, cut, processes.connect)
        engines = {"whole": Timed(plan, backend), "split": Timed(plan, split)}
        for number in range(rounds + 1):
            for where, engine in engines.items():
                found = [engine.decode(n, k) for n in (1, 2) for k in (0, 40)]
                for case, value in zip(cases, [*found, engine.prompt()], strict=True):
                    if number:  # the first round warms up
                        times[where, case].append(value)
        loop: dict[tuple[str, int], list[float]] = {(where, n): [] for where in engines for n in STREAMS}
        for _ in range(rounds):
            for streams in STREAMS:
                for where, engine in engines.items():
                    loop[where, streams].append(engine.answer(streams))
        firsts = engines["split"].engine.executable._cut.firsts  # type: ignore[attr-defined]
        for engine in engines.values():
            engine.engine.executable.close()
    ms = {f"{where}, {case}": round(min(values), 3) for (where, case), values in times.items()}
    hops = {case: round((ms[f"split, {case}"] - ms[f"whole, {case}"]) / 2, 3) for case in cases[:4]}
    prompts = [a / b for a, b in zip(times["whole", "prompt"], times["split", "prompt"], strict=True)]
    streams = [2 * a / b for a, b in zip(times["split", cases[1]], times["split", cases[3]], strict=True)]
    rates = {f"{where}, {n}": round(max(values), 2) for (where, n), values in loop.items()}
    gains = {
        str(n): round(median(a / b for a, b in zip(loop["split", n], loop["split", 1], strict=True)), 2)
        for n in STREAMS
    }  # fmt: skip
    beside = {
        str(n): round(median(a / b for a, b in zip(loop["split", n], loop["whole", n], strict=True)), 2)
        for n in STREAMS
    }  # fmt: skip
    return {
        "model": path.name, "cut": list(firsts), "loop: tokens/s": rates,
        "loop: streams / one stream, on two stages": gains, "loop: two stages / one process": beside,
        "ms": ms, "ms per hop": hops, "prompt: one process / two stages": round(median(prompts), 2),
        "two streams / one, on two stages": round(median(streams), 2),
    }  # fmt: skip


def waiting(milliseconds: float, rounds: int) -> dict[str, object]:
    """Measure the loop over two stages that wait instead of computing, as if each had a machine."""
    threads, backend = Threads(CpuBackend(1), patience=60.0), CpuBackend(1)
    metadata, tensors = KIT["llama-gqa"].loaded()
    plan = plan_of(metadata, tensors)
    whole, split = Timed(plan, backend), Timed(plan, threads.backend())
    stages = [split.engine.executable._first, *threads.stages]  # type: ignore[attr-defined]
    for executable, share in ((whole.engine.executable, 1), *[(stage.executable, 2) for stage in stages]):
        name = "step" if share == 1 else "run"
        setattr(executable, name, partial(_late, getattr(executable, name), milliseconds / share / 1000))
    found: dict[tuple[str, int], list[float]] = {(w, n): [] for w in ("whole", "split") for n in STREAMS}
    for _ in range(rounds):
        for streams in STREAMS:
            found["whole", streams].append(whole.answer(streams))
            found["split", streams].append(split.answer(streams))
    for engine in (whole, split):
        engine.engine.executable.close()
    rates = {f"{where}, {n}": round(max(values), 2) for (where, n), values in found.items()}
    gains = {str(n): round(rates[f"split, {n}"] / rates["split, 1"], 2) for n in STREAMS}
    hop = 1000 * (1 / rates["split, 1"] - 1 / rates["whole, 1"]) / 2
    return {
        "ms of waiting": milliseconds, "loop: tokens/s": rates, "streams / one stream, on two stages": gains,
        "ms per hop": round(hop, 3),
    }  # fmt: skip


def _late(call: Callable[..., object], seconds: float, *given: object) -> object:
    sleep(seconds)
    return call(*given)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cut", type=int, default=0, metavar="LAYER")
    parser.add_argument("--waiting", type=float, default=0.0, metavar="MS")
    given = parser.parse_args()
    jobs = [partial(measure, path, given.rounds, given.cut) for path in given.models]
    jobs += [partial(waiting, given.waiting, given.rounds)] if given.waiting else []
    for job in jobs:
        found = job()
        print(json.dumps(found, indent=1))
        line = {"when": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine(), **found}
        with (RESULTS / "stages.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()

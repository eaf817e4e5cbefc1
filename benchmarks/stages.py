"""Time a model in one process and in two stages in turn, with a network between the stages; and llama.cpp's RPC.

    python benchmarks/stages.py MODEL.gguf [--delays 0.2,1,5] [--sequences 1,2,4,8] [--rounds 2] [--cuts 8,11]
        [--llama-batched-bench PATH --rpc-server PATH]
    python benchmarks/stages.py --waiting 20 [--delays 0.2,1,5]
    python benchmarks/stages.py --table

Every process has one thread. The rows are: one process; one process with two threads (the same cores as two stages);
two stages in two processes that are connected over ZeroMQ on 127.0.0.1; the same through a relay (relay.py) that adds a
delay to each message; two replicas, each with the whole model, behind a front, all of them on a Ray cluster that this
program starts. llama.cpp runs the same cut: its rpc-server has the layers of the second stage, and is reached
through the same relay. One round takes about ten minutes for a model with 1B parameters.

The second stage begins with the layer that `--stages 2` chooses for two equal machines. `--cuts` gives others; then
each is measured, one row per cut.

The generation loop answers N requests together, without drafts. Decode speed is counted in tokens per second of all
requests, from the time when each has its first token until the first one ends. First token: the time until the answer
to a prompt of 512 tokens begins. `localllm cluster plan` makes the forecasts. It measures this machine before each row,
and uses the best measurement.

`--waiting MS` runs a tiny model whose steps pause for MS, half of it in each stage, as if each stage had a machine of
its own. On a machine with few or busy cores, this measures the loop, the messages and the relay alone. One JSON line
per model goes to benchmarks/results/stages.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

from compare import RESULTS, ROOT, machine
from relay import Relays, relays

sys.path.insert(0, str(ROOT))

import localllm
from localllm.backends.base import F16_CACHE, Backend
from localllm.backends.cpu.backend import CpuBackend
from localllm.cli.commands.cluster import Row, forecasts
from localllm.cli.forecast import Fastest, planned
from localllm.cli.terminal.console import guarded
from localllm.cli.tool_options import ClusterOptions
from localllm.cluster.backend import SplitBackend
from localllm.cluster.cut import cut_at, even_cut
from localllm.cluster.executable import SplitExecutable
from localllm.cluster.forecast import Network, StageSpeed, tokens_per_second
from localllm.cluster.sizing import Node, Sizes, place
from localllm.generation.interfaces import SchedulerLimits
from localllm.generation.request import Event, Failed, Finished, Request, Token
from localllm.generation.scheduler import RequestScheduler, Scheduler
from localllm.gguf import open_gguf
from localllm.loading.splitting import Whole
from localllm.model import Model
from localllm.options import LoadOptions, SamplingOptions
from tests.localllm.cluster.support import Processes, pausing
from tests.models.kit import KIT

SHORT, ANSWER, PROMPT, CONTEXT = 16, 64, 512, 1024
STORED = RESULTS / "stages.jsonl"


@dataclass(slots=True)
class Halves:
    """Splits a model into two stages; the second is a process that is reached through `relays`."""

    relays: Relays | None
    first: int = 0  # first layer of the second stage; 0: halves with equal weights
    pause: float = 0.0  # seconds that a step waits in each stage
    line: str = ""
    processes: Processes | None = field(default=None, repr=False)

    def free_memory(self, options: LoadOptions) -> int:
        from localllm.loading.loader import free_memory

        return free_memory()

    def backend(self, whole: Whole, threads: int) -> Backend:
        via = self.relays.to if self.relays is not None else None
        self.processes = Processes(Path(whole.file.path), whole.recording, via=via, pause=self.pause)
        cut = partial(cut_at, firsts=(0, self.first)) if self.first else partial(even_cut, stages=2)
        return SplitBackend(CpuBackend(threads), cut, self.processes.connect)

    def slow(self, model: Model) -> None:
        """Let the first stage wait, too."""
        executable = model.executable
        if self.pause:
            assert isinstance(executable, SplitExecutable)
            pausing(executable._first.executable, "run", self.pause)


class Listener:
    """Notes when the tokens of a request arrive."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.error: Exception | None = None
        self.ended = threading.Event()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Token):
            self.times.append(perf_counter())
        elif isinstance(event, Finished | Failed):
            self.error = event.error if isinstance(event, Failed) else None
            self.ended.set()


def answer(scheduler: RequestScheduler, count: int, prompt: int, tokens: int) -> list[list[float]]:
    """Answer `count` requests together; return the times of their tokens."""
    sampling = SamplingOptions(temperature=0.0)
    listeners = [Listener() for _ in range(count)]
    for number, listener in enumerate(listeners):
        ids = [1 + (7 * i + 31 * number) % 100 for i in range(prompt)]
        scheduler.submit(Request(ids, sampling, tokens, ignore_eos=True, reuse=False), listener)
    for listener in listeners:
        assert listener.ended.wait(600)
        assert len(listener.times) == tokens, listener.error
    return [listener.times for listener in listeners]


def rate_of(times: Sequence[Sequence[float]]) -> float:
    """Return the tokens per second of all requests, while all of them decode."""
    began, ended = max(each[0] for each in times), min(each[-1] for each in times)
    return sum(began < time <= ended for each in times for time in each) / (ended - began)


def measure(scheduler: RequestScheduler, counts: Sequence[int]) -> dict[str, float]:
    """Return tokens per second for each number of requests, and the seconds to the first token."""
    answer(scheduler, 1, SHORT, 4)
    found = {}
    for count in counts:
        found[str(count)] = rate_of(answer(scheduler, count, SHORT, ANSWER))
    began = perf_counter()
    [[first, *_]] = answer(scheduler, 1, PROMPT, 2)
    found["first token"] = first - began
    return found


@contextmanager
def opened(path: Path, threads: int, split: Halves | None, most: int, pause: float = 0.0) -> Iterator[Scheduler]:
    options = LoadOptions(threads=threads, ctx_size=256 if pause else CONTEXT).changed({"spec": "off"})
    with localllm.load(path, options, sequences=most, split=split) as model:
        assert isinstance(model, Model)
        if split is not None:
            split.slow(model)
        elif pause:
            pausing(model.executable, "step", pause)
        with Scheduler(model.new_core(SchedulerLimits(most))) as scheduler:
            yield scheduler


@contextmanager
def replicated(path: Path, most: int) -> Iterator[RequestScheduler]:
    """Open two replicas with one thread each, as `serve --ray auto --replicas 2` does."""
    from localllm.distributed.attach import attached
    from localllm.distributed.front import open_front
    from localllm.server.metrics import Metrics

    options = LoadOptions(threads=1, ctx_size=CONTEXT).changed({"spec": "off"})
    limits = SchedulerLimits(max(1, -(-most // 2)))
    os.environ["RAY_ADDRESS"] = "local"  # start a cluster, even if this machine has one
    with (
        guarded(),  # without Ray's lines
        attached("auto"),
        open_front(path, (2, 2), 1, options, limits, Metrics(), {}, print, lambda model: None) as served,
    ):
        yield served.scheduler


def peer(
    program: Path, server: Path, path: Path, counts: Sequence[int], delay: float | None, layers: int
) -> dict[str, float]:
    """Return the decode speed of llama-batched-bench, and its time for a prompt. With a delay, an rpc-server has the
    last `layers` layers.
    """
    command = [
        str(program), "-m", str(path), "-t", "1", "-c", str(max(*counts, 4) * 256), "-npp", str(SHORT),
        "-ntg", str(ANSWER), "-npl", ",".join(map(str, counts)),
    ]  # fmt: skip
    with relays(delay or 0.0) if delay is not None else nullcontext() as between:
        process = None
        try:
            if between is not None:
                port = _free_port()
                process = subprocess.Popen(
                    [str(server), "-p", str(port), "-t", "1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
                sleep(1)
                address = between.to(f"127.0.0.1:{port}") if delay else f"127.0.0.1:{port}"
                command += ["--rpc", address, "-ngl", str(layers)]
            found = {row["B"]: float(row["S_TG t/s"]) for row in _rows(command)}
            command[command.index("-npp") + 1], command[command.index("-npl") + 1] = str(PROMPT), "1"
            found["first token"] = float(next(iter(_rows(command)))["T_PP s"])
            return found
        finally:
            if process is not None:
                process.kill()
                process.wait()


def _rows(command: Sequence[str]) -> Iterator[dict[str, str]]:
    """Run llama-batched-bench, and yield the rows of its table."""
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    yield from (dict(zip(rows[0], row, strict=True)) for row in rows[1:] if re.fullmatch(r"\d+", row[0]))


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as made:
        return int(made.getsockname()[1])


def forecast(path: Path, fastest: tuple[Fastest, Fastest], delay: float = 0.0, first: int = 0) -> tuple[Row, Row]:
    """Return what `localllm cluster plan` says for one stage, and for two on this machine, cut before layer `first`.

    It measures this machine again. `fastest` has the shortest times so far: a slow moment does not lower the forecast.
    """
    own = ClusterOptions(("plan", str(path)), "here,same", prompt=PROMPT, load=LoadOptions(threads=1, ctx_size=CONTEXT))
    rows, problems = forecasts(str(path), own, Network(max(delay, 1e-6), 100e9), (0, first) if first else (), fastest)
    assert len(rows) == 2, problems
    return rows[0], rows[1]


def shown(row: Row) -> dict[str, float]:
    return {str(count): rate for count, rate in row.tokens_per_second.items()} | {"first token": row.first_token}


def chosen_cut(path: Path) -> tuple[int, int]:
    """Return the first layer of the second stage that `--stages 2` chooses for two equal machines, and the layers."""
    with open_gguf(path) as file:
        _, plan, limits, _, _ = planned(file, CONTEXT)
        sizes = Sizes.of(plan, limits, F16_CACHE)
        placed = place(sizes, [Node("", 1 << 60, 1e10)] * 2, 0.0, 2)
        return placed.firsts[1], len(plan.starts) - 1


def run(path: Path, given: argparse.Namespace) -> dict[str, Any]:
    counts = [int(each) for each in given.sequences.split(",")]
    delays = [float(each) / 1000 for each in given.delays.split(",")]
    most, (chosen, layers) = max(counts), chosen_cut(path)
    cuts = [int(each) for each in given.cuts.split(",")] if given.cuts else [chosen]
    times: dict[str, list[dict[str, float]]] = {}
    fastest = Fastest(), Fastest()

    def one(name: str, threads: int, split: Halves | None) -> None:
        forecast(path, fastest)  # here only measures, at this moment of the run
        with opened(path, threads, split, most) as scheduler:
            times.setdefault(name, []).append(measure(scheduler, counts))

    for _ in range(given.rounds):
        one("one process, 1 thread", 1, None)
        one("one process, 2 threads", 2, None)
        for first in cuts:
            of = f" ({first} and {layers - first} layers)" if len(cuts) > 1 else ""
            one(f"two stages{of}", 1, Halves(None, first))
            for delay in delays:
                with relays(delay) as between:
                    one(f"two stages{of}, {1000 * delay:g} ms", 1, Halves(between, first))
        with replicated(path, most) as scheduler:
            times.setdefault("two replicas", []).append(measure(scheduler, counts))
        if given.llama_batched_bench is not None:
            second = layers - cuts[0] + 1  # llama.cpp counts the output as one more layer
            rows: list[tuple[str, float | None]] = [("llama.cpp, 1 thread", None), ("llama.cpp, RPC", 0.0)]
            rows += [(f"llama.cpp, RPC, {1000 * delay:g} ms", delay) for delay in delays]
            for name, late in rows:
                found = peer(given.llama_batched_bench, given.rpc_server, path, counts, late, second)
                times.setdefault(name, []).append(found)
    times["forecast, one process"] = [shown(forecast(path, fastest)[0])]
    for first, delay in product(cuts, delays):
        of = f" ({first} and {layers - first} layers)" if len(cuts) > 1 else ""
        times[f"forecast{of}, {1000 * delay:g} ms"] = [shown(forecast(path, fastest, delay, first)[1])]
    middle: Callable[[str, str], float] = lambda name, key: round(median(each[key] for each in times[name]), 3)  # noqa: E731
    return {
        "model": path.name, "cuts": cuts, "layers": layers, "rounds": given.rounds,
        "rows": {name: {key: middle(name, key) for key in found[0]} for name, found in times.items()},
    }  # fmt: skip


def wait(milliseconds: float, given: argparse.Namespace) -> dict[str, Any]:
    """Measure stages that wait instead of computing, with the forecast for them."""
    counts = [int(each) for each in given.sequences.split(",")]
    delays = [float(each) / 1000 for each in given.delays.split(",")]
    most, half = max(counts), milliseconds / 2000
    times: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = KIT["llama-gqa"].write(Path(folder) / "tiny.gguf")

        def one(name: str, split: Halves | None, delay: float = 0.0) -> None:
            with opened(path, 1, split, most, 2 * half) as scheduler:
                answer(scheduler, 1, SHORT, 4)
                found = {}
                for count in counts:
                    begins = answer(scheduler, count, SHORT, ANSWER)
                    found[str(count)] = rate_of(begins)
                times.setdefault(name, []).append(found)
            stages = (
                [StageSpeed(lambda rows: half, lambda rows: 0.0, 512)] * 2
                if split
                else [StageSpeed(lambda rows: 2 * half, lambda rows: 0.0, 0)]
            )
            said = {str(n): tokens_per_second(stages, Network(delay), n) for n in counts}
            times.setdefault(f"forecast, {name}", []).append(said)

        for _ in range(given.rounds):
            one("one process", None)
            one("two stages", Halves(None, pause=half))
            for delay in delays:
                with relays(delay) as between:
                    one(f"two stages, {1000 * delay:g} ms", Halves(between, pause=half), delay)
    rows = {
        name: {key: round(median(each[key] for each in found), 2) for key in found[0]} for name, found in times.items()
    }
    off = max(
        abs(rows[f"forecast, {name}"][key] / rows[name][key] - 1)
        for name in rows
        if f"forecast, {name}" in rows
        for key in rows[name]
    )
    return {
        "model": f"steps of {milliseconds:g} ms that wait", "rounds": given.rounds, "rows": rows,
        "two streams / one, two stages": round(rows["two stages"]["2"] / rows["two stages"]["1"], 2),
        "largest error of a forecast": round(off, 3),
    }  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the Markdown for docs/machines.md: the newest row of each model."""
    newest = {row["model"].removesuffix(".gguf"): row for row in rows}
    lines: list[str] = []
    for model, row in newest.items():
        keys = list(dict.fromkeys(key for each in row["rows"].values() for key in each))
        shown = [f"{key} stream{'s' * (key != '1')}" if key.isdecimal() else f"{key}, s" for key in keys]
        lines += ["", f"**{model}**", "", "| tokens/s | " + " | ".join(shown) + " |", "|---|" + "---:|" * len(keys)]
        for name, found in row["rows"].items():
            cells = (
                "" if key not in found else f"{found[key]:.1f}" if key.isdecimal() else f"{found[key]:.2f}"
                for key in keys
            )
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--delays", default="0.2,1,5", help="milliseconds")
    parser.add_argument("--sequences", default="1,2,4,8")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cuts", default="", help="first layers of the second stage")
    parser.add_argument("--llama-batched-bench", type=Path)
    parser.add_argument("--rpc-server", type=Path)
    parser.add_argument("--waiting", type=float, default=0.0, metavar="MS")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if given.table:
        print(table([json.loads(line) for line in STORED.read_text(encoding="utf-8").splitlines()]))
        return
    jobs: list[Callable[[], dict[str, Any]]] = [partial(run, path, given) for path in given.models]
    jobs += [partial(wait, given.waiting, given)] if given.waiting else []
    for job in jobs:
        found = job()
        print(json.dumps(found, indent=1))
        line = {"when": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine(), **found}
        with STORED.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()

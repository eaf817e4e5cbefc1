"""Time decode next to busy processes: localllm, which chooses its number of threads, against fixed numbers of threads.

    python benchmarks/neighbours.py MODEL.gguf ... --llama-bench PATH [--busy 0,1,2,4] [--rounds 5]
    python benchmarks/neighbours.py --table

A neighbour is a Python process in an endless loop, at normal priority, on any core. A round times localllm as it is,
localllm with one thread and with all threads in every step, and llama-bench with one thread and with all. The parts of
localllm alternate in slices, so that a change of the machine's other load meets all of them. One JSON line per model
and number of neighbours goes to benchmarks/results/neighbours.jsonl, with every sample and the load averages.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter, sleep

from compare import LLAMA_CPP_BENCH, RESULTS, ROOT, machine, run

sys.path.insert(0, str(ROOT))

import localllm
from localllm.backends.cpu.adaptive import AdaptiveThreads
from localllm.backends.cpu.backend import CpuExecutable
from localllm.loading.resolve import resolve

DEPTH, TOKENS = 16, 64  # context depth at the start, and tokens decoded before a restart
LEAST = 4  # tokens of a peer that hardly moves
BUSY = "while True: pass"


class Fixed(AdaptiveThreads):
    """The same number of threads in every step."""

    def observe(self, kind: Hashable, seconds: float, late: float) -> None:
        """Change nothing."""


@dataclass(slots=True)
class Cell:
    """All samples of one model and number of busy neighbours, in tokens/s, one per round."""

    model: str
    threads: int
    busy: int
    adaptive: list[float] = field(default_factory=list)
    one: list[float] = field(default_factory=list)  # localllm with one thread
    all: list[float] = field(default_factory=list)  # localllm with all threads
    peer_one: list[float] = field(default_factory=list)
    peer_all: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)  # load average of the last minute before each round
    peer: str = ""
    device: str = ""


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Context manager that keeps `count` busy processes running."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        sleep(0.3 * (count > 0))  # wait until the processes have started
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def decode(session: localllm.Session, seconds: float) -> tuple[int, float]:
    """Decode for some seconds and return the number of tokens and the seconds."""
    tokens, began = 0, perf_counter()
    while perf_counter() - began < seconds:
        if session.length == DEPTH + TOKENS:
            session.rewind(DEPTH)
        session.evaluate((tokens % 7 + 1,), logits=False)
        tokens += 1
    return tokens, perf_counter() - began


def in_slices(model: localllm.Model, session: localllm.Session, cell: Cell, seconds: float, slices: int) -> None:
    """Add a sample of each way to choose threads, each of some seconds in total."""
    executable = model.executable
    assert isinstance(executable, CpuExecutable)
    adaptive, parts = executable.thread_counts, (cell.adaptive, cell.one, cell.all)
    totals = [[0, 0.0] for _ in parts]
    for _ in range(slices):
        for total, threads in zip(totals, (0, 1, cell.threads), strict=True):
            executable.thread_counts = (Fixed(threads), Fixed(threads)) if threads else adaptive
            tokens, took = decode(session, seconds / slices)
            total[0] += tokens
            total[1] += took
    executable.thread_counts = adaptive
    for rates, (tokens, took) in zip(parts, totals, strict=True):
        rates.append(tokens / took)


def peer(cell: Cell, path: Path, bench: Sequence[str], seconds: float) -> None:
    """Add llama-bench's decode speeds, with tokens for about `seconds` at the slower speed of both programs."""
    for threads, ours, rates in ((1, cell.one, cell.peer_one), (cell.threads, cell.all, cell.peer_all)):
        most = seconds * min(ours[-1], rates[-1]) if rates else LEAST
        tokens, repetitions = max(LEAST, min(TOKENS, round(most))), max(1, round(most / TOKENS))
        options = ["-p", "0", "-n", str(tokens), "-d", str(DEPTH), "-r", str(repetitions), "-o", "json", "--no-warmup"]
        result, _, _ = run([*bench, "-m", str(path), "-t", str(threads), *options])
        rates.append(result["avg_ts"])
        cell.peer = f"llama.cpp {result['build_commit']}"


def measure(
    path: Path, counts: Sequence[int], bench: Sequence[str], rounds: int, peers: int, seconds: float, slices: int
) -> list[Cell]:
    """Return a cell for each number of busy neighbours. The peer runs in the first `peers` rounds."""
    name = path.name.removesuffix(".gguf")
    with localllm.load(path, backend="cpu", ctx_size=512) as model:
        assert isinstance(model.executable, CpuExecutable)
        threads, session = model.executable.pool.threads, model.session()
        cells = [Cell(name, threads, busy, device=model.device) for busy in counts]
        session.evaluate([1] * DEPTH, logits=False)
        decode(session, 0.2)
        for number in range(rounds):
            for cell in cells:
                cell.load.append(os.getloadavg()[0])
                with neighbours(cell.busy):
                    in_slices(model, session, cell, seconds, slices)
                    if bench and number < peers:
                        peer(cell, path, bench, seconds)
                rates = (cell.adaptive, cell.one, cell.all, cell.peer_one, cell.peer_all)
                shown = " : ".join(f"{each[-1]:.1f}" for each in rates if each)
                print(f"round {number + 1}: {name} beside {cell.busy}: {shown}", file=sys.stderr)
        session.close()
    return cells


ROWS = {
    "localllm": "adaptive",
    "localllm, 1 thread": "one",
    "localllm, all threads": "all",
    "llama.cpp -t 1": "peer_one",
    "llama.cpp, all threads": "peer_all",
}


def table(cells: Sequence[Cell]) -> str:
    """Return the Markdown for docs/speed.md: one table per device, with the medians of the rounds."""
    parts = []
    for device in dict.fromkeys(cell.device for cell in cells):
        here = [cell for cell in cells if cell.device == device]
        counts = sorted({cell.busy for cell in here})
        titles = ["alone" if busy == 0 else f"with {busy} busy" for busy in counts]
        lines = [f"**{device}**", "", f"| model | program | {' | '.join(titles)} |"]
        lines.append(f"|---|---|{'---:|' * len(titles)}")
        for model in dict.fromkeys(cell.model for cell in here):
            found = {cell.busy: cell for cell in here if cell.model == model}
            for title, which in ROWS.items():
                rates = [getattr(found[busy], which) if busy in found else [] for busy in counts]
                shown = " | ".join(f"{median(each):.1f}" if each else "-" for each in rates)
                lines.append(f"| {model} | {title} | {shown} |")
            shown = " | ".join(f"{share(found[busy]):.2f}" if busy in found else "-" for busy in counts)
            lines.append(f"| {model} | share of the better number | {shown} |")
            loads = [found[busy].load if busy in found else [] for busy in counts]
            shown = " | ".join(f"{min(each):.0f} to {max(each):.0f}" if each else "-" for each in loads)
            lines.append(f"| {model} | load average before the rounds | {shown} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def share(cell: Cell) -> float:
    """Return localllm's speed divided by the better fixed number of threads, by medians."""
    return median(cell.adaptive) / max(median(cell.one), median(cell.all))


def stored(path: Path) -> list[Cell]:
    """Return the newest cell of every device, model and neighbour count, in the order first measured."""
    names = {f.name for f in fields(Cell)}
    cells: dict[tuple[str, str, int], Cell] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        cell = Cell(**{key: value for key, value in json.loads(line).items() if key in names})
        cells[cell.device, cell.model, cell.busy] = cell
    return list(cells.values())


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help='files, or "demo"')
    parser.add_argument("--llama-bench", type=Path, help="the peer [llama-cpp-python]")
    parser.add_argument("--alone", action="store_true", help="without a peer")
    parser.add_argument("--table", action="store_true", help="print the stored results: the table of docs/speed.md")
    parser.add_argument("--busy", type=numbers, default=[0, 1, 2, 4], help="numbers of busy processes [0,1,2,4]")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer-rounds", type=int, default=0, help="rounds with the peer (0: all)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each part of a round")
    parser.add_argument("--slices", type=int, default=3, help="slices of each part of localllm")
    parser.add_argument("--out", type=Path, default=RESULTS / "neighbours.jsonl", help="JSON lines are appended here")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(stored(arguments.out)))
        return
    if not arguments.models:
        parser.error("give a model, or --table")
    bench = [str(arguments.llama_bench)] if arguments.llama_bench else [sys.executable, str(LLAMA_CPP_BENCH)]
    everything = []
    for name in arguments.models:
        cells = measure(
            Path(resolve(name)), arguments.busy, [] if arguments.alone else bench, arguments.rounds,
            arguments.peer_rounds or arguments.rounds, arguments.seconds, arguments.slices,
        )  # fmt: skip
        everything += cells
        with arguments.out.open("a") as file:
            for cell in cells:
                when = datetime.now(UTC).isoformat(timespec="seconds")
                file.write(json.dumps({"when": when, **asdict(cell), "machine": machine()}) + "\n")
    print(table(everything))


if __name__ == "__main__":
    main()

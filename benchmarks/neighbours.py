"""Time decode next to busy processes: localllm with and without sleeping at barriers, in alternation with llama-bench.

    python benchmarks/neighbours.py MODEL.gguf ... [--llama-bench PATH] [-t 1,2] [--busy 0,1,2] [--rounds 3]
    python benchmarks/neighbours.py --table

A neighbour is a Python process in an endless loop, at normal priority, on any core. A round times localllm as it is (a
thread that waits longer than some 50 microseconds sleeps), localllm with threads that only spin, then llama-bench.
Every part takes some seconds. One JSON line per model, number of threads and number of neighbours goes to
benchmarks/results/neighbours.jsonl, with every sample.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter, sleep

from compare import LLAMA_CPP_BENCH, RESULTS, ROOT, machine, run

sys.path.insert(0, str(ROOT))

import localllm
from localllm.backends.cpu.backend import CpuExecutable
from localllm.backends.cpu.kernels import executor
from localllm.loading.resolve import resolve

FOREVER = 1 << 60  # spin limit with which threads never sleep at a barrier
DEPTH, TOKENS = 16, 64  # context depth at the start, and tokens decoded before a restart
BUSY = "while True: pass"


@dataclass(slots=True)
class Cell:
    """All samples of one model, number of threads and number of busy neighbours, in tokens/s, one per round."""

    model: str
    threads: int
    busy: int
    sleeping: list[float] = field(default_factory=list)
    spinning: list[float] = field(default_factory=list)
    llama_cpp: list[float] = field(default_factory=list)
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


def decode(session: localllm.Session, seconds: float) -> float:
    """Decode for some seconds and return the tokens/s."""
    tokens, began = 0, perf_counter()
    while perf_counter() - began < seconds:
        if session.length == DEPTH + TOKENS:
            session.rewind(DEPTH)
        session.evaluate((tokens % 7 + 1,), logits=False)
        tokens += 1
    return tokens / (perf_counter() - began)


def peer(cell: Cell, path: Path, bench: Sequence[str], seconds: float) -> None:
    """Add llama-bench's decode speed, with the number of repetitions that takes about `seconds` at our speed."""
    repetitions = max(1, round(seconds * cell.sleeping[-1] / TOKENS))
    options = ["-p", "0", "-n", str(TOKENS), "-d", str(DEPTH), "-r", str(repetitions), "-o", "json"]
    [result], _ = run([*bench, "-m", str(path), "-t", str(cell.threads), *options])
    cell.llama_cpp.append(result["avg_ts"])
    cell.peer = f"llama.cpp {result['build_commit']}"


def measure(
    path: Path, threads: int, counts: Sequence[int], bench: Sequence[str], rounds: int, seconds: float
) -> list[Cell]:
    """Return a cell for each number of busy neighbours."""
    name = path.name.removesuffix(".gguf")
    with localllm.load(path, threads=threads, backend="cpu", ctx_size=512) as model:
        assert isinstance(model.executable, CpuExecutable)
        pool, session = model.executable.pool, model.session()
        cells = [Cell(name, threads, busy, device=model.device) for busy in counts]
        session.evaluate([1] * DEPTH, logits=False)
        decode(session, 0.2)
        for number in range(rounds):
            for cell in cells:
                with neighbours(cell.busy):
                    pool.spins = executor.SPINS
                    cell.sleeping.append(decode(session, seconds))
                    if threads > 1:
                        pool.spins = FOREVER
                        cell.spinning.append(decode(session, seconds))
                    if bench:
                        peer(cell, path, bench, seconds)
                shown = [f"{rates[-1]:.1f}" for rates in (cell.sleeping, cell.spinning, cell.llama_cpp) if rates]
                told = f"round {number + 1}: {name} -t {threads} beside {cell.busy}: {' : '.join(shown)}"
                print(told, file=sys.stderr)
        session.close()
    return cells


def table(cells: Sequence[Cell]) -> str:
    """Return the Markdown for docs/speed.md: one table per device, one line per model and number of threads."""
    parts = []
    for device in dict.fromkeys(_chip(cell) for cell in cells):
        here = [cell for cell in cells if _chip(cell) == device]
        counts = sorted({cell.busy for cell in here})
        titles = ["alone" if busy == 0 else f"with {busy} busy" for busy in counts]
        lines = [
            f"**{device}**",
            "",
            f"| model | threads | {' | '.join(titles)} |",
            f"|---|{'---:|' * (len(titles) + 1)}",
        ]
        for model, threads in dict.fromkeys((cell.model, cell.threads) for cell in here):
            found = {cell.busy: cell for cell in here if (cell.model, cell.threads) == (model, threads)}
            shown = [_shown(found[busy]) if busy in found else "" for busy in counts]
            lines.append(f"| {model} | {threads} | {' | '.join(shown)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _chip(cell: Cell) -> str:
    """Return the cell's device without its number of threads."""
    return cell.device.rpartition(", ")[0]


def _shown(cell: Cell) -> str:
    rates = [f"{median(rates):.1f}" if rates else "-" for rates in (cell.sleeping, cell.spinning, cell.llama_cpp)]
    return " : ".join(rates)


def stored(path: Path) -> list[Cell]:
    """Return the newest cell of every device, model, thread count and neighbour count, in the order first measured."""
    names = {f.name for f in fields(Cell)}
    cells: dict[tuple[str, str, int, int], Cell] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        cell = Cell(**{key: value for key, value in json.loads(line).items() if key in names})
        cells[cell.device, cell.model, cell.threads, cell.busy] = cell
    return list(cells.values())


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help='files, or "demo"')
    parser.add_argument("--llama-bench", type=Path, help="the peer [llama-cpp-python]")
    parser.add_argument("--alone", action="store_true", help="without a peer")
    parser.add_argument("--table", action="store_true", help="print the stored results: the table of docs/speed.md")
    parser.add_argument("-t", "--threads", type=numbers, default=[1, 2])
    parser.add_argument("--busy", type=numbers, default=[0, 1, 2], help="numbers of busy processes [0,1,2]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each part of a round")
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
        for threads in arguments.threads:
            cells = measure(
                Path(resolve(name)), threads, arguments.busy, [] if arguments.alone else bench, arguments.rounds,
                arguments.seconds,
            )  # fmt: skip
            everything += cells
            with arguments.out.open("a") as file:
                for cell in cells:
                    when = datetime.now(UTC).isoformat(timespec="seconds")
                    file.write(json.dumps({"when": when, **asdict(cell), "machine": machine()}) + "\n")
    print(table(everything))


if __name__ == "__main__":
    main()

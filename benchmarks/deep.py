"""Time sparse attention at large context depths, in decode and prefill, in alternation with llama.cpp on the same GGUF.

    python benchmarks/deep.py [--models deepseek32,glm-dsa,minimax-m3,deepseek4] [--rounds 2] [-t 2]
    [--tests tg32@16384,pp512@16384,tg32@65536,pp128@65536]
    python benchmarks/deep.py --table

`sparse_shapes.py` defines the models, which are written to --folder if missing. The peer is llama-cpp-python
(`llama_cpp_bench.py`); LLAMA_CPP_LIB_PATH chooses its library. Both programs fill the KV cache with copies of the cache
rows of 512 tokens, because a whole prompt would take the peer hours. --whole evaluates the whole prompt instead. The
pools in the peer's state of DeepSeek 4 cannot be copied, so this model is measured after whole prompts. Beyond 16384
tokens, which take the peer at least a quarter of an hour, only localllm is measured, after copies. The table says how
the cache was filled.

For every test in turn, a round times localllm, the peer with flash attention, and the peer without it, each in a
separate process. A ratio is the median over rounds of our speed / the peer's best speed. A mode of the peer that took
over twice as long as the other in the first round is skipped in later rounds, and in the same test after longer whole
prompts. One JSON line per model and test goes to benchmarks/results/deep.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from compare import LLAMA_CPP_BENCH, RESULTS, ROOT, Test, machine, run

sys.path.insert(0, str(ROOT))

import localllm
from benchmarks.shapes import write
from benchmarks.sparse_shapes import SPARSE
from localllm.plan import BLOCK, Batch

TESTS = "tg32@16384,pp512@16384,tg32@65536,pp128@65536"
WHOLE = ("deepseek4",)  # models whose cache rows cannot be copied in the peer
WHOLE_TESTS, WHOLE_DEPTH = f"tg32@4096,pp512@4096,{TESTS}", 16384  # tests for WHOLE, and the peer's maximum depth
COPIED = 512  # tokens whose cache rows are copied to fill the cache
FLASH = {"flash": "1", "plain": "0"}
HOPELESS = 2.0
PHYSICAL_BATCH = (
    128  # physical batch of a decoding peer: without flash attention it allocates scores for this number of rows
)


@dataclass(slots=True)
class Row:
    """All samples of one model and test, in tokens/s, one per round."""

    model: str
    test: str
    threads: int
    device: str = ""
    peer: str = ""
    whole: bool = False  # whether the cache was filled by a whole prompt
    alone: bool = False  # whether the peer was not measured
    ours: list[float] = field(default_factory=list)
    flash: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    weights_per_token: int = 0  # bytes of matrices read per decoded token
    cache_per_token: int = 0  # cache bytes read per decoded token: index keys and selected rows
    every_key: int = 0  # cache bytes that full attention would read

    @property
    def best(self) -> list[float]:
        """Return the speed of the peer's faster mode in every round."""
        ways = (self.flash, self.plain)
        if self.alone:
            return []
        return [max(rates[number] for rates in ways if len(rates) > number) for number in range(len(self.ours))]

    @property
    def ratio(self) -> float | None:
        if self.alone:
            return None
        return median(ours / peer for ours, peer in zip(self.ours, self.best, strict=True))


def ours(path: Path, test: Test, threads: int, whole: bool) -> dict[str, Any]:
    """Time one test of localllm, in the child process."""
    prompt, answer, depth = test.prompt, test.answer, test.depth
    room = depth + prompt + answer + BLOCK
    with localllm.load(path, threads=threads, ctx_size=room) as model:
        executable, memory = model.executable, model.executable.memory
        table, ring = np.arange(-(-room // BLOCK), dtype=np.int32)[None], executable.limits.window_blocks
        windows = table % np.int32(ring) if ring else None  # the cache blocks of sliding-window layers, used cyclically
        random = np.random.default_rng(0)

        def step(first: int, count: int) -> None:
            at, tokens = np.arange(first, first + count, dtype=np.int32), random.integers(0, 256, count, np.int32)
            slots = None if windows is None else windows[0][at // BLOCK] * BLOCK + at % BLOCK
            rows = (tokens, at, at.copy(), np.zeros_like(at), table, np.array([count - 1], np.int32))
            executable.step(Batch(*rows, slots, windows))

        for first in range(0, depth if whole else COPIED, COPIED):
            step(first, COPIED)
        source = np.arange(COPIED // BLOCK, dtype=np.int32)
        for block in range(len(source), depth // BLOCK if not whole else 0, len(source)):
            executable.copy_blocks(source, source + block)
        for block in range(len(source), ring if not whole else 0):
            executable.copy_blocks(source[:1], np.array([block], np.int32), True)
        step(depth, 1)  # warm-up
        began = perf_counter()
        if prompt:
            step(depth, prompt)
        for number in range(answer):
            step(depth + number, 1)
        return {
            "avg_ts": (prompt + answer) / (perf_counter() - began),
            "weights_per_token": memory.weights_per_token,
            "cache_per_token": round(memory.read_after(depth)) - memory.weights_per_token,
            "every_key": memory.selected_per_token * depth,
            "device": model.device,
        }


def row_of(model: str, test: str, threads: int, whole: bool) -> Row:
    """Return a result row without samples. `whole` says whether whole prompts are requested."""
    near = Test.parse(test).depth <= WHOLE_DEPTH
    return Row(
        model, test, threads, whole=whole or (model in WHOLE and near), alone=model in WHOLE and not near and not whole
    )


def hopeless(row: Row, name: str) -> bool:
    """Return whether a mode of the peer was far slower than the other mode in the first round."""
    first = {way: getattr(row, way)[:1] for way in FLASH}
    return all(first.values()) and HOPELESS * first[name][0] < max(rates[0] for rates in first.values())


def measure(row: Row, path: Path, number: int, before: Sequence[Row] = ()) -> None:
    """Add one round to the row. `before` holds the rows of this model that were measured earlier."""
    own = [sys.executable, __file__, "--ours", str(path), "--tests", row.test, "-t", str(row.threads)]
    result, _, _ = run([*own, *["--whole"] * row.whole])
    row.ours.append(result["avg_ts"])
    for name in ("weights_per_token", "cache_per_token", "every_key", "device"):
        setattr(row, name, result[name])
    test = Test.parse(row.test)
    peer = [sys.executable, str(LLAMA_CPP_BENCH), "-m", str(path), "-t", str(row.threads), *test.options()]
    peer += ["-ub", str(test.prompt or PHYSICAL_BATCH), *["--copies"] * (not row.whole)]
    shown = [f"ours {row.ours[-1]:.2f}"]
    for name, flag in FLASH.items() if not row.alone else ():
        rates: list[float] = getattr(row, name)
        shorter = [
            other for other in before if row.whole and other.test.partition("@")[0] == row.test.partition("@")[0]
        ]
        if (number and not rates) or any(hopeless(other, name) for other in [row, *shorter]):
            continue
        result, _, _ = run([*peer, "-fa", flag])
        rates.append(result["avg_ts"])
        row.peer = f"llama.cpp {result['build_commit']}"
        shown.append(f"{name} {rates[-1]:.2f}")
    print(f"round {number + 1}: {row.model} {row.test} {', '.join(shown)}", file=sys.stderr, flush=True)


def table(rows: Sequence[Row]) -> str:
    """Return the Markdown for docs/architectures.md."""
    lines = ["| model | test | filled by | localllm, t/s | llama.cpp, t/s | ratio | cache read, MB | every key, MB |"]
    lines.append("|---|---|---|---:|---:|---:|---:|---:|")
    for row in rows:
        read = [
            f"{size / 1e6:.1f}" if row.test.startswith("tg") and size else ""
            for size in (row.cache_per_token, 0 if row.model in WHOLE else row.every_key)  # pools: distant positions
        ]
        rates = [f"{median(rates):.1f}" if rates else "" for rates in (row.ours, row.best)]
        rates.append("" if row.ratio is None else f"{row.ratio:.1f}")
        filled = "prompt" if row.whole else "copies"
        lines.append(f"| {row.model} | {row.test} | {filled} | {' | '.join([*rates, *read])} |")
    return "\n".join(lines)


def stored(path: Path = RESULTS / "deep.jsonl") -> list[Row]:
    """Return the newest result row of every model and test, in the order first measured."""
    names = {f.name for f in fields(Row)}
    rows: dict[tuple[str, str], Row] = {}
    for line in path.read_text().splitlines():
        row = Row(**{k: v for k, v in json.loads(line).items() if k in names})
        rows[row.model, row.test] = row
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SPARSE))
    parser.add_argument("--tests", default="", help=f"as in compare.py, at depths that 512 divides; default: {TESTS}")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="where the models are written")
    parser.add_argument("--whole", action="store_true", help="fill the cache by whole prompts")
    parser.add_argument("--note", default="", help="kept with the results")
    parser.add_argument("--table", action="store_true", help="print the stored results")
    parser.add_argument("--out", type=Path, default=RESULTS / "deep.jsonl", help="JSON lines are appended here")
    parser.add_argument("--ours", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.table:
        print(table(stored(arguments.out)))
        return
    if arguments.ours:
        print(json.dumps([ours(arguments.ours, Test.parse(arguments.tests), arguments.threads, arguments.whole)]))
        return
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    everything = []
    for name in arguments.models.split(","):
        path = arguments.folder / f"{name}-attention.gguf"
        if not path.exists():
            write(name, SPARSE[name], path)
        tests = (arguments.tests or (WHOLE_TESTS if name in WHOLE else TESTS)).split(",")
        rows = [row_of(name, test, arguments.threads, arguments.whole) for test in tests]
        for number in range(arguments.rounds):
            for at, row in enumerate(rows):
                measure(row, path, number, rows[:at])
        everything += rows
        with arguments.out.open("a") as file:
            for row in rows:
                when = datetime.now(UTC).isoformat(timespec="seconds")
                extra = {"ratio": row.ratio, "machine": machine(), "commit": commit, "note": arguments.note}
                file.write(json.dumps({"when": when, **asdict(row), **extra}) + "\n")
    print(table(everything))


if __name__ == "__main__":
    main()

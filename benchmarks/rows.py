"""Time products of 1 to 8 rows of activations, which share one read of the weights, against one row.

    python benchmarks/rows.py [--formats Q4_0,Q4_K] [--rows 1,2,4,8] [-t 1] [--seconds 4]
    python benchmarks/rows.py --table

The weights are several times larger than any cache. The numbers of rows alternate, and each keeps its shortest time.
`bound` is the time that the busiest pipe of Zen 4 needs at least (`ports.py`), or the time to read the weights if that
is longer. One JSON line per format goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from compare import RESULTS, machine
from kernels import BATCH, COLUMNS, Random, batch
from ports import bound, counted, mat_mul

from localllm.backends.base import Limits
from localllm.backends.cpu import jit
from localllm.backends.cpu.backend import CpuBackend
from localllm.backends.cpu.isa import Isa
from localllm.backends.cpu.kernels import linear
from localllm.backends.cpu.unpack import INTEGER_PANELS
from localllm.plan import BLOCK, Recorder

ROWS = 1 << 17  # rows of the matrix; with fewer, a large L3 cache holds a good part of it between two passes
GOALS = {2: 1.15, 3: 1.2, 4: 1.3, 6: 1.5, 8: 1.7}  # times one row, where memory limits


def passes(isa: Isa, name: str, rows: int) -> list[int]:
    """Return the rows of each pass over the weights."""
    sizes: list[int] = []
    most = linear.rows_per_pass(isa, INTEGER_PANELS[name])
    while rows:
        left = -(-rows // most)
        sizes.append(-(-rows // left))
        rows -= sizes[-1]
    return sizes


def port_cycles(isa: Isa, name: str, rows: int) -> float:
    """Return the least cycles per 64 weights that the pipes of Zen 4 need for all passes, or 0 without 512 bits."""
    total = 0.0
    if isa.dot != "vnni512":
        return total
    for size in passes(isa, name, rows):
        slots, loads, products = counted(jit.assembly(mat_mul(name, size), isa))
        total += bound(slots, loads) / (products / size)
    return total


def measure(name: str, counts: list[int], threads: int, seconds: float, gigahertz: float) -> dict[str, Any]:
    backend = CpuBackend(threads)
    recorder = Recorder()
    x = recorder.embed(Random("e", "F32", BATCH))
    plan = recorder.finish(recorder.linear(x, Random("w", name, ROWS)))
    executable = backend.bind(plan, Limits(BATCH, BATCH, BATCH // BLOCK, BATCH))
    steps = {rows: batch(rows) for rows in counts}
    clock = process_time if threads == 1 else perf_counter  # other programs may take the processor in every turn
    best, roof = dict.fromkeys(counts, float("inf")), 0.0
    end = perf_counter() + seconds
    while perf_counter() < end:
        roof = max(roof, executable.read_bandwidth())
        for _ in range(5):
            for rows, step in steps.items():
                start = clock()
                executable.step(step)
                best[rows] = min(best[rows], clock() - start)
    size = executable.memory.weights_per_token
    isa = backend.library.isa
    cycles = {rows: port_cycles(isa, name, rows) for rows in counts}
    executable.close()
    backend.close()
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "format": name,
        "isa": f"{isa.cpu}, {isa.name}",
        "shape": [ROWS, COLUMNS],
        "threads": threads,
        "roof_gb_per_s": round(roof / 1e9, 2),
        "load_average": round(os.getloadavg()[0], 1),
        "ms": {rows: round(best[rows] * 1e3, 4) for rows in counts},
        "ratio": {rows: round(best[rows] / best[counts[0]], 3) for rows in counts},
        "port_cycles_per_64": {rows: round(cycles[rows], 3) for rows in counts},
        "bound_ms": {
            rows: round(max(size / roof, cycles[rows] * ROWS * COLUMNS / 64 / (gigahertz * 1e9) / threads) * 1e3, 4)
            for rows in counts
        },
        "machine": machine(),
    }


def stored(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def table(rows: list[dict[str, Any]]) -> str:
    """Return the Markdown for docs/speed.md: per instruction set, the newest row of each format and thread count."""
    parts = []
    for isa in dict.fromkeys(row["isa"] for row in rows):
        parts.append(f"**{isa}**\n\n{_table([row for row in rows if row['isa'] == isa])}")
    return "\n\n".join(parts)


def _table(rows: list[dict[str, Any]]) -> str:
    newest = {(row["threads"], row["format"]): row for row in rows}
    counts = sorted({int(count) for row in newest.values() for count in row["ms"]})
    lines = [
        f"| format | threads | GB/s | {' | '.join(f'{n} row' + 's' * (n > 1) for n in counts)} |",
        f"|---|---:|---:|{'---:|' * len(counts)}",
    ]
    for row in newest.values():
        one = row["ms"]["1"]
        cells = [
            f"{row['ms'][n]:.2f} ({row['ratio'][n]:.2f}; {row['bound_ms'][n] / one:.2f})" if n in row["ms"] else ""
            for n in map(str, counts)
        ]
        roof = f"{row['roof_gb_per_s']:.0f}"
        lines.append(f"| {row['format']} | {row['threads']} | {roof} | {' | '.join(cells)} |")
    goals = [f"{GOALS[n]:.2f}" if n in GOALS else "" for n in counts]
    return "\n".join([*lines, f"| goal |  |  | {' | '.join(goals)} |"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="Q4_0,Q4_K,Q6_K,Q8_0")
    parser.add_argument("--rows", default="1,2,3,4,6,8", help="numbers of rows; the first is compared with")
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--gigahertz", type=float, default=3.69)
    parser.add_argument("--out", type=Path, default=RESULTS / "rows.jsonl")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print(table(stored(options.out)))
        return
    counts = [int(rows) for rows in options.rows.split(",")]
    for name in options.formats.split(","):
        row = measure(name, counts, options.threads, options.seconds, options.gigahertz)
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

"""Time localllm and llama.cpp in alternation on the same GGUFs, threads and tests.

Store every sample and print the ratios.

    python benchmarks/compare.py --table
    python benchmarks/compare.py --summary
    python benchmarks/compare.py MODEL.gguf ... [--llama-bench PATH] [-t 2] [--rounds 3] [--tests pp512,tg128]

Without a path to llama-bench, the peer is the llama.cpp in the package llama-cpp-python (llama_cpp_bench.py).

The bandwidth of shared machines doubles and halves within minutes, so only alternating runs can be compared. A round
times localllm, then the peer with its defaults (weights repacked). Prompt tests also time the peer with --repack 0,
which never speeds up decode. A ratio is the median over rounds of our speed / the peer's best speed. One JSON line per
model and test goes to benchmarks/results/. With --cache-type both programs use that cache type, and the peer runs with
plain and with flash attention; only flash attention supports types other than F16.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
LLAMA_CPP_BENCH = ROOT / "benchmarks" / "llama_cpp_bench.py"
SUMMARY_DEVICE = "cpu: znver4, avx512-vnni, 2 threads"  # the device shown in the README
SUMMARY_MODELS = ("1b-Q4_0", "1b-Q4_K_M", "1b-Q8_0", "8b-Q4_K_M")


@dataclass(frozen=True, slots=True)
class Test:
    """A test by llama-bench's name: pp512, tg128, or tg32@4096 (decode 32 tokens at depth 4096)."""

    name: str
    prompt: int
    answer: int
    depth: int

    @staticmethod
    def parse(name: str) -> Test:
        what, _, depth = name.partition("@")
        count = int(what[2:])
        if what[:2] not in ("pp", "tg"):
            raise argparse.ArgumentTypeError(f"{name}: a test is ppN or tgN, with @DEPTH behind it if wanted")
        return Test(name, count if what[:2] == "pp" else 0, count if what[:2] == "tg" else 0, int(depth or 0))

    def options(self) -> list[str]:
        return ["-p", str(self.prompt), "-n", str(self.answer), "-d", str(self.depth), "-r", "1", "-o", "json"]


@dataclass(slots=True)
class Row:
    """All samples of one model and test, in tokens/s, one per round."""

    model: str
    test: str
    threads: int
    file_bytes: int = 0
    ours: list[float] = field(default_factory=list)
    peer_repacked: list[float] = field(default_factory=list)
    peer_plain: list[float] = field(default_factory=list)
    peer_flash: list[float] = field(default_factory=list)
    cache: str = ""  # cache type of keys and values, if given
    bytes_per_token: int = 0
    roof_gb_per_s: list[float] = field(default_factory=list)
    our_peak_bytes: int = 0
    peer_peak_bytes: int = 0
    peer: str = ""
    device: str = ""

    @property
    def label(self) -> str:
        return f"{self.test} {self.cache}".strip()

    @property
    def peers(self) -> list[list[float]]:
        return [rates for rates in (self.peer_repacked, self.peer_plain, self.peer_flash) if rates]

    @property
    def ratio(self) -> float:
        rounds = zip(self.ours, *self.peers, strict=True)
        return median(ours / max(peers) for ours, *peers in rounds)

    @property
    def roof_share(self) -> float:
        if not self.bytes_per_token:
            return 0.0
        pairs = zip(self.ours, self.roof_gb_per_s, strict=True)
        return median(rate * self.bytes_per_token / 1e9 / roof for rate, roof in pairs if roof)


def run(command: Sequence[str]) -> tuple[list[dict[str, Any]], int]:
    """Return the parsed JSON output and the peak resident memory in bytes of one process."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdout=out, stderr=errors, cwd=ROOT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        errors.seek(0)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)}: {errors.read().decode(errors='replace')[-2000:]}")
        return json.loads(out.read()), usage.ru_maxrss * 1024


def measure(
    model: Path, tests: Sequence[Test], bench: Sequence[str], threads: int, rounds: int, plain: bool,
    caches: Sequence[str],
) -> list[Row]:  # fmt: skip
    """Return the result rows of one model.

    `bench` is the path to the peer's program, which takes llama-bench's options.
    """
    rows = [Row(model.name, test.name, threads, model.stat().st_size, cache=c) for test in tests for c in caches]
    every = {test.name: test for test in tests}
    ours = [sys.executable, "-m", "localllm", "bench", str(model), "-t", str(threads)]
    peer = [*bench, "-m", str(model), "-t", str(threads)]
    for number in range(rounds):
        for row in rows:
            test, types = every[row.test], ["-ctk", row.cache, "-ctv", row.cache] if row.cache else []
            [result], peak = run([*ours, *types, *test.options()])
            row.ours.append(result["avg_ts"])
            row.bytes_per_token = result["bytes_per_token"]
            row.roof_gb_per_s.append(result["roof_gb_per_s"])
            row.our_peak_bytes, row.device = max(row.our_peak_bytes, peak), result["cpu_info"]
            ways = [(row.peer_repacked, ["-fa", "0"] if row.cache else [])] if row.cache in ("", "f16") else []
            if plain and test.prompt:
                ways.append((row.peer_plain, ["--repack", "0"]))
            if row.cache:
                ways.append((row.peer_flash, ["-fa", "1"]))
            for rates, way in ways:
                [result], peak = run([*peer, *types, *way, *test.options()])
                rates.append(result["avg_ts"])
                row.peer_peak_bytes = max(row.peer_peak_bytes, peak)
                build = f" (build {result['build_number']})" if result["build_number"] else ""
                row.peer = f"llama.cpp {result['build_commit']}{build}"
            peers = ", ".join(f"{rates[-1]:.1f}" for rates in row.peers)
            print(f"round {number + 1}: {model.name} {row.label} {row.ours[-1]:.1f} : {peers}", file=sys.stderr)
    return rows


def machine() -> dict[str, Any]:
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": model, "processors": os.cpu_count(), "memory_gib": round(memory / 2**30, 1)}


def table(rows: Sequence[Row]) -> str:
    """Return the Markdown for docs/speed.md: one table per device, one line per model."""
    parts = []
    for device in dict.fromkeys(row.device for row in rows):
        here = [row for row in rows if row.device == device]
        tests = list(dict.fromkeys(row.label for row in here))
        names = [f"{test} {what}" for test in tests for what in _columns(test)]
        lines = [f"**{device}**", "", f"| model | {' | '.join(names)} | memory, GB |"]
        lines.append(f"|---|{'---:|' * (len(names) + 1)}")
        for model in dict.fromkeys(row.model for row in here):
            found = {row.label: row for row in here if row.model == model}
            cells = [cell for test in tests for cell in _cells(test, found.get(test))]
            ours = max(row.our_peak_bytes for row in found.values()) / 1e9
            peer = max(row.peer_peak_bytes for row in found.values()) / 1e9
            lines.append(f"| {model.removesuffix('.gguf')} | {' | '.join(cells)} | {ours:.2f} : {peer:.2f} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def summary(rows: Sequence[Row]) -> str:
    """Return the Markdown for the README: a few models on one device."""
    columns = {"pp512": "prompt of 512", "tg128": "decoding 128", "tg32@4096": "decoding after 4096"}
    lines = [f"| model | {' | '.join(columns.values())} |", f"|---|{'---:|' * len(columns)}"]
    for model in SUMMARY_MODELS:
        found = {row.label: row for row in rows if (row.device, row.model) == (SUMMARY_DEVICE, f"{model}.gguf")}
        cells = [_cells(test, found.get(test))[:2] for test in columns]
        lines.append(f"| {model} | {' | '.join(f'{rates} (x{ratio})' for rates, ratio in cells)} |")
    return "\n".join(lines)


def _columns(test: str) -> list[str]:
    return ["t/s", "ratio"] + ["of roof"] * test.startswith("tg")


def _cells(test: str, row: Row | None) -> list[str]:
    """Return our speed, the peer's best speed, their ratio, and for decode our share of the memory bandwidth."""
    if row is None:
        return [""] * len(_columns(test))
    peer = max(median(rates) for rates in row.peers)
    share = [f"{row.roof_share:.0%}"] * test.startswith("tg")
    return [f"{median(row.ours):.1f} : {peer:.1f}", f"{row.ratio:.2f}", *share]


def stored(path: Path) -> list[Row]:
    """Return the newest result row of every device, model and test, in the order first measured."""
    names = {f.name for f in fields(Row)}
    rows: dict[tuple[str, str, str], Row] = {}
    for line in path.read_text().splitlines():
        values = json.loads(line)
        row = Row(**{k: v for k, v in values.items() if k in names})
        rows[row.device, row.model, row.label] = row
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="*")
    parser.add_argument("--llama-bench", type=Path, help="the peer [llama-cpp-python]")
    parser.add_argument("--table", action="store_true", help="print the stored results: the table of docs/speed.md")
    parser.add_argument("--summary", action="store_true", help="print the stored results: the table of the README")
    parser.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tests", default="pp512,tg128")
    parser.add_argument("--cache-type", default="", help="cache types to measure in turn, such as f16,q8_0")
    parser.add_argument("--no-plain", action="store_true", help="leave out the peer's run with --repack 0")
    parser.add_argument("--out", type=Path, default=RESULTS / "compare.jsonl", help="JSON lines are appended here")
    arguments = parser.parse_args()
    if arguments.table or arguments.summary:
        print((table if arguments.table else summary)(stored(arguments.out)))
        return
    if not arguments.models:
        parser.error("give a model, or --table")
    bench = [str(arguments.llama_bench)] if arguments.llama_bench else [sys.executable, str(LLAMA_CPP_BENCH)]
    tests = [Test.parse(name) for name in arguments.tests.split(",")]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    everything = []
    for model in arguments.models:
        rows = measure(
            model, tests, bench, arguments.threads, arguments.rounds, not arguments.no_plain,
            arguments.cache_type.split(","),
        )  # fmt: skip
        everything += rows
        with arguments.out.open("a") as file:
            for row in rows:
                extra = {"ratio": row.ratio, "roof_share": row.roof_share, "machine": machine(), "commit": commit}
                when = datetime.now(UTC).isoformat(timespec="seconds")
                file.write(json.dumps({"when": when, **asdict(row), **extra}) + "\n")
    print(table(everything))


if __name__ == "__main__":
    main()

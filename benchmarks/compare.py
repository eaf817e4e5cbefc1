"""Time localllm and llama.cpp in alternation on the same GGUFs, threads and tests.

Store every sample and print the ratios.

    python benchmarks/compare.py --table
    python benchmarks/compare.py --summary
    python benchmarks/compare.py --formats
    python benchmarks/compare.py MODEL.gguf ... [--llama-bench PATH] [-t 2] [--rounds 3] [--tests pp512,tg128]
    python benchmarks/compare.py FORMAT.gguf ... --llama-bench PATH --ik-llama-bench PATH -t 1 --tests tg32

Without a path to llama-bench, the peer is the llama.cpp in the package llama-cpp-python (llama_cpp_bench.py).

The bandwidth of shared machines doubles and halves within minutes, so only alternating runs can be compared. A round
times localllm, then the peer with its defaults (weights repacked). Prompt tests also time the peer with --repack 0,
which never speeds up decode. A ratio is the median over rounds of our speed / the peer's best speed. One JSON line per
model and test goes to benchmarks/results/. With --cache-type both programs use that cache type, and the peer runs with
plain and with flash attention; only flash attention supports types other than F16. With --ik-llama-bench, each round
also times ik_llama.cpp, without and with -rtr (weights repacked); --formats prints these results. With
--processor-time, tokens are counted per second of processor time, which other programs on a busy machine change little:
for the peers, the difference of a run and one with an eighth of the tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import process_time
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

    def options(self, depth: bool = True) -> list[str]:
        """Return the options of llama-bench. ik_llama.cpp's lacks the one for the depth."""
        assert depth or not self.depth
        deep = ["-d", str(self.depth)] if depth else []
        return ["-p", str(self.prompt), "-n", str(self.answer), *deep, "-r", "1", "-o", "json"]


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
    ik: list[float] = field(default_factory=list)  # ik_llama.cpp
    ik_repacked: list[float] = field(default_factory=list)
    cache: str = ""  # cache type of keys and values, if given
    weights: int = 0  # of all matrices; a tied embedding counts once
    bytes_per_token: int = 0
    roof_gb_per_s: list[float] = field(default_factory=list)
    our_peak_bytes: int = 0
    peer_peak_bytes: int = 0
    peer: str = ""
    ik_version: str = ""
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


def run(command: Sequence[str]) -> tuple[dict[str, Any], int, float]:
    """Return the result, the peak resident memory in bytes and the processor seconds of one process with one test."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdout=out, stderr=errors, cwd=ROOT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        errors.seek(0)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)}: {errors.read().decode(errors='replace')[-2000:]}")
        [result] = json.loads(out.read())
        return result, usage.ru_maxrss * 1024, usage.ru_utime + usage.ru_stime


def timed(command: Sequence[str], test: Test, processor: bool, depth: bool = True) -> tuple[dict[str, Any], int]:
    """Return the result and the peak memory of one test. With `processor`, the rate is per second of processor time:
    the difference of two runs.
    """
    result, peak, seconds = run([*command, *test.options(depth)])
    if processor:
        short = replace(test, answer=test.answer // 8)
        _, _, before = run([*command, *short.options(depth)])
        result["avg_ts"] = (test.answer - short.answer) / (seconds - before)
    return result, peak


def processor_rate(model: Path, threads: int, answer: int) -> float:
    """Return the decoded tokens of localllm per second of processor time. `bench` also measures the bandwidth."""
    import localllm
    from localllm.engine import SequenceRows

    with localllm.load(model, threads=threads, ctx_size=512) as loaded:
        sequence = loaded.engine.add()
        loaded.engine.step([SequenceRows(sequence, [0])])
        began = process_time()
        for token in range(answer):
            loaded.engine.step([SequenceRows(sequence, [token % 200])])
        return answer / (process_time() - began)


def matrix_weights(model: Path) -> int:
    """Return the number of weights of all matrices."""
    from localllm.gguf import open_gguf  # only here: scripts that import this module choose a localllm first

    with open_gguf(model) as file:
        return sum(math.prod(tensor.shape) for tensor in file.tensors.values() if len(tensor.shape) > 1)


def measure(
    model: Path, tests: Sequence[Test], bench: Sequence[str], ik: Path | None, threads: int, rounds: int, plain: bool,
    caches: Sequence[str], processor: bool = False,
) -> list[Row]:  # fmt: skip
    """Return the result rows of one model.

    `bench` is the path to the peer's program, which takes llama-bench's options. `ik` is the same of ik_llama.cpp.
    """
    size, weights = model.stat().st_size, matrix_weights(model)
    rows = [Row(model.name, test.name, threads, size, cache=c, weights=weights) for test in tests for c in caches]
    every = {test.name: test for test in tests}
    ours = [sys.executable, "-m", "localllm", "bench", str(model), "-t", str(threads)]
    peer = [*bench, "-m", str(model), "-t", str(threads)]
    for number in range(rounds):
        for row in rows:
            test, types = every[row.test], ["-ctk", row.cache, "-ctv", row.cache] if row.cache else []
            result, peak = timed([*ours, *types], test, False)
            row.ours.append(processor_rate(model, threads, test.answer) if processor else result["avg_ts"])
            row.bytes_per_token = result["bytes_per_token"]
            row.roof_gb_per_s.append(result["roof_gb_per_s"])
            row.our_peak_bytes, row.device = max(row.our_peak_bytes, peak), result["cpu_info"]
            ways = [(row.peer_repacked, ["-fa", "0"] if row.cache else [])] if row.cache in ("", "f16") else []
            if plain and test.prompt:
                ways.append((row.peer_plain, ["--repack", "0"]))
            if row.cache:
                ways.append((row.peer_flash, ["-fa", "1"]))
            for rates, way in ways:
                result, peak = timed([*peer, *types, *way], test, processor)
                rates.append(result["avg_ts"])
                row.peer_peak_bytes = max(row.peer_peak_bytes, peak)
                build = f" (build {result['build_number']})" if result["build_number"] else ""
                row.peer = f"llama.cpp {result['build_commit']}{build}"
            for rates, way in ((row.ik, "0"), (row.ik_repacked, "1")) if ik else ():
                command = [str(ik), "-m", str(model), "-t", str(threads), "-rtr", way]
                result, _ = timed([*command, *types], test, processor, depth=False)
                rates.append(result["avg_ts"])
                row.ik_version = f"ik_llama.cpp {result['build_commit']}"
            peers = ", ".join(f"{rates[-1]:.1f}" for rates in [*row.peers, row.ik, row.ik_repacked] if rates)
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
    rows = [row for row in rows if not row.ik]
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


def formats(rows: Sequence[Row]) -> str:
    """Return the Markdown for docs/speed.md: billions of weights per second of localllm, llama.cpp and ik_llama.cpp."""
    lines = ["| model | localllm | llama.cpp | ik_llama.cpp | repacked | ratio to the best |", f"|---|{5 * '---:|'}"]
    for row in rows:
        if not row.ik:
            continue
        programs = [row.ours, row.peers[0], row.ik, row.ik_repacked]
        cells = [f"{median(rates) * row.weights / 1e9:.1f}" for rates in programs]
        ratio = median(ours / max(peers) for ours, *peers in zip(*programs, strict=True))
        lines.append(f"| {row.model.removesuffix('.gguf')} | {' | '.join(cells)} | {ratio:.2f} |")
    return "\n".join(lines)


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
    parser.add_argument("--ik-llama-bench", type=Path, help="ik_llama.cpp's, for decode tests without a depth")
    parser.add_argument("--processor-time", action="store_true", help="decoded tokens per second of processor time")
    parser.add_argument("--formats", action="store_true", help="print the stored comparison with ik_llama.cpp")
    parser.add_argument("--table", action="store_true", help="print the stored results: the table of docs/speed.md")
    parser.add_argument("--summary", action="store_true", help="print the stored results: the table of the README")
    parser.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tests", default="pp512,tg128")
    parser.add_argument("--cache-type", default="", help="cache types to measure in turn, such as f16,q8_0")
    parser.add_argument("--no-plain", action="store_true", help="leave out the peer's run with --repack 0")
    parser.add_argument("--out", type=Path, default=RESULTS / "compare.jsonl", help="JSON lines are appended here")
    arguments = parser.parse_args()
    if arguments.table or arguments.summary or arguments.formats:
        print((table if arguments.table else summary if arguments.summary else formats)(stored(arguments.out)))
        return
    if not arguments.models:
        parser.error("give a model, or --table")
    bench = [str(arguments.llama_bench)] if arguments.llama_bench else [sys.executable, str(LLAMA_CPP_BENCH)]
    tests = [Test.parse(name) for name in arguments.tests.split(",")]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    if arguments.ik_llama_bench and any(test.depth for test in tests):
        parser.error("ik_llama.cpp's llama-bench has no option for a depth: leave --ik-llama-bench out")
    if arguments.processor_time and any(test.prompt or test.depth for test in tests):
        parser.error("--processor-time is for decode tests without a depth")
    if arguments.processor_time and any(test.answer < 8 for test in tests):
        parser.error(
            "--processor-time needs tests of 8 tokens or more, such as tg128: loading the model is left out by "
            "subtracting the time of a run with an eighth of the tokens, which must be at least one"
        )
    everything = []
    for model in arguments.models:
        rows = measure(
            model, tests, bench, arguments.ik_llama_bench, arguments.threads, arguments.rounds, not arguments.no_plain,
            arguments.cache_type.split(","), arguments.processor_time,
        )  # fmt: skip
        everything += rows
        with arguments.out.open("a") as file:
            for row in rows:
                extra = {"ratio": row.ratio, "roof_share": row.roof_share, "machine": machine(), "commit": commit}
                extra["clock"] = "processor" if arguments.processor_time else "wall"
                when = datetime.now(UTC).isoformat(timespec="seconds")
                file.write(json.dumps({"when": when, **asdict(row), **extra}) + "\n")
    print((formats if arguments.ik_llama_bench else table)(everything))


if __name__ == "__main__":
    main()

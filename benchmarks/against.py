"""Time this checkout against another commit or installation, command by command, to find regressions.

    python benchmarks/against.py --quick                 # against HEAD, in two minutes: before each commit
    python benchmarks/against.py COMMIT --model MODEL    # or OTHER/bin/localllm
    ... --out benchmarks/results/against.jsonl

A round runs every command of both installations, in alternating order, so that changes in machine speed affect both. A
result row holds the medians, and the median and range over rounds of the ratio ours / other. A ratio above 1 means that
ours is faster. The exit code is 1 if a row is slower: its median below 0.95, and all of its rounds below 1. It is 2 if
the machine was so busy that fewer than four rounds fitted into the two minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from urllib.request import Request, urlopen

from compare import ROOT

FOLDER = Path(__file__).parent
QUICK_SECONDS, QUICK_FORMATS = 120.0, "Q4_K,Q8_0"
SLOWER, FEWEST = 0.95, 4  # a median ratio below it, with no round at 1, is a regression; rounds to judge by


@dataclass(frozen=True, slots=True)
class Installation:
    """A localllm to time: how to start it, and how to start a Python that imports it."""

    program: tuple[str, ...]
    python: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    @classmethod
    def at(cls, program: str) -> Installation:
        return cls((program,), (str(Path(program).with_name("python")),))

    @classmethod
    def of(cls, folder: Path) -> Installation:
        """A checkout, with this Python and its packages."""
        return cls((sys.executable, "-m", "localllm"), (sys.executable,), {**os.environ, "PYTHONPATH": str(folder)})

    def output(self, words: list[str], python: bool = False) -> str:
        """Run the program, or Python, with these arguments; return what it printed."""
        first = self.python if python else self.program
        done = subprocess.run(
            [*first, *words], check=True, capture_output=True, text=True, cwd="/", env=dict(self.environment)
        )
        return done.stdout


Measure = Callable[[Installation], dict[str, float]]  # larger values are better
STARTS = (["--help"], ["run", "demo", "hi", "-n", "1", "--temp", "0"], ["show", "demo"])


def started(words: list[str]) -> Measure:
    def measure(one: Installation) -> dict[str, float]:
        begin = time.perf_counter()
        one.output(words)
        return {"starts/s": 1.0 / (time.perf_counter() - begin)}

    return measure


def benched(model: str, prompt: int, tokens: int) -> Measure:
    def measure(one: Installation) -> dict[str, float]:
        rows = json.loads(one.output(["bench", model, "-p", str(prompt), "-n", str(tokens), "-r", "2", "-o", "json"]))
        return {f"{'pp' if row['n_prompt'] else 'tg'} tokens/s": row["avg_ts"] for row in rows}

    return measure


def answered(model: str, counts: str) -> Measure:
    """Time whole answers with answers.py, run by the Python of each installation."""

    def measure(one: Installation) -> dict[str, float]:
        rates = json.loads(one.output([str(FOLDER / "answers.py"), model, "--counts", counts], python=True))
        return {f"{name} tokens/s": rate for name, rate in rates.items()}

    return measure


def multiplied(formats: str) -> Measure:
    """Time matrix products with kernels.py, run by the Python of each installation."""

    def measure(one: Installation) -> dict[str, float]:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "rows.jsonl"
            words = ["--formats", formats, "--rounds", "1", "--out", str(out)]
            one.output([str(FOLDER / "kernels.py"), *words], python=True)
            found: dict[str, float] = {}
            for row in map(json.loads, out.read_text().splitlines()):
                found[f"{row['format']} 1 row GB/s"] = row["one_row_gb_per_s"]
                found[f"{row['format']} 4 rows GB/s"] = row["four_rows_gb_per_s"]
                found[f"{row['format']} 512 rows GOP/s"] = row["matmul_gop_per_s"]
            return found

    return measure


def asked(model: str, clients: int) -> Measure:
    """Time clients that send two requests each to a server."""

    def measure(one: Installation) -> dict[str, float]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        words = [*one.program, "serve", model, "--port", str(port), "--parallel", str(clients), "-c", "512"]
        server = subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/", env=dict(one.environment)
        )
        try:
            while server.poll() is None and not _healthy(port):
                time.sleep(0.1)
            begin = time.perf_counter()
            with ThreadPoolExecutor(clients) as pool:
                total = sum(pool.map(lambda number: _completion(port, number), range(2 * clients)))
            return {f"{clients} clients tokens/s": total / (time.perf_counter() - begin)}
        finally:
            server.terminate()
            server.wait()

    return measure


def _healthy(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/health") as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _completion(port: int, number: int) -> int:
    body = {"prompt": f"Number {number} of", "max_tokens": 32, "temperature": 0, "ignore_eos": True}
    asked = Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode())
    with urlopen(asked) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])


def compared(
    ours: Installation, other: Installation, work: list[tuple[str, Measure]], rounds: int, until: float
) -> list[dict[str, str | float]]:
    """Return the result rows of at most `rounds` rounds. A round that would end after the time `until` is left out."""
    for _, measure in work:  # warms up the caches
        for one in (other, ours):
            measure(one)
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    longest = 0.0
    for number in range(rounds):
        began = time.perf_counter()
        if number and began + longest > until:
            break
        for what, measure in work:
            turns = (ours, other) if number % 2 else (other, ours)
            values = {id(one): measure(one) for one in turns}
            mine, theirs = values[id(ours)], values[id(other)]
            for key in (key for key in mine if key in theirs):
                found.setdefault((what, key), []).append((mine[key], theirs[key]))
        longest = max(longest, time.perf_counter() - began)
    rows: list[dict[str, str | float]] = []
    for (what, key), pairs in found.items():
        ratios = sorted(a / b for a, b in pairs)
        rows.append({
            "what": what, "unit": key, "ours": round(median(a for a, _ in pairs), 3),
            "other": round(median(b for _, b in pairs), 3), "ratio": round(median(ratios), 3),
            "lowest": round(ratios[0], 3), "highest": round(ratios[-1], 3), "rounds": len(pairs),
        })  # fmt: skip
    return rows


def verdict(rows: list[dict[str, str | float]]) -> tuple[int, list[dict[str, str | float]]]:
    """Return the exit code, and the rows that are slower."""
    if any(float(row["rounds"]) < FEWEST for row in rows):
        return 2, []
    slower = [row for row in rows if float(row["ratio"]) < SLOWER and float(row["highest"]) < 1]
    return bool(slower), slower


@contextmanager
def installation(name: str) -> Iterator[Installation]:
    """The installation with this program, or a checkout of this commit, which is removed at the end."""
    if Path(name).is_file():
        yield Installation.at(name)
        return
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "localllm"
        git = ["git", "-C", str(ROOT), "worktree"]
        added = subprocess.run([*git, "add", "--detach", str(checkout), name], capture_output=True, text=True)
        if added.returncode:
            raise SystemExit(f"{name}: neither a program nor a commit: {added.stderr.strip()}")
        try:
            yield Installation.of(checkout)
        finally:
            subprocess.run([*git, "remove", "--force", str(checkout)], check=True, capture_output=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", nargs="?", default="HEAD", help="a commit, or the program of another installation")
    parser.add_argument("--ours", help="the program to compare; by default this checkout")
    parser.add_argument("--model", help="a GGUF file to bench; without it, and without --quick, only starts")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="kernels and the bundled model, within two minutes")
    parser.add_argument("--out", type=Path, help="append the rows as JSON lines")
    args = parser.parse_args()
    until = time.perf_counter() + (QUICK_SECONDS if args.quick else math.inf)
    starts = STARTS[:2] if args.quick else STARTS
    work = [(" ".join(words), started(words)) for words in starts]
    if args.quick:
        work.append(("products", multiplied(QUICK_FORMATS)))
    if model := args.model or ("demo" if args.quick else ""):
        name = Path(model).name
        work.append((f"bench {name}", benched(model, 512, 64)))
        work.append((f"answers of {name}", answered(model, "8" if args.quick else "4,8,16")))
        if not args.quick:
            work.append((f"serve {name}", asked(model, 8)))
    ours = Installation.at(args.ours) if args.ours else Installation.of(ROOT)
    with installation(args.other) as other:
        rows = compared(ours, other, work, args.rounds, until)
    code, slower = verdict(rows)
    for row in rows:
        print(json.dumps(row) + ("  <- slower" if row in slower else ""))
    if args.out:
        with args.out.open("a") as out:
            out.writelines(json.dumps(row) + "\n" for row in rows)
    if code == 2:
        print(f"fewer than {FEWEST} rounds: no verdict; stop other programs, or give more --rounds", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())

"""Time two installations of localllm in alternation, command by command, to find regressions.

    python benchmarks/against.py OTHER/bin/localllm --model MODEL --out benchmarks/results/against.jsonl

A round runs both installations, in alternating order, so that changes in machine speed affect both. A result row
holds the medians, and the median and range over rounds of the ratio ours / other. A ratio above 1 means that ours is
faster.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from urllib.request import Request, urlopen

STARTS = (["--help"], ["run", "demo", "hi", "-n", "1", "--temp", "0"], ["show", "demo"])
Measure = Callable[[str], dict[str, float]]  # maps the path to the program to measurements; larger is better


def started(words: list[str]) -> Measure:
    def measure(program: str) -> dict[str, float]:
        begin = time.perf_counter()
        subprocess.run([program, *words], check=True, capture_output=True)
        return {"starts/s": 1.0 / (time.perf_counter() - begin)}

    return measure


def benched(model: str, prompt: int, tokens: int) -> Measure:
    def measure(program: str) -> dict[str, float]:
        words = [program, "bench", model, "-p", str(prompt), "-n", str(tokens), "-r", "2", "-o", "json"]
        rows = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
        return {f"{'pp' if row['n_prompt'] else 'tg'} tokens/s": row["avg_ts"] for row in rows}

    return measure


def answered(model: str) -> Measure:
    """Time whole answers with answers.py, run by the Python of each installation."""
    script = str(Path(__file__).with_name("answers.py"))

    def measure(program: str) -> dict[str, float]:
        words = [str(Path(program).with_name("python")), script, model]
        done = subprocess.run(words, check=True, capture_output=True, text=True, cwd="/")
        return {f"{name} tokens/s": rate for name, rate in json.loads(done.stdout).items()}

    return measure


def asked(model: str, clients: int) -> Measure:
    """Time clients that send two requests each to a server."""

    def measure(program: str) -> dict[str, float]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        words = [program, "serve", model, "--port", str(port), "--parallel", str(clients), "-c", "512"]
        server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", help="the program of the other installation")
    parser.add_argument("--ours", default=str(Path(sys.executable).with_name("localllm")))
    parser.add_argument("--model", help="a GGUF file to bench; without it only starts are timed")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path, help="append the rows as JSON lines")
    args = parser.parse_args()
    work = [(" ".join(words), started(words)) for words in STARTS]
    if args.model:
        name = Path(args.model).name
        work.append((f"bench {name}", benched(args.model, 512, 64)))
        work += [(f"answers of {name}", answered(args.model)), (f"serve {name}", asked(args.model, 8))]
    for what, measure in work:
        for program in (args.other, args.ours):  # warm up the caches
            measure(program)
        ours: list[dict[str, float]] = []
        theirs: list[dict[str, float]] = []
        for number in range(args.rounds):
            turns = [(args.ours, ours), (args.other, theirs)]
            for program, found in turns if number % 2 else turns[::-1]:
                found.append(measure(program))
        for key in (key for key in ours[0] if key in theirs[0]):
            ratios = sorted(a[key] / b[key] for a, b in zip(ours, theirs, strict=True))
            row = {
                "what": what, "unit": key, "ours": round(median(a[key] for a in ours), 3),
                "other": round(median(b[key] for b in theirs), 3), "ratio": round(median(ratios), 3),
                "lowest": round(ratios[0], 3), "highest": round(ratios[-1], 3), "rounds": args.rounds,
            }  # fmt: skip
            print(json.dumps(row), flush=True)
            if args.out:
                with args.out.open("a") as out:
                    out.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

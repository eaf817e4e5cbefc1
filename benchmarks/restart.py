"""Time to the first token of a long prompt: new, after a restart without a cache on disk, and with one.

    python benchmarks/restart.py MODEL.gguf [--words 2000] [--rounds 3]

Each round starts three servers in turn: one with an empty `--cache-dir`, which fills it, then one without, then one
with it. Prints medians in seconds, and the tokens that came from the cache. Appends one JSON line with all rounds to
benchmarks/results/restart.jsonl.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from compare import RESULTS, machine

ROOT = Path(__file__).resolve().parent.parent


def first_token(model: str, prompt: str, *options: str) -> tuple[float, int, int]:
    """Start a server, and return the seconds until its first token, the prompt's tokens, and those from the cache."""
    command = [sys.executable, "-m", "localllm", "serve", model, "--port", "0", "--no-web", *options]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    told = []
    for line in process.stderr:
        told.append(line)
        if found := re.search(r"listening on (http://\S+)", line):
            break
    else:
        sys.exit("".join(told))
    body = json.dumps({"prompt": prompt, "n_predict": 1, "temperature": 0}).encode()
    request = urllib.request.Request(f"{found[1]}/completion", body, {"Content-Type": "application/json"})
    begin = time.perf_counter()
    with urllib.request.urlopen(request) as answer:
        timings = json.load(answer)["timings"]
    seconds = time.perf_counter() - begin
    process.send_signal(signal.SIGTERM)
    process.communicate()
    return seconds, timings["prompt_n"] + timings["cache_n"], timings["cache_n"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--words", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "restart.jsonl")
    given = parser.parse_args()
    prompt = " ".join(f"w{n * 7919 % 1000}" for n in range(given.words))
    rows: dict[str, list[tuple[float, int, int]]] = {"new": [], "restart": [], "restart, --cache-dir": []}
    for _ in range(given.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for name, options in zip(rows, (("--cache-dir", folder), (), ("--cache-dir", folder)), strict=True):
                rows[name].append(first_token(given.model, prompt, *options))
    for name, found in rows.items():
        seconds, cached = median(each[0] for each in found), f"{found[0][2]} of {found[0][1]} tokens from the cache"
        print(f"{name}: {seconds:.2f} s, {cached}")
    row = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"), "model": Path(given.model).name,
        "tokens": rows["new"][0][1], "machine": machine(),
        "seconds": {name: [round(each[0], 3) for each in found] for name, found in rows.items()},
        "cached_tokens": {name: found[0][2] for name, found in rows.items()},
    }  # fmt: skip
    with given.out.open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

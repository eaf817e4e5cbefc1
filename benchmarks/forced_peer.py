"""llama.cpp's speculation at forced acceptance: its speedup over its own plain decoding.

    python benchmarks/forced_peer.py TARGET.gguf DRAFT.gguf --llama-server PATH [--rounds 2] [-n 64]

llama-server accepts drafts at random with `--spec-synth-rates`, after doing the real work of drafting and verifying
them. One server per setting runs with one thread, and answers are requested from them in turn. A time is the processor
time of the server per token of an answer, as in `benchmarks/forced.py`. One JSON line with all rounds goes to
benchmarks/results/forced_peer.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any

import httpx
from compare import RESULTS, machine
from serve import free_port

PROMPT = list(range(300, 332))


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / float(os.sysconf("SC_CLK_TCK"))


def started(command: list[str], port: int) -> subprocess.Popen[bytes]:
    """Start a server and wait until it answers."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(600):
        if process.poll() is not None:
            sys.exit(f"{' '.join(command)}: ended with exit code {process.returncode}")
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health").is_success:
                break
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    return process


def answer(port: int, tokens: int, seed: int) -> None:
    body = {"prompt": PROMPT, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "seed": seed}
    httpx.post(f"http://127.0.0.1:{port}/completion", json=body, timeout=600).raise_for_status()


def measure(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Return seconds per token of each setting, by round."""
    base = [str(arguments.llama_server), "-m", arguments.model, "-t", "1", "-tb", "1", "-c", "1024", "-np", "1"]
    settings: dict[str, list[str]] = {"plain": []}
    for rate in arguments.acceptance:
        for most in arguments.draft_max:
            rates = ",".join(f"{rate ** (place + 1):.6f}" for place in range(most))
            settings[f"{rate:g}, {most} drafts"] = [
                "-md", arguments.draft, "--spec-type", "draft-simple", "--spec-draft-n-max", str(most),
                "--spec-synth-rates", rates, "--spec-draft-threads", "1",
            ]  # fmt: skip
    servers: dict[str, tuple[int, subprocess.Popen[bytes]]] = {}
    found: dict[str, list[float]] = {name: [] for name in settings}
    try:
        for name, extra in settings.items():
            port = free_port()
            servers[name] = port, started([*base, "--no-warmup", "--port", str(port), *extra], port)
        for number in range(arguments.rounds):
            for name, (port, process) in servers.items():
                answer(port, 1, 1)
                before = cpu_seconds(process.pid)
                answer(port, arguments.tokens, number + 1)
                found[name].append((cpu_seconds(process.pid) - before) / arguments.tokens)
    finally:
        for _, process in servers.values():
            process.terminate()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("draft")
    parser.add_argument("--llama-server", type=Path, required=True)
    parser.add_argument("-a", "--acceptance", type=float, nargs="+", default=[0.6, 0.95])
    parser.add_argument("--draft-max", type=int, nargs="+", default=[1, 3])
    parser.add_argument("-n", "--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "forced_peer.jsonl")
    arguments = parser.parse_args()
    seconds = measure(arguments)
    plain = mean(seconds["plain"])
    row: dict[str, Any] = {"model": Path(arguments.model).stem, "draft": Path(arguments.draft).stem}
    row |= {"tokens": arguments.tokens, "seconds_per_token": seconds}
    row["speedup"] = {name: round(plain / mean(own), 3) for name, own in seconds.items()}
    row |= {"when": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine()}
    with arguments.out.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row["speedup"], indent=2))


if __name__ == "__main__":
    main()

"""Decode 1 to 16 sequences together, in turn with llama-batched-bench on the same file and threads.

    python benchmarks/batch.py MODEL.gguf --llama-batched-bench PATH [-t 2] [--sequences 1,2,4,8,16] [--rounds 2]

Every sequence has 128 tokens before it; 32 tokens of each are decoded. Rates are tokens per second of all sequences. A
ratio is the median over rounds of ours / llama.cpp's. One JSON line per model goes to benchmarks/results/batch.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
RESULTS = ROOT / "benchmarks" / "results" / "batch.jsonl"
PROMPT, ANSWER = 128, 32


def ours(path: Path, threads: int, counts: list[int]) -> dict[int, float]:
    """Return tokens per second for each number of sequences, measured in this process."""
    import localllm
    from localllm.engine import Rows

    with localllm.load(path, threads=threads, ctx_size=512, sequences=max(counts)) as model:
        engine, rates = model.engine, {}
        for count in counts:
            sequences = [engine.add() for _ in range(count)]
            for number, sequence in enumerate(sequences):
                engine.step([Rows(sequence, [(7 * i + number) % 200 for i in range(PROMPT)])])
            began = perf_counter()
            for token in range(ANSWER):
                engine.step([Rows(sequence, [token % 200]) for sequence in sequences])
            rates[count] = count * ANSWER / (perf_counter() - began)
            for sequence in sequences:
                engine.release(sequence)
    return rates


def theirs(program: Path, path: Path, threads: int, counts: list[int]) -> dict[int, float]:
    """Return llama-batched-bench's rates of decoding."""
    command = [
        str(program), "-m", str(path), "-t", str(threads), "-c", str(max(counts) * 512), "-npp", str(PROMPT),
        "-ntg", str(ANSWER), "-npl", ",".join(map(str, counts)),
    ]  # fmt: skip
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    names = rows[0]
    at, rate = names.index("B"), names.index("S_TG t/s")
    return {int(row[at]): float(row[rate]) for row in rows[1:] if re.fullmatch(r"\d+", row[at])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--llama-batched-bench", type=Path, required=True)
    parser.add_argument("-t", "--threads", type=int, default=os.cpu_count())
    parser.add_argument("--sequences", default="1,2,4,8,16")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    counts = [int(count) for count in arguments.sequences.split(",")]
    for path in arguments.models:
        rounds = []
        for _ in range(arguments.rounds):
            mine = ours(path, arguments.threads, counts)
            rounds.append((mine, theirs(arguments.llama_batched_bench, path, arguments.threads, counts)))
        found = {
            "model": path.name,
            "threads": arguments.threads,
            "ours": {count: round(median(mine[count] for mine, _ in rounds), 2) for count in counts},
            "llama.cpp": {count: round(median(peer[count] for _, peer in rounds), 2) for count in counts},
            "ratio": {count: round(median(mine[count] / peer[count] for mine, peer in rounds), 2) for count in counts},
            "cpu": next(
                line.split(":", 1)[1].strip()
                for line in Path("/proc/cpuinfo").read_text().splitlines()
                if "model name" in line
            ),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        with RESULTS.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(json.dumps(found))


if __name__ == "__main__":
    main()

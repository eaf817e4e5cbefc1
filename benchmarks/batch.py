"""Decode 1 to 16 sequences together, in alternation with llama-batched-bench on the same GGUF and number of threads.

    python benchmarks/batch.py MODEL.gguf --llama-batched-bench PATH [-t 2] [--sequences 1,2,4,8,16] [--rounds 2]
    python benchmarks/batch.py --table

Every sequence has 128 cached tokens and decodes 32 tokens. Decode speed is in tokens/s, summed over all sequences. A
ratio is the median over rounds of our speed / llama.cpp's. One JSON line per model goes to
benchmarks/results/batch.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
RESULTS = ROOT / "benchmarks" / "results" / "batch.jsonl"
PROMPT, ANSWER = 128, 32


def ours(path: Path, threads: int, counts: list[int]) -> tuple[dict[int, float], str]:
    """Return the tokens/s for each number of sequences, measured in this process, and the device."""
    import localllm
    from localllm.engine import SequenceRows

    with localllm.load(path, threads=threads, ctx_size=512, sequences=max(counts)) as model:
        engine, rates = model.engine, {}
        for count in counts:
            sequences = [engine.add() for _ in range(count)]
            for number, sequence in enumerate(sequences):
                engine.step([SequenceRows(sequence, [(7 * i + number) % 200 for i in range(PROMPT)])])
            began = perf_counter()
            for token in range(ANSWER):
                engine.step([SequenceRows(sequence, [token % 200]) for sequence in sequences])
            rates[count] = count * ANSWER / (perf_counter() - began)
            for sequence in sequences:
                engine.release(sequence)
        return rates, model.device


def theirs(program: Path, path: Path, threads: int, counts: list[int]) -> dict[int, float]:
    """Return the decode speed of llama-batched-bench for each number of sequences."""
    command = [
        str(program), "-m", str(path), "-t", str(threads), "-c", str(max(counts) * 512), "-npp", str(PROMPT),
        "-ntg", str(ANSWER), "-npl", ",".join(map(str, counts)),
    ]  # fmt: skip
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    names = rows[0]
    at, rate = names.index("B"), names.index("S_TG t/s")
    return {int(row[at]): float(row[rate]) for row in rows[1:] if re.fullmatch(r"\d+", row[at])}


def stored(path: Path = RESULTS) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the Markdown for docs/serve.md: by device, the newest row of each model in tokens/s of all sequences."""
    newest = {(row["device"], row["model"].removesuffix(".gguf")): row for row in rows}
    lines: list[str] = []
    for device in dict.fromkeys(device for device, _ in newest):
        models = {model: row for (at, model), row in newest.items() if at == device}
        counts = sorted({int(count) for row in models.values() for count in row["ours"]})
        lines += ["", f"**{device}**", "", "| model | " + " | ".join(f"{count}" for count in counts) + " |"]
        lines.append("|---|" + "---:|" * len(counts))
        for model, row in models.items():
            cells = (
                f"{row['ours'][n]:.0f} : {row['llama.cpp'][n]:.0f} = {row['ratio'][n]:.2f}" if n in row["ours"] else ""
                for n in map(str, counts)
            )
            lines.append(f"| {model} | " + " | ".join(cells) + " |")
    return "\n".join(lines[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="*")
    parser.add_argument("--llama-batched-bench", type=Path, default=Path("llama-batched-bench"))
    parser.add_argument("-t", "--threads", type=int, default=os.cpu_count())
    parser.add_argument("--sequences", default="1,2,4,8,16")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(stored()))
        return
    counts = [int(count) for count in arguments.sequences.split(",")]
    for path in arguments.models:
        rounds = []
        for _ in range(arguments.rounds):
            mine, device = ours(path, arguments.threads, counts)
            rounds.append((mine, theirs(arguments.llama_batched_bench, path, arguments.threads, counts)))
        found = {
            "model": path.name,
            "threads": arguments.threads,
            "ours": {count: round(median(mine[count] for mine, _ in rounds), 2) for count in counts},
            "llama.cpp": {count: round(median(peer[count] for _, peer in rounds), 2) for count in counts},
            "ratio": {count: round(median(mine[count] / peer[count] for mine, peer in rounds), 2) for count in counts},
            "device": device,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        with RESULTS.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(json.dumps(found))


if __name__ == "__main__":
    main()

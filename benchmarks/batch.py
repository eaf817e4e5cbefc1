"""Decode 1 to 16 sequences together, in alternation with llama-batched-bench on the same GGUF and number of threads.

    python benchmarks/batch.py MODEL.gguf --llama-batched-bench PATH [-t 2] [--sequences 1,2,4,8,16] [--rounds 2]
    python benchmarks/batch.py MODEL.gguf --llama-batched-bench PATH -t 1 --processor-time
    python benchmarks/batch.py --table

Every sequence has 128 cached tokens and decodes 32 tokens. Decode speed is in tokens/s, summed over all sequences. A
ratio is the median over rounds of our speed / llama.cpp's. With `--processor-time`, tokens are counted per second of
processor time, which other programs on a busy machine change little; llama.cpp's is the difference of a run with 32
tokens and a run with 4. The table leaves these rows out. One JSON line per model goes to
benchmarks/results/batch.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
RESULTS = ROOT / "benchmarks" / "results" / "batch.jsonl"
PROMPT, ANSWER, SHORT = 128, 32, 4


def ours(path: Path, threads: int, counts: list[int], processor: bool = False) -> tuple[dict[int, float], str]:
    """Return the tokens/s for each number of sequences, measured in this process, and the device."""
    import localllm
    from localllm.engine import SequenceRows

    clock = process_time if processor else perf_counter
    with localllm.load(path, threads=threads, ctx_size=512, sequences=max(counts)) as model:
        engine, rates = model.engine, {}
        for count in counts:
            sequences = [engine.add() for _ in range(count)]
            for number, sequence in enumerate(sequences):
                engine.step([SequenceRows(sequence, [(7 * i + number) % 200 for i in range(PROMPT)])])
            began = clock()
            for token in range(ANSWER):
                engine.step([SequenceRows(sequence, [token % 200]) for sequence in sequences])
            rates[count] = count * ANSWER / (clock() - began)
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


def their_processor_time(program: Path, path: Path, threads: int, counts: list[int]) -> dict[int, float]:
    """Return the decoded tokens of llama-batched-bench per second of processor time."""

    def seconds(count: int, tokens: int) -> float:
        command = [
            str(program), "-m", str(path), "-t", str(threads), "-c", str(count * 512), "-npp", str(PROMPT),
            "-ntg", str(tokens), "-npl", str(count),
        ]  # fmt: skip
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return {n: n * (ANSWER - SHORT) / (seconds(n, ANSWER) - seconds(n, SHORT)) for n in counts}


def stored(path: Path = RESULTS) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the Markdown for docs/serve.md: by device, the newest row of each model in tokens/s of all sequences."""
    rows = [row for row in rows if row.get("clock", "wall") == "wall"]
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
    parser.add_argument("--processor-time", action="store_true")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(stored()))
        return
    counts = [int(count) for count in arguments.sequences.split(",")]
    for path in arguments.models:
        rounds = []
        for _ in range(arguments.rounds):
            mine, device = ours(path, arguments.threads, counts, arguments.processor_time)
            measured = their_processor_time if arguments.processor_time else theirs
            rounds.append((mine, measured(arguments.llama_batched_bench, path, arguments.threads, counts)))
        found = {
            "model": path.name,
            "threads": arguments.threads,
            "ours": {count: round(median(mine[count] for mine, _ in rounds), 2) for count in counts},
            "llama.cpp": {count: round(median(peer[count] for _, peer in rounds), 2) for count in counts},
            "ratio": {count: round(median(mine[count] / peer[count] for mine, peer in rounds), 2) for count in counts},
            "device": device,
            "clock": "processor" if arguments.processor_time else "wall",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        with RESULTS.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(json.dumps(found))


if __name__ == "__main__":
    main()

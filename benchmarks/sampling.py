"""Time the sampling of a step's next tokens from logits in memory, without a model.

    python benchmarks/sampling.py [--against CHECKOUT]

`--against` alternates with another checkout (ours, other, ours, other). In each row of logits, 300 tokens are likely.
The other tokens share 2 to 8 % of the probability in half of the rows, like a model's logits at the start of a word,
and less in the other rows, as within a word. One JSON line per case and checkout goes to
benchmarks/results/sampling.jsonl.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from compare import RESULTS, ROOT, machine

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "default": {},
    "top_p and min_p": {"top_k": 0},
    "top_p": {"top_k": 0, "min_p": 0.0},
    "min_p": {"top_k": 0, "top_p": 1.0},
    "temperature only": {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0},
    "penalties": {"repeat_penalty": 1.1, "presence_penalty": 0.1},
}
ROWS, VOCABULARIES = (1, 8), (131072, 262144)
REPEATS, ROUNDS = 15, 2


def logits(rows: int, vocabulary: int) -> np.ndarray:
    """Return random logits as float32 (rows, vocabulary)."""
    random = np.random.default_rng(1)
    made = random.standard_normal((rows, vocabulary), np.float32) * np.float32(2.2)
    for number, row in enumerate(made):
        likely = random.choice(vocabulary, 300, replace=False)
        row[likely] += 6 + random.gamma(2, 3.5 if number % 2 else 1.0, 300).astype(np.float32)
    return made


def child() -> None:
    """Time all cases with the localllm on the import path. Print one JSON line each."""
    from localllm.engine import top_k_of
    from localllm.options import SamplingOptions
    from localllm.sampling.sampler import Sampler

    def choose(samplers: list[Sampler], found: np.ndarray) -> list[Any]:
        """Sample the next tokens as a step of the scheduler does."""
        count = samplers[0].required_top_k
        if count:
            picked = [top_k_of(row[None], count) for row in found]
            return [s.sample_top_k(one.ids[0], one.logits[0]) for s, one in zip(samplers, picked, strict=True)]
        return [sampler.sample(row) for sampler, row in zip(samplers, found, strict=True)]

    for vocabulary in VOCABULARIES:
        everything = logits(max(ROWS), vocabulary)
        for rows in ROWS:
            for name, changed in CASES.items():
                samplers = [Sampler(SamplingOptions(seed=seed, **changed)) for seed in range(rows)]
                for token in range(64):
                    for sampler in samplers:
                        sampler.accept(token)
                times, tokens = [], []
                for _ in range(REPEATS):
                    start = perf_counter()
                    tokens.append(choose(samplers, everything[:rows]))
                    times.append(perf_counter() - start)
                case = {"case": name, "rows": rows, "vocabulary": vocabulary}
                print(json.dumps(case | {"ms": round(median(times) * 1e3, 3), "tokens": tokens}), flush=True)


def timed(checkout: Path) -> list[dict[str, Any]]:
    program = [sys.executable, str(Path(__file__).resolve()), "--child"]
    done = subprocess.run(
        program, env={"PYTHONPATH": f"{checkout}:{ROOT / 'benchmarks'}"}, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(done.stderr)
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout, timed in turn")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        child()
        return
    checkouts = {"ours": ROOT} | ({"other": asked.against.resolve()} if asked.against else {})
    runs: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in checkouts}
    for _ in range(ROUNDS):
        for name, checkout in checkouts.items():
            runs[name].append(timed(checkout))
    head = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine()}
    with (RESULTS / "sampling.jsonl").open("a") as file:
        for name, rounds in runs.items():
            for number, cases in enumerate(zip(*rounds, strict=True)):
                first = runs["ours"][0][number]
                assert all(one["tokens"] == first["tokens"] for one in cases), f"{name}: other tokens: {first['case']}"
                row = {key: first[key] for key in ("case", "rows", "vocabulary")} | {"code": name}
                row["ms"] = [one["ms"] for one in cases]
                file.write(json.dumps(head | row) + "\n")
                print(row)


if __name__ == "__main__":
    main()

"""Compare the forecast of decoding speed (`localllm show`) with the speed that `localllm bench` measures.

    python benchmarks/forecast.py demo /tmp/llama-1b-q4_0.gguf --rounds 3 [--alone]

A round makes the forecast of each model, then decodes with it. `make_model.py` writes models of other formats and
sizes. `--alone` gives this process real-time priority while it measures, so that other programs do not disturb it; it
needs root. One JSON line per round and model goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, median
from typing import Any

from compare import RESULTS, ROOT, machine

sys.path.insert(0, str(ROOT))

from localllm import load
from localllm.cli.commands.bench import _run
from localllm.cli.commands.bench_tests import Test
from localllm.cli.forecast import DecodeSpeed, cost_of
from localllm.loading.loader import limits_of

TOKENS, CONTEXT = 48, 256


@contextmanager
def alone(wanted: bool) -> Iterator[None]:
    """Give the threads of this process real-time priority."""

    def schedule(policy: int, priority: int) -> None:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), policy, os.sched_param(priority))

    if wanted:
        schedule(os.SCHED_RR, 10)
    try:
        yield
    finally:
        if wanted:
            schedule(os.SCHED_OTHER, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "forecast.jsonl")
    arguments = parser.parse_args()
    ratios: dict[str, list[float]] = {}
    for _ in range(arguments.rounds):
        for name in arguments.models:
            row = measured(name, arguments.alone)
            ratios.setdefault(name, []).append(row["forecast"] / row["bench"])
            print(
                f"{Path(name).name:28} {row['forecast']:8.1f} : {row['bench']:8.1f} (x{ratios[name][-1]:.2f})",
                flush=True,
            )
            with arguments.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    for name, found in ratios.items():
        print(f"{Path(name).name:28} median x{median(found):.2f} of {len(found)}")


def measured(name: str, apart: bool) -> dict[str, Any]:
    """Return the forecast and the measured tokens per second as one row."""
    with load(name, ctx_size=CONTEXT) as model, DecodeSpeed() as speed:
        assert model.plan is not None
        cost = cost_of(model.plan, limits_of(CONTEXT, model.plan), model.cache.types, TOKENS // 2)
        speed.tokens_per_second(cost)  # compiles kernels
        session, tokens = model.session(), [1] * TOKENS
        _run(model, session, Test(0, TOKENS, 0, ""), tokens[:1])
        with alone(apart):
            with DecodeSpeed() as fresh:
                forecast = fresh.tokens_per_second(cost)
            runs = [_run(model, session, Test(0, TOKENS, 0, ""), tokens) for _ in range(3)]
        session.close()
        return {
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "model": Path(name).name,
            "forecast": forecast,
            "bench": mean(1e9 * TOKENS / run.ns for run in runs),
            "bench_p50": 1e9 / median(gap for run in runs for gap in run.gaps),
            "bytes_per_token": cost.bytes,
            "calls": cost.calls,
            "alone": apart,
            "device": model.device,
            "machine": machine(),
        }


if __name__ == "__main__":
    main()

"""Time whole processes in alternation: `localllm run MODEL hi -n 1` and `llama-completion -n 1`, with peak memory.

    python benchmarks/startup.py MODEL.gguf --llama-completion PATH [-t 2] [--rounds 5]

The time to the first word includes the interpreter, imports, cached kernels, weights, the tokenizer and the prompt. The
first start on a machine also compiles kernels; this start is timed separately, with an empty kernel cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from compare import RESULTS, ROOT, machine


def run(command: list[str], environment: dict[str, str] | None = None) -> tuple[float, int]:
    """Return the seconds and the peak resident memory in bytes of one process."""
    start = perf_counter()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    _, status, usage = os.wait4(process.pid, 0)
    seconds = perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return seconds, usage.ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-completion", type=Path, required=True)
    parser.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("-c", "--context", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "startup.jsonl")
    arguments = parser.parse_args()
    common = ["-n", "1", "-t", str(arguments.threads), "-c", str(arguments.context)]
    ours = [sys.executable, "-m", "localllm", "run", str(arguments.model), "hi", *common]
    peer = [str(arguments.llama_completion), "-m", str(arguments.model), "-p", "hi", "-no-cnv", *common]
    with tempfile.TemporaryDirectory() as empty:
        first, _ = run(ours, os.environ | {"XDG_CACHE_HOME": empty})
    run(ours)
    run(peer)
    samples = [(run(ours), run(peer)) for _ in range(arguments.rounds)]
    row: dict[str, Any] = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": arguments.model.name,
        "file_bytes": arguments.model.stat().st_size,
        "threads": arguments.threads,
        "context": arguments.context,
        "first_start_seconds": first,
        "our_seconds": [a[0] for a, _ in samples],
        "peer_seconds": [b[0] for _, b in samples],
        "our_peak_bytes": max(a[1] for a, _ in samples),
        "peer_peak_bytes": max(b[1] for _, b in samples),
        "ratio": median(b[0] / a[0] for a, b in samples),
        "machine": machine(),
    }
    with arguments.out.open("a") as file:
        file.write(json.dumps(row) + "\n")
    seconds, theirs = median(row["our_seconds"]), median(row["peer_seconds"])
    print(f"{row['model']}: {seconds:.2f} s, llama.cpp {theirs:.2f} s; first start {first:.1f} s")
    peaks = [f"{row[key] / 1e9:.2f} GB" for key in ("our_peak_bytes", "peer_peak_bytes", "file_bytes")]
    print(f"peak memory {peaks[0]}, llama.cpp {peaks[1]}, file {peaks[2]}")


if __name__ == "__main__":
    main()

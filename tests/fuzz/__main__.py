"""The command: run cases of a kind, print what went wrong and keep its files; exit code 1 where anything did."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path

KINDS = ("gguf", "split", "safetensors", "draft", "cache", "imatrix", "kld", "template", "writers")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--seed", type=int, default=1, help="cases are made of kind, seed and number alone")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so much time")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-findings"), help="folder for files of cases that fail")
    parser.add_argument("--tally", action="store_true", help="show how cases ended, messages without their numbers")
    asked = parser.parse_args()
    shelf = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "localllm-fuzz"
    os.environ["XDG_CACHE_HOME"] = str(shelf)  # kernels of odd shapes stay out of the user's own cache
    return run(asked)


def run(asked: argparse.Namespace) -> int:
    from tests.fuzz.runner import Finding, Runner, show

    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=memory if os.access(memory, os.W_OK) else None) as scratch:
        home = Path(scratch) / "home"
        home.mkdir()
        kind = import_module(f"tests.fuzz.{asked.kind}").Kind(home)
        runner = Runner(asked.kind, kind, asked.seed, Path(scratch))

        def tell(found: Finding) -> None:
            kept = asked.keep / f"{asked.kind}-{asked.seed}-{found.number}"
            runner.keep(found.number, kept)
            print(f"{asked.kind} seed {asked.seed} case {found.number}: {found.what}")
            print(f"    changed: {'; '.join(found.changes)!a}")
            print(f"    files: {kept}", flush=True)

        report = runner.run(asked.first, asked.cases, asked.seconds, tell)
    if asked.tally:
        print(*show(report), sep="\n")
    print(
        f"{asked.kind} seed {asked.seed}: {report.cases} cases in {report.seconds:.0f} s, "
        f"{1000 * report.seconds / max(report.cases, 1):.1f} ms each; most memory {report.peak >> 20} MiB, "
        f"longest {report.longest:.1f} s; {len(report.findings)} findings"
    )
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())

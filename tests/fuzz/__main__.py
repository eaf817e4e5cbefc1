"""The command line: run cases of a kind, print failures, and keep the files that caused them. The exit code
is 1 after any failure.

`files` means all kinds that read files other than single models and templates. Each kind gets a share of the cases.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from importlib import import_module
from pathlib import Path

SHARES = {  # shares of the kinds under "files"
    "split": 0.2, "safetensors": 0.1, "draft": 0.02, "cache": 0.28, "imatrix": 0.2, "kld": 0.155, "writers": 0.01,
    "special": 0.03, "reply": 0.005,
}  # fmt: skip
KINDS = (
    "gguf",
    "split",
    "safetensors",
    "draft",
    "cache",
    "imatrix",
    "kld",
    "template",
    "writers",
    "special",
    "reply",
    "media",
)
ALIKE = 3  # similar failures to print and keep


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("kind", choices=(*KINDS, "http", "files"))
    parser.add_argument("--seed", type=int, default=1, help="cases are made of kind, seed and number alone")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so much time")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-findings"), help="folder for files of cases that fail")
    parser.add_argument("--patience", type=float, default=2.0, help="seconds that http's second client may wait")
    parser.add_argument("--shared", action="store_true", help="use the user's cache of compiled code")
    parser.add_argument("--tally", action="store_true", help="show how cases ended, messages without their numbers")
    asked = parser.parse_args()
    if asked.kind == "files":
        return max([_share(asked, kind, share) for kind, share in SHARES.items()])
    shelf = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    if not asked.shared:  # keep kernels of odd shapes out of the user's cache
        shelf /= "localllm-fuzz"
    os.environ["XDG_CACHE_HOME"] = str(shelf)  # also set with --shared, because `special` moves the home folder
    if asked.kind == "http":
        from tests.fuzz import http

        return http.run(asked)
    return run(asked)


def _share(asked: argparse.Namespace, kind: str, share: float) -> int:
    """Run a kind in a separate process."""
    command = [sys.executable, "-m", "tests.fuzz", kind, "--seed", str(asked.seed), "--keep", str(asked.keep)]
    command += ["--cases", str(round(share * asked.cases)), "--first", str(asked.first)]
    command += ["--seconds", str(share * asked.seconds)] + ["--tally"] * asked.tally
    return subprocess.run(command).returncode


def run(asked: argparse.Namespace) -> int:
    from tests.fuzz.runner import Finding, Runner, pattern, show

    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=memory if os.access(memory, os.W_OK) else None) as scratch:
        home = Path(scratch) / "home"
        home.mkdir()
        kind = import_module(f"tests.fuzz.{asked.kind}").Kind(home)
        runner = Runner(asked.kind, kind, asked.seed, Path(scratch))

        seen: Counter[str] = Counter()

        def tell(found: Finding) -> None:
            seen[pattern(found.what)] += 1
            if seen[pattern(found.what)] > ALIKE:
                return
            kept = asked.keep / f"{asked.kind}-{asked.seed}-{found.number}"
            runner.keep(found.number, kept)
            print(f"{asked.kind} seed {asked.seed} case {found.number}: {found.what}")
            print(f"    changed: {'; '.join(found.changes)!a}")
            print(f"    files: {kept}", flush=True)

        report = runner.run(asked.first, asked.cases, asked.seconds, tell)
    for what, count in seen.items():
        if count > ALIKE:
            print(f"{count - ALIKE} more findings like: {what}")
    if asked.tally:
        print(*show(report), sep="\n")
    print(
        f"{asked.kind} seed {asked.seed}: {report.cases} cases in {report.seconds:.0f} s, "
        f"{1000 * report.processor / max(report.cases, 1):.1f} ms of processor time each; "
        f"most memory {report.peak >> 20} MiB, "
        f"longest {report.longest:.1f} s; {len(report.findings)} findings"
    )
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())

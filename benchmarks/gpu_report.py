"""The report of benchmarks/gpu.py: result rows in order, each with its stage.

Failed and skipped stages have a reason.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any


class Skipped(Exception):
    """Raised to skip a measurement; the message is the reason."""


@dataclass
class Report:
    """Result rows in order. Every stage ends with a row that states its outcome."""

    minutes: float
    out: Path | None
    common: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    copy: float = 0.0  # copy bandwidth in bytes per second
    dense: dict[str, float] = field(default_factory=dict)  # dense matrix products in operations per second, by type
    start: float = field(default_factory=monotonic)

    @property
    def left(self) -> float:
        """Return the seconds left before the time limit."""
        return 60 * self.minutes - (monotonic() - self.start)

    def row(self, stage: str, **numbers: Any) -> None:
        found = {"stage": stage, **{k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in numbers.items()}}
        self.rows.append(found)
        print("  " + ", ".join(f"{k} {v}" for k, v in found.items()), flush=True)
        if self.out is not None:
            with self.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**self.common, **found}) + "\n")

    def stage(self, name: str, work: Callable[[Report], None], needs: float = 5.0, **of: Any) -> bool:
        """Run a stage if enough time is left. Return whether it succeeded."""
        before = monotonic()
        try:
            if self.left < needs:
                raise Skipped(f"{self.left:.0f} s of the {self.minutes:g} minutes are left, it needs {needs:.0f}")
            work(self)
        except Skipped as reason:
            self.row(name, **of, status="skipped", reason=str(reason))
        except Exception as error:
            self.row(name, **of, status="failed", reason=f"{type(error).__name__}: {error}"[:2000])
        else:
            self.row(name, **of, status="ok", seconds=monotonic() - before)
        return self.rows[-1]["status"] == "ok"

    def share(self, bytes_per_s: float) -> float | None:
        return bytes_per_s / self.copy if self.copy else None


def run(command: Sequence[object], seconds: float, **options: Any) -> str:
    """Return the output of a program. Raises RuntimeError if it fails, and Skipped if it takes too long."""
    try:
        done = subprocess.run(
            [str(word) for word in command], capture_output=True, encoding="utf-8", timeout=max(seconds, 1), **options
        )
    except subprocess.TimeoutExpired:
        raise Skipped(f"{Path(str(command[0])).name} took more than the {seconds:.0f} s there were") from None
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
    return done.stdout


def table(report: Report) -> str:
    """Return a Markdown table for every kind of row that has measurements."""
    lines = [f"**{report.common['card']}**, {report.common['driver']}, localllm {report.common['commit']}"]
    for stage in dict.fromkeys(row["stage"] for row in report.rows):
        rows = [row for row in report.rows if row["stage"] == stage and "status" not in row]
        names = list(dict.fromkeys(name for row in rows for name in row if name != "stage"))
        if rows:
            lines += ["", f"| {stage}: {' | '.join(names)} |", f"|{'---|' * len(names)}"]
            lines += [f"| {' | '.join(_cell(row.get(name)) for name in names)} |" for row in rows]
    bad = [row for row in report.rows if row.get("status", "ok") != "ok"]
    lines += ["", *(f"{row['status']}: {_what(row)}: {row['reason'][:300]}" for row in bad)]
    return "\n".join(lines)


def _what(row: dict[str, Any]) -> str:
    return " ".join(str(v) for k, v in row.items() if k not in ("status", "reason"))


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{k}:{v}" for k, v in value.items())
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

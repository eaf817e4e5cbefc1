"""`localllm bench --plot` and `--compare`: a plot of the results, and their ratios to an older run.

The output path, matplotlib and the older run are checked before the measurement starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from localllm.base.files.outputs import check_target, new_file
from localllm.base.machine.memory import memory
from localllm.cli.commands.doctor_speed import Speed, measure_speed
from localllm.cli.plots.runs import Ratio, Run, matched, read_run, run_of
from localllm.cli.terminal.console import YELLOW, room, say
from localllm.cli.terminal.formatting import text_table
from localllm.cli.tool_options import BenchOptions

NEW = "now"
_UNKNOWN = Speed(0, 0.0, 0.0, ())


class Pictured:
    """Collects the results of one run, for a plot and for ratios."""

    def __init__(self, own: BenchOptions, names: Sequence[str]) -> None:
        self._own = own
        self._old = read_run(Path(own.compare)) if own.compare else None
        self._results: list[dict[str, Any]] = []
        self.speed = _UNKNOWN
        if own.plot:
            from localllm.cli.plots.drawing import check_installed

            check_target(Path(own.plot), own.force, (*names, own.compare) if own.compare else names)
            check_installed()
            self.speed = measure_speed(memory())
            if self.speed.remarks:
                say(f"the roofs may be too low: {'; '.join(self.speed.remarks)}", YELLOW)

    def add(self, result: Any) -> None:
        """Add a result, which is a dataclass."""
        self._results.append(asdict(result))

    def end(self) -> None:
        """Print the ratios and write the plot. Ratios go to stderr if stdout is machine-readable."""
        if not self._own.plot and self._old is None:
            return
        new = run_of(NEW, self._results)
        if self._old is not None:
            tell = print if self._own.output == "md" else say
            tell("")
            _print_ratios(new, self._old, tell)
        if self._own.plot:
            path = Path(self._own.plot)
            data = _drawn([new, self._old] if self._old is not None else [new], path.suffix.lower()[1:])
            with new_file(path, self._own.force) as file:
                file.write(data)
            say(f"wrote {path}")


def _drawn(runs: Sequence[Run], kind: str) -> bytes:
    from localllm.cli.plots.drawing import draw
    from localllm.cli.plots.page import page
    from localllm.cli.plots.picture import picture_of

    picture = picture_of(runs)
    return draw(picture, kind) if kind != "html" else page(picture.title, draw(picture, "svg", titled=False), runs)


def _print_ratios(new: Run, old: Run, tell: Callable[[str], None]) -> None:
    found = matched(new, old)
    if not found:
        tell(f"{old.name} has no results for these tests (same model file, test, threads and cache types)")
        return
    columns = ("model", "threads", "test", "now t/s", "before t/s", "ratio", "")
    for line in text_table(columns, [_cells(each) for each in found], columns[3:6], room()).splitlines():
        tell(line)
    several = f"; median ratio {median(each.ratio for each in found):.3f}" if len(found) > 1 else ""
    alone = len(old.rows) - len(found)
    rest = f"; {alone} tests only in {old.name}" if alone > 0 else ""
    tell(f"{len(found)} tests compared with {old.name}{several}{rest}")


def _cells(each: Ratio) -> tuple[str, ...]:
    new, old = each.new, each.old
    return (
        new.model,
        str(new.threads),
        ", ".join(word for word in (new.test, new.placed) if word),
        f"{new.rate:.2f} ± {new.spread:.2f}",
        f"{old.rate:.2f} ± {old.spread:.2f}",
        f"{each.ratio:.3f}",
        "" if each.apart else "within the spread",
    )

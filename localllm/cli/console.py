"""What the commands say beside their answer, all on stderr: notes, errors, progress; plain where it is no terminal."""

from __future__ import annotations

import os
import sys
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn, TaskID

RED, YELLOW, DIM = "31", "33", "2"
BAR_AFTER = 0.3  # seconds; what is over sooner needs no bar
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def styled(text: str, style: str, stream: TextIO) -> str:
    """`text` in an ANSI style where `stream` is a terminal that wants colours (https://no-color.org)."""
    wanted = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\x1b[{style}m{text}\x1b[0m" if wanted else text


def say(text: str, style: str = DIM) -> None:
    """A line on stderr, after what stdout has to say."""
    sys.stdout.flush()
    print(styled(printable(text), style, sys.stderr), file=sys.stderr, flush=True)


def fail(text: str) -> None:
    """The one line that ends a command in error."""
    say("error: " + " ".join(text.split()), RED)


def printable(text: str) -> str:
    """`text` without the control characters that would steer a terminal: neither a file nor a model may send those."""
    return text.translate(_CONTROLS)


class LoadProgress:
    """The `progress` of `localllm.load` as a bar, for a terminal and only where a step lasts; a context manager."""

    def __init__(self) -> None:
        self._wanted = sys.stderr.isatty()
        self._begun: dict[str, float] = {}
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        if not self._wanted:
            return
        begun = self._begun.setdefault(what, perf_counter())
        if what not in self._tasks:
            if done >= total or perf_counter() - begun < BAR_AFTER:
                return
            self._tasks[what] = self._open().add_task(what, total=total)
        self._open().update(self._tasks[what], completed=done)

    def _open(self) -> Progress:
        if self._bars is None:
            from rich.console import Console
            from rich.progress import Progress

            self._bars = Progress(*self._columns(), console=Console(stderr=True), transient=True)
            self._bars.start()
        return self._bars

    def _columns(self) -> tuple[ProgressColumn, ...]:
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

        return TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()


class RateProgress(LoadProgress):
    """The same for long work on many weights: how fast it goes, and how long it will still take."""

    def _columns(self) -> tuple[ProgressColumn, ...]:
        from rich.progress import ProgressColumn, Task, TextColumn, TimeRemainingColumn
        from rich.text import Text

        class Rate(ProgressColumn):
            def render(self, task: Task) -> Text:
                speed = task.speed or 0
                return Text(f"{speed / 1e6:.0f} M/s" if speed >= 1e6 else f"{speed:.1f}/s" if speed else "")

        return *super()._columns(), Rate(), TextColumn("left"), TimeRemainingColumn()

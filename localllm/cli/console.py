"""Everything that is printed, and what is said beside an answer: notes, errors and progress, on stderr.

Neither a file nor a model may steer a terminal: while a command runs, stdout and stderr are `Guard`s, which escape
control characters whoever writes them. What the program itself sends goes to the stream below, `raw`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO, cast

from localllm.printable import printable

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn, TaskID

RED, YELLOW, DIM = "31", "33", "2"
BAR_AFTER = 0.3  # seconds; what is over sooner needs no bar


class Guard:
    """A stream whose text is written with its control characters escaped, newlines and tabs apart."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(printable(text, None, keep="\n\t"))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def guarded() -> Iterator[None]:
    """Have stdout and stderr guarded meanwhile."""
    before = sys.stdout, sys.stderr
    _guard()
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _guard() -> None:
    sys.stdout, sys.stderr = (cast(TextIO, Guard(stream)) for stream in (sys.stdout, sys.stderr))


def raw(stream: TextIO) -> TextIO:
    """The stream below its guards."""
    while isinstance(stream, Guard):
        stream = stream.stream
    return stream


def styled(text: str, style: str, stream: TextIO) -> str:
    """`text` in an ANSI style where `stream` is a terminal that wants colours (https://no-color.org)."""
    wanted = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\x1b[{style}m{text}\x1b[0m" if wanted else text


def say(text: str, style: str = DIM) -> None:
    """One line on stderr, after what stdout has to say."""
    sys.stdout.flush()
    print(styled(printable(text, None), style, sys.stderr), file=raw(sys.stderr), flush=True)


def fail(text: str) -> None:
    """The one line that ends a command in error."""
    say("error: " + " ".join(text.split()), RED)


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
            self._tasks[what] = self._open().add_task(printable(what), total=total)
        self._open().update(self._tasks[what], completed=done)

    def _open(self) -> Progress:
        if self._bars is None:
            from rich.console import Console
            from rich.progress import Progress

            # Lines that are written meanwhile go above the bars; but what goes to a file stays what it is.
            redirect, console = sys.stdout.isatty(), Console(file=raw(sys.stderr))
            self._bars = Progress(*self._columns(), console=console, transient=True, redirect_stdout=redirect)
            self._bars.start()
            _guard()  # what rich has put in the place of the streams, until it stops
        return self._bars

    def _columns(self) -> tuple[ProgressColumn, ...]:
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

        return TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()

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

"""All printing: escaped output, and notes, errors and progress on stderr.

Text from files and models must not control the terminal. While a command runs, stdout and stderr are `StreamGuard`s,
which escape the control characters of every writer. The program's control sequences go to the underlying stream, `raw`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO, cast

from localllm.base.printable import printable
from localllm.base.units import size
from localllm.cli.flags import typed
from localllm.cli.terminal.wrapping import broken, width_of

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn, TaskID

RED, YELLOW, DIM = "31", "33", "2"
# Ray's thread that prints warnings on stdout, such as those about lost stages, which localllm reports itself
_MUTED = ("ray_listen_error_messages",)
BAR_AFTER = 0.3  # seconds; shorter steps show no bar


class StreamGuard:
    """A stream that escapes control characters except newlines and tabs."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        if threading.current_thread().name in _MUTED:
            return len(text)
        self.stream.write(printable(text, None, keep="\n\t"))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def guarded() -> Iterator[None]:
    """Guard stdout and stderr within the block."""
    before = sys.stdout, sys.stderr
    _guard()
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _guard() -> None:
    sys.stdout, sys.stderr = (cast(TextIO, StreamGuard(stream)) for stream in (sys.stdout, sys.stderr))


def raw(stream: TextIO) -> TextIO:
    """Return the stream below the guards."""
    while isinstance(stream, StreamGuard):
        stream = stream.stream
    return stream


def styled(text: str, style: str, stream: TextIO) -> str:
    """Return `text` in an ANSI style if `stream` is a terminal that accepts colours (https://no-color.org)."""
    wanted = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\x1b[{style}m{text}\x1b[0m" if wanted else text


def room() -> int:
    """Return the columns of the terminal on stdout, or 0 without a terminal or if its width is unknown."""
    return width_of(sys.stdout, 0) if sys.stdout.isatty() else 0


def fitted(text: str) -> str:
    """Return a line for stdout. On a terminal it wraps at words."""
    line, width = printable(text, None), room()
    return "\n".join(broken(line, width)) if width else line


def say(text: str, style: str = DIM) -> None:
    """Print one line on stderr, after flushing stdout. On a terminal it wraps at words."""
    sys.stdout.flush()
    line, width = printable(typed(text), None), width_of(sys.stderr, 0) if sys.stderr.isatty() else 0
    shown = "\n".join(broken(line, width)) if width else line
    print(styled(shown, style, sys.stderr), file=raw(sys.stderr), flush=True)


def fail(text: str) -> None:
    """Print the error message that ends a command."""
    say("error: " + " ".join(text.split()), RED)


class LoadProgress:
    """Context manager that shows the `progress` of `localllm.load` as a bar, only on a terminal and for long steps."""

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
            if done >= total or (self._bars is None and perf_counter() - begun < BAR_AFTER):
                return
            self._tasks[what] = self._open().add_task(printable(what), total=total)
        self._open().update(self._tasks[what], completed=done, visible=done < total)

    def _open(self) -> Progress:
        if self._bars is None:
            from rich.console import Console
            from rich.progress import Progress

            # Lines that are written during the progress appear above the bars. A stream redirected to a file is not
            # replaced.
            redirect, console = sys.stdout.isatty(), Console(file=raw(sys.stderr))
            self._bars = Progress(*self._columns(), console=console, transient=True, redirect_stdout=redirect)
            self._bars.start()
            _guard()  # rich replaces the streams until it stops
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


class DownloadProgress(LoadProgress):
    """A bar for network downloads, with the speed and the time left."""

    def _columns(self) -> tuple[ProgressColumn, ...]:
        from rich.progress import BarColumn, DownloadColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
        from rich.text import Text

        class Rate(ProgressColumn):
            def render(self, task: Task) -> Text:
                return Text(f"{size(task.speed)}/s" if task.speed else "")

        name = TextColumn("{task.description}", markup=False)
        return name, BarColumn(), DownloadColumn(binary_units=True), Rate(), TextColumn("left"), TimeRemainingColumn()


class RateProgress(LoadProgress):
    """A bar for long work on many weights, with the speed and the time left."""

    def _columns(self) -> tuple[ProgressColumn, ...]:
        from rich.progress import ProgressColumn, Task, TextColumn, TimeRemainingColumn
        from rich.text import Text

        class Rate(ProgressColumn):
            def render(self, task: Task) -> Text:
                speed = task.speed or 0
                return Text(f"{speed / 1e6:.0f} M/s" if speed >= 1e6 else f"{speed:.1f}/s" if speed else "")

        return *super()._columns(), Rate(), TextColumn("left"), TimeRemainingColumn()

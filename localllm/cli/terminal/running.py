"""A progress bar for a measurement, with the value so far and the time left. `stoppable` lets Ctrl-C end it after a
window."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import exp
from types import FrameType
from typing import TYPE_CHECKING

from localllm.cli.terminal.console import LoadProgress

if TYPE_CHECKING:
    from rich.progress import ProgressColumn


class RunningProgress(LoadProgress):
    """A progress bar that also shows `value` and the time left."""

    def __init__(self) -> None:
        super().__init__()
        self.value = ""

    @property
    def shown(self) -> bool:
        """Return whether the bar is visible."""
        return self._wanted

    def _columns(self) -> tuple[ProgressColumn, ...]:
        from rich.progress import ProgressColumn, Task, TextColumn, TimeRemainingColumn
        from rich.text import Text

        progress = self

        class Value(ProgressColumn):
            def render(self, task: Task) -> Text:
                return Text(progress.value if task.id == max(progress._tasks.values(), default=task.id) else "")

        return *super()._columns(), TextColumn("left"), TimeRemainingColumn(), Value()


class RunningPerplexity:
    """The perplexity so far (e to the mean negative log-likelihood), shown in the bar."""

    def __init__(self, progress: RunningProgress) -> None:
        self._progress = progress
        self._sum, self._count = 0.0, 0

    def add(self, total: float, count: int) -> None:
        """Add the sum of `count` negative log-likelihoods."""
        self._sum, self._count = self._sum + total, self._count + count
        if self._count:
            self._progress.value = f"perplexity {exp(min(self._sum / self._count, 700.0)):.4f}"


@contextmanager
def stoppable(progress: RunningProgress) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed. A second Ctrl-C raises KeyboardInterrupt."""
    pressed = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        progress.value = "stopping after this window; press Ctrl-C again to stop now without a result"

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)

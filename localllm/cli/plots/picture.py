"""The data of a plot of speeds: the roofline, the rates, and curves against depth, prompt length and threads.

rows -> `picture_of` -> Picture -> `drawing.draw` (matplotlib), or the table of the HTML page
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from localllm.cli.plots.runs import ResultRow, Run

SURE = 1.05  # a speed may exceed a well-measured limit by this factor
MOST_TESTS = 30  # maximum tests in the panel of all tests; the HTML page lists every test


@dataclass(frozen=True, slots=True)
class Roof:
    """The upper limits of a machine; 0 if unknown."""

    run: int
    gb: float  # memory bandwidth in GB/s
    gop: float  # int8 products in GOP/s
    disturbed: bool = False  # other programs ran during the measurement of the products

    @property
    def ridge(self) -> float:
        """The ridge point: operations per byte above which a kernel is compute-bound; 0 if unknown."""
        return self.gop / self.gb if self.gb else 0.0


@dataclass(frozen=True, slots=True)
class Point:
    """A test on the roofline."""

    run: int
    model: int
    label: str
    decodes: bool
    intensity: float  # operations per byte
    gop: float  # GOP/s


@dataclass(frozen=True, slots=True)
class Series:
    """A curve: the properties that its tests share, and (x, tokens/s, spread) of each test, sorted by x."""

    run: int
    label: str
    points: tuple[tuple[float, float, float], ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel of curves of tokens/s against one quantity."""

    title: str
    axis: str
    series: tuple[Series, ...]


@dataclass(frozen=True, slots=True)
class Bar:
    """A test and its speed in each run; the speed is 0 if the run lacks the test."""

    label: str
    rates: tuple[float, ...]
    spreads: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """All data of a plot."""

    title: str
    runs: tuple[str, ...]  # names of the runs, the new run first
    models: tuple[str, ...]
    roofs: tuple[Roof, ...]
    points: tuple[Point, ...]
    panels: tuple[Panel, ...]
    bars: tuple[Bar, ...]
    left_out: int  # number of tests without a bar


@dataclass(frozen=True, slots=True)
class _Axis:
    title: str
    label: str
    takes: Callable[[ResultRow], bool]
    value: Callable[[ResultRow], float]
    rest: Callable[[ResultRow], tuple[str, ...]]  # labels of the properties that the tests of a curve share


def _kind(row: ResultRow) -> str:
    """Return the name of the test without its depth: tg128."""
    return row.test.partition(" @ ")[0]


def _deep(row: ResultRow) -> str:
    return f"depth {row.depth}" if row.depth else ""


def _threads(row: ResultRow) -> str:
    return f"{row.threads} threads" if row.threads != 1 else "1 thread"


_AXES = (
    _Axis(
        "Speed against depth", "tokens in the cache", lambda row: not row.text, lambda row: row.depth,
        lambda row: (_kind(row), _threads(row)),
    ),
    _Axis(
        "Prompts: speed against their length", "rows (tokens of the prompt)",
        lambda row: not row.text and not row.answer, lambda row: row.prompt, lambda row: (_deep(row), _threads(row)),
    ),
    _Axis(
        "Speed against threads", "threads", lambda row: not row.text, lambda row: row.threads,
        lambda row: (_kind(row), _deep(row)),
    ),
)  # fmt: skip


def picture_of(runs: Sequence[Run]) -> Picture:
    """Return the picture of a new run, or of a new and an older run."""
    models = tuple(dict.fromkeys(row.model for run in runs for row in run.rows))
    numbered = [(number, row) for number, run in enumerate(runs) for row in run.rows]
    several, of_threads = len(models) > 1, len({row.threads for run in runs for row in run.rows}) > 1
    panels = (_panel(axis, numbered, several) for axis in _AXES)
    bars = _bars(runs, several, of_threads)
    return Picture(
        title=" on ".join(word for word in ("" if several else models[0], _machine(runs[0], of_threads)) if word),
        runs=tuple(run.name for run in runs),
        models=models,
        roofs=tuple(roof for number, run in enumerate(runs) if (roof := _roof(number, run)) is not None),
        points=tuple(
            Point(number, models.index(row.model), _name(row, of_threads), not row.prompt, row.intensity, row.gop)
            for number, row in numbered
            if row.intensity and row.gop
        ),
        panels=tuple(panel for panel in panels if panel is not None),
        bars=tuple(bars[:MOST_TESTS]),
        left_out=max(len(bars) - MOST_TESTS, 0),
    )


def _machine(run: Run, of_threads: bool) -> str:
    """Return the processor of a run, with the number of threads if all tests used the same number."""
    words, _, last = run.processor.rpartition(", ")
    return words if of_threads and "thread" in last else run.processor or "this machine"


def _roof(number: int, run: Run) -> Roof | None:
    """Return the highest limits measured in a run, before it or around one of its tests.

    A test that exceeds the measured int8 products shows that the measurement was disturbed, so that limit is omitted.
    """
    gb = max((max(row.roof, row.machine_gb) for row in run.rows), default=0.0)
    gop = max((row.machine_gop for row in run.rows), default=0.0)
    disturbed = any(row.gop > SURE * gop for row in run.rows)
    return Roof(number, gb, 0.0 if disturbed else gop, disturbed and bool(gop)) if gb else None


def _panel(axis: _Axis, rows: Sequence[tuple[int, ResultRow]], several: bool) -> Panel | None:
    """Return a panel of the curves with at least two points, or None if no curve has two."""
    curves: dict[tuple[int, str], dict[float, tuple[float, float, float]]] = {}
    for number, row in rows:
        if axis.takes(row):
            words = (row.model if several else "", *axis.rest(row), row.placed)
            label = ", ".join(word for word in words if word)
            x = axis.value(row)
            curves.setdefault((number, label), {})[x] = (x, row.rate, row.spread)
    series = [
        Series(number, label, tuple(found[x] for x in sorted(found)))
        for (number, label), found in curves.items()
        if len(found) > 1
    ]
    return Panel(axis.title, axis.label, tuple(series)) if series else None


def _bars(runs: Sequence[Run], several: bool, of_threads: bool) -> list[Bar]:
    found: dict[tuple[object, ...], list[ResultRow | None]] = {}
    for number, run in enumerate(runs):
        for row in run.rows:
            found.setdefault(row.key, [None] * len(runs))[number] = row
    bars = []
    for rows in found.values():
        first = next(row for row in rows if row is not None)
        words = (first.model if several else "", _name(first, of_threads))
        bars.append(
            Bar(
                ", ".join(word for word in words if word),
                tuple(row.rate if row is not None else 0.0 for row in rows),
                tuple(row.spread if row is not None else 0.0 for row in rows),
            )
        )
    return bars


def _name(row: ResultRow, threads: bool) -> str:
    words = (row.test, _threads(row) if threads else "", row.placed)
    return ", ".join(word for word in words if word)

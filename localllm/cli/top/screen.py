"""The screen of `localllm top`, drawn by rich for any width from 40 columns; `--once` prints it too.

A wide terminal shows more columns in the table of requests. All else is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from localllm.base.printable import printable
from localllm.cli.top.asking import SlotSample
from localllm.cli.top.numbers import Percentile, ReplicaCounts, Times, View

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

WIDE, MEDIUM = 78, 56  # minimum terminal columns for all columns of the table of requests, and for most of them
BAR = 20  # width of the KV cache bar in characters
ENOUGH = 8  # minimum tokens for a decode speed, since the first tokens come in bursts
_STEPS = "▁▂▃▄▅▆▇█"
_ABOVE = 20  # lines of the screen without the table of requests


def screen(view: View, address: str, width: int, height: int, blocks: bool, remark: str = "") -> RenderableType:
    """Return the whole screen. `blocks` is true if the terminal shows block characters; `remark` is the text of the
    last line."""
    from rich.console import Group
    from rich.text import Text

    models = ", ".join(view.models) or "no model loaded"
    known = (f"localllm {view.version}" if view.version else "", f"up {_long(view.uptime)}" if view.uptime else "")
    since = f"last {view.since:.0f} s" if view.since is not None else "since the start"
    parts: list[RenderableType] = [
        _line(address, "bold"),
        _line(", ".join(word for word in (models, *known) if word)),
        Text(),
        _pairs(view),
        *([_replicas(view.replicas, width)] if view.replicas is not None else []),
        _cache(view, BAR if width >= MEDIUM else BAR // 2, blocks),
        *([_history(view, min(width - 20, 60))] if blocks and len(view.history) > 3 and width >= MEDIUM else []),
        Text(),
        _times(view.times),
        _line(f"{since} (from histograms)", "dim"),
        Text(),
        _answers(view, width, max(height - _ABOVE - (view.replicas is not None), 1)),
    ]
    if remark:
        parts.append(Text(printable(remark, None), style="dim"))  # wraps onto more lines if needed
    return Group(*parts)


def _line(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(printable(text, None), style=style, no_wrap=True, overflow="ellipsis")


def _pairs(view: View) -> Table:
    """Return the activity and the rates as names and values in columns."""
    table = _grid(4, left=(0, 2))
    running = f"{count(view.running)} of {view.slot_count}" if view.slot_count else count(view.running)
    for row in (
        ("running", running, "waiting", count(view.waiting)),
        ("answer t/s", rate(view.answer_rate), "prompt t/s", rate(view.prompt_rate)),
        ("answers", count(view.answers), "cached", share(view.cached_share)),
        ("requests", count(view.requests), "errors", count(view.errors)),
        *([("drafts", share(view.accepted_share), "", "")] if view.accepted_share is not None else []),
    ):
        table.add_row(*row)
    return table


def _replicas(found: ReplicaCounts, width: int) -> Text:
    """Return a line on the replicas, as far as it fits: how many answer, what was lost, and their stages."""
    restarted = f", {count(found.restarted)} restarted" if found.restarted else ""
    parts = [f"{count(found.lost)} lost, {count(found.moved)} moved"] if found.lost or found.moved else []
    each = f"{found.stages} stages each ({1000 * found.hop_seconds:.2f} ms a hop{restarted})"
    parts += [each] if found.stages > 1 else []
    line = f"replicas    {found.alive} of {found.wanted}"
    for part in parts:
        line += f", {part}" if len(line) + len(part) + 2 <= width else ""
    return _line(line)


def _cache(view: View, bar: int, blocks: bool) -> Text:
    """Return a bar of the KV cache blocks: in use, kept for later prompts, and free."""
    if not view.blocks:
        return _line("cache       -")
    used, kept = (min(part / view.blocks, 1.0) for part in (view.used, view.kept))
    line = _line("cache  ")
    first, both = round(bar * used), round(bar * min(used + kept, 1.0))
    line.append(("█" if blocks else "#") * first, style="green")
    line.append(("▒" if blocks else "=") * (both - first), style="cyan")
    line.append(("░" if blocks else ".") * (bar - both), style="dim")
    line.append(f" {share(used)} used, {share(kept)} kept")
    return line


def _history(view: View, width: int) -> Text:
    most = max(view.history) or 1.0
    steps = "".join(_STEPS[min(int(8 * each / most), 7)] for each in view.history[-width:])
    line = _line("answer t/s  ")
    line.append(steps, style="green")
    return line


def _times(times: tuple[Times, ...]) -> Table:
    table = _grid(5)
    table.add_row("", "p50", "p90", "p99", "count", style="dim")
    for each in times:
        table.add_row(each.name, *(_percentile(one) for one in each.percentiles), count(each.count))
    return table


def _answers(view: View, width: int, most: int) -> Table | Text:
    """Return a line for each running request, as far as they fit."""
    if not view.writing:
        return _line("no answers are running" if view.slot_count else "the server does not report its slots", "dim")
    names = ("slot", "state", "prompt", "cached", "written", "left", "t/s")
    shown = names if width >= WIDE else tuple(n for n in names if n != "left") if width >= MEDIUM else _NARROW
    table = _grid(len(shown), left=(0, 1))
    table.add_row(*shown, style="dim")
    for each in view.writing[:most]:
        table.add_row(*(_CELLS[name](each) for name in shown))
    if len(view.writing) > most:
        table.add_row("...", f"{len(view.writing) - most} more", *[""] * (len(shown) - 2))
    return table


def _state(slot: SlotSample) -> str:
    if slot.written:
        return "answer"
    done = (slot.processed + slot.cached) / slot.prompt if slot.prompt else 0.0
    return f"prompt {min(done, 1.0):.0%}"


_NARROW = ("slot", "state", "written", "t/s")
_CELLS: dict[str, Callable[[SlotSample], str]] = {
    "slot": lambda slot: str(slot.number),
    "state": _state,
    "prompt": lambda slot: count(slot.prompt),
    "cached": lambda slot: count(slot.cached),
    "written": lambda slot: count(slot.written),
    "left": lambda slot: "no limit" if slot.left < 0 else count(slot.left),
    "t/s": lambda slot: rate(slot.rate if slot.written >= ENOUGH else None),
}


def _grid(columns: int, left: tuple[int, ...] = (0,)) -> Table:
    """Return a borderless table with names in the columns `left` and numbers in the others."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2, 0, 0))
    for number in range(columns):
        table.add_column(justify="left" if number in left else "right", no_wrap=True, min_width=5)
    return table


def count(value: float | None) -> str:
    """Return a count in at most seven characters: 950, 12.3k, 4.5M, 1e+18; "-" if unknown."""
    if value is None:
        return "-"
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= unit:
            small = value / (1e3 if name == "k" else unit)
            return f"{small:.1f}{name}" if small < 1e4 else f"{value:.0e}"
    return f"{value:.0f}"


def rate(value: float | None) -> str:
    """Return a rate: 0.0, 45.2, 1234."""
    return "-" if value is None else f"{value:.1f}" if value < 1000 else count(value)


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def seconds(value: float) -> str:
    """Return a short time: 0.45 ms, 12 ms, 1.5 s, 12 min."""
    if value < 0.9995:
        return f"{1000 * value:.{2 if value < 0.00995 else 0}f} ms"
    return f"{value:.1f} s" if value < 100 else _long(value)


def _percentile(one: Percentile | None) -> str:
    return "-" if one is None else f"{'>' if one.beyond else ''}{seconds(one.seconds)}"


def _long(value: float) -> str:
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if value >= unit:
            return f"{count(value // unit)} {name}"
    return f"{value:.0f} s"

"""The style of all panels: colours, legends, and axis labels."""

from __future__ import annotations

from collections.abc import Sequence
from math import log10
from typing import Any

WIDTH, HEIGHT = 5.6, 4.2  # size of a panel in inches
LONGEST, ACROSS = 52, 96  # maximum characters of a label, and of a line of a legend
INK, PAPER, LINES = "#1f2328", "#ffffff", "#8c959f"
DARK = {INK: "#e6edf3", PAPER: "#0d1117", LINES: "#6e7681"}
COLOURS = ("#0a7bc2", "#d1570a", "#0f8a5f", "#a64fbf", "#8a7a10", "#c23b60")
MARKERS = ("o", "s", "^", "D", "v")  # 5 markers and 6 colours give 30 distinct pairs
SETTINGS = {
    "svg.hashsalt": "localllm",
    "svg.fonttype": "none",
    "text.parse_math": False,  # model names may contain a dollar sign
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.edgecolor": LINES,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": LINES,
    "grid.alpha": 0.35,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "figure.facecolor": PAPER,
    "axes.facecolor": "none",
    "savefig.facecolor": PAPER,
}


def colour(number: int) -> str:
    """Return the colour of the n-th model, curve or run."""
    return COLOURS[number % len(COLOURS)]


def handle(marker: str, colour: str, label: str, line: str = "", hollow: bool = False) -> Any:
    """Return a legend entry."""
    from matplotlib.lines import Line2D

    shown = f" {short(label)}"  # matplotlib hides labels that begin with _
    fill = "none" if hollow else colour
    return Line2D([], [], linestyle=line, marker=marker, markersize=5, color=colour, markerfacecolor=fill, label=shown)


def below(axes: Any, handles: Sequence[Any], height: float = HEIGHT) -> None:
    """Put a legend below a panel of this height in inches, outside the axes."""
    if handles:
        place = (0.5, -0.6 / height)
        longest = max(len(each.get_label()) for each in handles)
        across = max(min(len(handles), ACROSS // longest, 3), 1)
        axes.legend(handles=handles, loc="upper center", bbox_to_anchor=place, ncols=across)


def short(text: str, most: int = LONGEST) -> str:
    """Truncate a text so that a panel keeps room for its data."""
    return text if len(text) <= most else text[: most - 3] + "..."


def plain_axis(axis: Any) -> None:
    """Label a logarithmic axis with 1, 2, 5, 10, or only with powers of ten if there are many."""
    from matplotlib.ticker import LogLocator, NullLocator

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(10, subs=(1.0,) if log10(high / low) > 2.5 else (1.0, 2.0, 5.0), numticks=12))
    axis.set_major_formatter(number_on_axis)
    axis.set_minor_locator(NullLocator())


def number_on_axis(value: float, place: int = 0) -> str:
    """Format a value for an axis: 512, 2048, 10k, 1.5M."""
    for most, unit, name in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if value >= most:
            return f"{value / unit:g}{name}"
    return f"{value:g}"

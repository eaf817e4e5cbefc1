"""Draw a plot with matplotlib as SVG or PNG. The SVG is reproducible: it has no dates, and its ids are hashes.

An SVG has the colours of both themes. Its style sheet swaps foreground and background if the reader's theme is dark,
and the data colours have enough contrast on both backgrounds. Text remains text, not outlines. A PNG has a white
background.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any
from warnings import catch_warnings, filterwarnings

from localllm.base.errors import LocalLLMError
from localllm.cli.plots.picture import Panel, Picture
from localllm.cli.plots.roofline import draw_roofline
from localllm.cli.plots.style import (
    DARK,
    HEIGHT,
    INK,
    LINES,
    MARKERS,
    SETTINGS,
    WIDTH,
    below,
    colour,
    handle,
    number_on_axis,
    plain_axis,
    short,
)

PNG_DOTS = 120  # dots per inch
BAR = 0.22  # height of one test in the panel of all tests, in inches
MARGIN = 0.12  # around a panel and the title, in inches
MOST_CURVES = 9  # maximum curves per panel, so that the legend stays short


class PlotError(LocalLLMError):
    """The picture cannot be drawn on this system."""


def check_installed() -> None:
    """Raise PlotError, with the installation command, if matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise PlotError(f"--plot needs matplotlib ({error}); pip install 'localllm[plot]'") from None


def draw(picture: Picture, kind: str, titled: bool = True) -> bytes:
    """Return a picture as "svg" or "png"."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with mpl.rc_context(SETTINGS), catch_warnings():
        filterwarnings("ignore", "Glyph ")  # glyphs that the font lacks; an SVG viewer may have them
        roofline = bool(picture.points or picture.roofs)
        count = roofline + len(picture.panels)
        rows = -(-count // 2)
        heights = [HEIGHT] * rows + [1.2 + BAR * len(picture.bars)]
        figure = Figure(
            figsize=(2 * WIDTH, sum(heights) + 0.7), layout=ConstrainedLayoutEngine(h_pad=MARGIN, w_pad=MARGIN)
        )
        if titled:
            figure.suptitle(short(picture.title, 100), color=INK, fontsize=12)
        grid = figure.add_gridspec(rows + 1, 2, height_ratios=heights)
        wide = count % 2  # the last panel of an odd number takes the whole row
        places = [grid[n // 2, n % 2] if n < count - wide else grid[n // 2, :] for n in range(count)]
        axes = iter([figure.add_subplot(place) for place in places])
        if roofline:
            draw_roofline(next(axes), picture)
        for panel in picture.panels:
            _curves(next(axes), panel, picture)
        _rates(figure.add_subplot(grid[rows, :]), picture)
        out = BytesIO()
        told = {"svg": {"Date": None, "Creator": None, "Title": picture.title}, "png": {"Software": None}}
        figure.savefig(out, format=kind, dpi=PNG_DOTS, metadata=told[kind])
    return _themed(out.getvalue()) if kind == "svg" else out.getvalue()


def _curves(axes: Any, panel: Panel, picture: Picture) -> None:
    """Plot tokens/s against one quantity, with error bars for the spread over the repetitions."""
    labels = list(dict.fromkeys(series.label for series in panel.series))[:MOST_CURVES]
    shown = [series for series in panel.series if series.label in labels]
    for series in shown:
        number = labels.index(series.label)
        places, heights, spreads = zip(*series.points, strict=True)
        axes.errorbar(
            places, heights, yerr=spreads, color=colour(number), marker=MARKERS[number % len(MARKERS)], markersize=5,
            linestyle="--" if series.run else "-", linewidth=1.4, capsize=2.5,
            markerfacecolor="none" if series.run else colour(number),
        )  # fmt: skip
    left = len({series.label for series in panel.series}) - len(labels)
    axes.set_title(panel.title + (f" ({left} more curves not shown)" if left else ""))
    axes.set(xlabel=panel.axis, ylabel="tokens per second")
    rates = [rate for series in shown for _, rate, _ in series.points]
    if max(rates) > 8 * min(rates):
        axes.set_yscale("log")
        plain_axis(axes.yaxis)
    else:
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(number_on_axis)
    xs = sorted({x for series in shown for x, _, _ in series.points})
    if xs[0] > 0 and xs[-1] > 8 * xs[0]:
        axes.set_xscale("log")
    axes.set_xticks(xs if len(xs) <= 8 else xs[:: -(-len(xs) // 8)])
    axes.set_xticks([], minor=True)
    axes.xaxis.set_major_formatter(number_on_axis)
    lines = [handle(MARKERS[n % len(MARKERS)], colour(n), label, "-") for n, label in enumerate(labels)]
    if len(picture.runs) > 1:
        lines += [handle("", LINES, name, "--" if run else "-") for run, name in enumerate(picture.runs)]
    below(axes, lines)


def _rates(axes: Any, picture: Picture) -> None:
    """Plot all tests, one per line, with a point for each run on a logarithmic axis."""
    bars = list(enumerate(picture.bars))
    for place, bar in bars:
        if min(bar.rates) > 0:
            axes.plot(bar.rates, [place] * len(bar.rates), color=LINES, linewidth=1.2, zorder=1)
        axes.annotate(
            _told(bar.rates), (max(bar.rates), place), (7, 0), textcoords="offset points", va="center", fontsize=8
        )
    for run in range(len(picture.runs)):
        found = [(bar.rates[run], place) for place, bar in bars if bar.rates[run]]
        if found:
            axes.plot(
                *zip(*found, strict=True), linestyle="none", marker="o", markersize=6, color=colour(run),
                markerfacecolor="none" if run else colour(run),
            )  # fmt: skip
    axes.set_yticks(range(len(bars)), [short(bar.label) for bar in picture.bars])
    axes.set_ylim(len(bars) - 0.5, -0.5)
    rates = [rate for bar in picture.bars for rate in bar.rates if rate]
    axes.set(
        xscale="log", xlabel="tokens per second", xlim=(min(rates) / 1.3, max(rates) * 2.5)
    )  # with room for labels
    plain_axis(axes.xaxis)
    rest = f" ({picture.left_out} more not shown)" if picture.left_out else ""
    axes.set_title(f"All tests{rest}")
    if len(picture.runs) > 1:
        marks = [handle("o", colour(run), name, "", bool(run)) for run, name in enumerate(picture.runs)]
        below(axes, marks, BAR * len(bars))


def _told(rates: Sequence[float]) -> str:
    """Return the label of a test's speeds: "48.1", or "48.1, before 40.2 = 1.20x"."""
    new, *old = (f"{rate:,.{0 if rate >= 1000 else 1}f}" if rate else "" for rate in rates)
    if not old or not old[0]:
        return new
    return f"{new}, before {old[0]} = {rates[0] / rates[1]:.2f}x" if new else f"before {old[0]}"


def _themed(svg: bytes) -> bytes:
    """Add the colours of a dark theme."""
    rules = "".join(
        f'[style*="{name}: {light}"]{{{name}:{dark} !important}}'
        for light, dark in DARK.items()
        for name in ("fill", "stroke")
    )
    style = f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>"
    head, opening, rest = svg.decode("utf-8").partition("<svg")
    tag, closing, body = rest.partition(">")
    return f"{head}{opening}{tag}{closing}\n {style}{body}".encode()

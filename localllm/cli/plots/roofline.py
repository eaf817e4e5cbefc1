"""The roofline: operations per second against operations per byte, under the limits of bandwidth and arithmetic.

A test left of the ridge is limited by memory bandwidth, a test right of the ridge by arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log
from typing import Any

from localllm.cli.plots.picture import Picture, Point, Roof
from localllm.cli.plots.style import INK, LINES, below, colour, handle, plain_axis

ROOM = (330.0, 210.0)  # approximate size of the panel in points
LETTER, LINE = 4.3, 9.0  # width of a label's letter, and height of a line, in points
_PLACES = ((6, 3), (6, -9), (-6, 3), (-6, -9), (6, 13), (6, -19), (-6, 13), (-6, -19))  # offsets of labels


def draw_roofline(axes: Any, picture: Picture) -> None:
    """Draw the roofs and the tests. The markers of the older run are hollow and have no labels."""
    axes.set(xscale="log", yscale="log", xlabel="operations per byte read", ylabel="billions of operations per second")
    axes.set_title("Roofline")
    at = [point.intensity for point in picture.points] + [roof.ridge for roof in picture.roofs if roof.ridge]
    low, high = min(at, default=1.0) / 3, max(at, default=100.0) * 4
    legend = []
    for roof in picture.roofs:
        style = {"color": LINES if roof.run else INK, "linestyle": "--" if roof.run else "-"}
        corner = min(max(roof.ridge, low), high) if roof.gop else high
        ends = [(low, low * roof.gb), (corner, corner * roof.gb), *([(high, roof.gop)] if roof.gop else [])]
        axes.plot(*zip(*ends, strict=True), linewidth=1.3, **style)
        legend.append(handle("", style["color"], _told(picture, roof), style["linestyle"]))
    heights = [point.gop for point in picture.points]
    heights += [height for roof in picture.roofs for height in (roof.gop or roof.gb * high,)]
    bottom, top = min(heights) / 3, max(heights) * 2
    for point in picture.points:
        mark, own = "o" if point.decodes else "s", colour(point.model)
        fill = "none" if point.run else own
        axes.plot([point.intensity], [point.gop], marker=mark, markersize=6, color=own, markerfacecolor=fill)
    new = [point for point in picture.points if point.run == 0]
    for point, (right, up) in _labels(new, (low, high), (bottom, top)):
        axes.annotate(
            point.label, (point.intensity, point.gop), (right, up), textcoords="offset points", fontsize=7.5,
            ha="left" if right > 0 else "right", color=colour(point.model),
        )  # fmt: skip
    axes.set(xlim=(low, high), ylim=(bottom, top))
    plain_axis(axes.xaxis)
    plain_axis(axes.yaxis)
    kinds = dict.fromkeys((point.run, point.decodes) for point in picture.points)
    for run, decodes in kinds:
        name = ("decode" if decodes else "prefill") + (f" ({picture.runs[run]})" if len(picture.runs) > 1 else "")
        legend.append(handle("o" if decodes else "s", colour(0), name, "", bool(run)))
    if len(picture.models) > 1:
        legend += [handle("_", colour(number), name) for number, name in enumerate(picture.models)]
    below(axes, legend)


def _told(picture: Picture, roof: Roof) -> str:
    computes = f", {roof.gop:,.0f} GOP/s, ridge {roof.ridge:.3g} ops/byte" if roof.gop else ""
    computes += ", measured while other programs ran" if roof.disturbed else ""
    return f"{roof.gb:.3g} GB/s{computes}" + (f" ({picture.runs[roof.run]})" if len(picture.runs) > 1 else "")


def _labels(
    points: list[Point], across: tuple[float, float], along: tuple[float, float]
) -> Iterator[tuple[Point, tuple[int, int]]]:
    """Yield each point whose label fits, and the offset of the label to the right and upwards, in points."""
    spots = {point: (_share(point.intensity, across) * ROOM[0], _share(point.gop, along) * ROOM[1]) for point in points}
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in spots.values()]
    for point, (x, y) in spots.items():
        long = LETTER * len(point.label)
        for right, up in _PLACES:
            start = x + right - (long if right < 0 else 0)
            box = (start, y + up, start + long, y + up + LINE)
            if box[0] > 0 and box[2] < ROOM[0] and not any(_meet(box, other) for other in taken):
                taken.append(box)
                yield point, (right, up)
                break


def _share(value: float, limits: tuple[float, float]) -> float:
    return log(value / limits[0]) / log(limits[1] / limits[0])


def _meet(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]

"""The timeline of an answer as SVG: forward passes of the model and the draft model, and token choices."""

from __future__ import annotations

from collections.abc import Iterator

from localllm.explain.html import Node, element
from localllm.explain.record import Record
from localllm.explain.text import plural, time

WIDTH, LEFT, LANE, HEIGHT = 1000, 90, 26, 18
LEAST = 0.6  # minimum width of a bar in SVG units
TICKS = 5
KEYS = (
    ("prompt", "prompt"),
    ("decode", "one token"),
    ("verify", "several tokens, to verify drafts"),
    ("draft", "draft model"),
    ("sample", "choosing a token"),
)


def timeline(record: Record) -> Iterator[Node]:
    """Yield the picture and its legend."""
    total = record.ended or 1.0
    lanes = ["model", *(["draft"] if any(step.who == "draft" for step in record.steps) else []), "sampling"]
    top = {name: number * LANE for number, name in enumerate(lanes)}
    first = record.choices[0].step if record.choices else len(record.steps)
    used = set[str]()

    def bar(lane: str, sort: str, began: float, ended: float, title: str) -> Node:
        used.add(sort)
        x, width = LEFT + began / total * (WIDTH - LEFT), (ended - began) / total * (WIDTH - LEFT)
        place = {"x": f"{x:.2f}", "y": str(top[lane]), "width": f"{max(width, LEAST):.2f}", "height": str(HEIGHT)}
        return element("rect", element("title", title), cls=sort, **place)

    parts = [element("text", name, x="0", y=str(y + HEIGHT - 4)) for name, y in top.items()]
    for number, step in enumerate(record.steps):
        sort = "draft" if step.who == "draft" else "decode" if len(step.tokens) == 1 else "verify"
        sort = "prompt" if number <= first and step.who == "model" else sort
        title = (
            f"pass {number + 1}: {plural(len(step.tokens), 'token')} from position {step.first}, {time(step.seconds)}"
        )
        parts.append(bar("draft" if sort == "draft" else "model", sort, step.began, step.ended, title))
    for number, choice in enumerate(record.choices, 1):
        title = f"token {number}, {time(choice.ended - choice.began)}"
        parts.append(bar("sampling", "sample", choice.began, choice.ended, title))
    bottom = LANE * len(lanes)
    for tick in range(TICKS + 1):
        x, edge = LEFT + tick / TICKS * (WIDTH - LEFT), {0: "start", TICKS: "end"}.get(tick, "middle")
        parts.append(element("line", cls="axis", x1=f"{x:.1f}", x2=f"{x:.1f}", y1="0", y2=str(bottom)))
        at = {"x": f"{x:.1f}", "y": str(bottom + 14)}
        parts.append(element("text", time(tick / TICKS * total), text_anchor=edge, **at))
    told = f"{plural(len(record.steps), 'pass')} and {plural(len(record.choices), 'choice')} over {time(total)}"
    yield element("svg", *parts, viewBox=f"0 0 {WIDTH} {bottom + 20}", role="img", aria_label=told)
    keys = [(element("span", "", cls=f"key {sort}"), text) for sort, text in KEYS if sort in used]
    yield element("p", *(part for pair in keys for part in pair), cls="soft")

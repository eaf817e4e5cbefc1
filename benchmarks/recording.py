"""Record a terminal session: docs/pictures/session.cast for asciinema, and an animated session.svg for the README.

    pip install pexpect pyte
    python benchmarks/recording.py

The program runs in a pseudo-terminal of 80 by 24 characters. Keys are typed at human speed, and pauses are cut to two
seconds. Nothing else is edited: the recording shows the program's output.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import pexpect
import pyte

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
COLUMNS, ROWS = 80, 24
PAUSE = 2.0  # longest pause in seconds
KEYS = 0.06  # seconds between two keys
PROMPT = r">>> "
# Inputs to type, each with the output to wait for afterwards.
SESSION = (
    ("localllm chat --temp 0\r", PROMPT),
    ("Hello!\r", PROMPT),
    ("Who are you?\r", PROMPT),
    ("I want to book a table for two in San Jose.\r", PROMPT),
    ("/tokens\r", PROMPT),
    ("\x04", r"\$ $"),
    ("localllm bench demo -p 128 -n 64 -r 3\r", r"\n[^\n]*\$ $"),
)
WIDTH, HEIGHT, MARGIN = 8.4, 18, 12  # size of a character, and the margin, in SVG units
COLOURS = {
    "black": "#1d1f21", "red": "#cc6666", "green": "#98b869", "brown": "#d9b26b", "blue": "#81a2be",
    "magenta": "#b294bb", "cyan": "#8abeb7", "white": "#c5c8c6", "default": "#d8dee4",
}  # fmt: skip


@dataclass(slots=True)
class Recording:
    """The terminal's output, with times in seconds since the start."""

    events: list[tuple[float, str]] = field(default_factory=list)

    def cut(self) -> list[tuple[float, str]]:
        """Return the events with pauses cut to PAUSE."""
        found, now, before = [], 0.0, 0.0
        for at, text in self.events:
            now += min(at - before, PAUSE)
            before = at
            found.append((now, text))
        return found


def record() -> Recording:
    """Run the session in a shell."""
    with tempfile.TemporaryDirectory() as home:
        environment = {
            **os.environ, "HOME": home, "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", f"{Path.home()}/.cache"),
            "PS1": "$ ", "TERM": "xterm-256color", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }  # fmt: skip
        shell = pexpect.spawn(
            "/bin/bash", ["--norc", "--noprofile"], env=environment, dimensions=(ROWS, COLUMNS), encoding="utf-8",
            cwd=str(ROOT),
        )  # fmt: skip
        made, began, seen = Recording(), time.monotonic(), ""
        screen = pyte.Screen(COLUMNS, ROWS)
        stream = pyte.Stream(screen)

        def read(pattern: str, seconds: float) -> None:
            nonlocal seen
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                try:
                    text = shell.read_nonblocking(4096, timeout=0.05)
                except pexpect.TIMEOUT:
                    if pattern and re.search(pattern, seen):
                        return
                    continue
                made.events.append((time.monotonic() - began, text))
                seen += text
                stream.feed(text)
                if "\x1b[6n" in text:  # the program queries the terminal's cursor position
                    shell.send(f"\x1b[{screen.cursor.y + 1};{screen.cursor.x + 1}R")
            assert not pattern, f"{pattern!r} did not come: {seen!r}"

        read(r"\$ ", 10)
        for typed, wanted in SESSION:
            read("", 0.8)
            for key in typed[:-1]:
                shell.send(key)
                read("", KEYS)
            seen = ""
            shell.send(typed[-1])
            read(wanted, 120)
        shell.close(force=True)
    return made


def cast(recording: Recording) -> str:
    """Return the recording in asciinema's cast format, version 2."""
    head = {"version": 2, "width": COLUMNS, "height": ROWS, "title": "localllm"}
    return "\n".join(json.dumps(line) for line in [head, *([round(at, 3), "o", text] for at, text in recording.cut())])


def screens(recording: Recording) -> Iterator[tuple[float, list[list[Any]]]]:
    """Yield each screen that lasted at least a tenth of a second: when it appeared, and its lines of characters."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream, events = pyte.Stream(screen), recording.cut()
    shown: list[list[Any]] = []
    for i, (at, text) in enumerate(events):
        stream.feed(text)
        if i + 1 < len(events) and events[i + 1][0] - at < 0.1:
            continue
        lines = [[screen.buffer[row][column] for column in range(COLUMNS)] for row in range(ROWS)]
        if lines != shown:
            shown = lines
            yield at, lines


def svg(recording: Recording) -> str:
    """Return an SVG that plays the recording in a loop."""
    frames = list(screens(recording))
    length = frames[-1][0] + 4.0
    known: dict[tuple[int, str], str] = {}  # a line that several screens share is drawn once
    uses = []
    for number, (at, lines) in enumerate(frames):
        until = frames[number + 1][0] if number + 1 < len(frames) else length
        drawn = []
        for row, line in enumerate(lines):
            text = spans(line)
            if text:
                name = known.setdefault((row, text), f"l{len(known)}")
                drawn.append(f'<use href="#{name}"/>')
        times = ";".join(f"{min(max(t / length, 0), 1):.4f}" for t in (0, at, until))
        uses.append(
            f'<g visibility="hidden">{"".join(drawn)}<animate attributeName="visibility" calcMode="discrete" '
            f'values="hidden;visible;hidden" keyTimes="{times}" dur="{length:.2f}s" repeatCount="indefinite"/></g>'
        )
    defined = "".join(
        f'<text id="{name}" x="{MARGIN}" y="{MARGIN + HEIGHT * (row + 0.8):.1f}" xml:space="preserve">{text}</text>'
        for (row, text), name in known.items()
    )
    wide, high = 2 * MARGIN + WIDTH * COLUMNS, 2 * MARGIN + HEIGHT * ROWS
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {high:.0f}" width="{wide:.0f}">'
        f'<title>A session with localllm</title><rect width="100%" height="100%" rx="8" fill="#1d2128"/>'
        f'<g font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14" fill="{COLOURS["default"]}">'
        f"<defs>{defined}</defs>{''.join(uses)}</g></svg>\n"
    )


def spans(line: list[Any]) -> str:
    """Return the characters of a line as SVG text, with each run of one style at its column."""
    found, column = [], 0
    for style, run in groupby(line, key=lambda c: (c.fg, c.bold, c.italics, c.reverse)):
        text = "".join(c.data for c in run)
        if text.strip():
            colour, bold, italic, _ = style
            fill = COLOURS.get(colour, f"#{colour}" if re.fullmatch("[0-9a-f]{6}", colour) else COLOURS["default"])
            more = f' fill="{fill}"' if fill != COLOURS["default"] else ""
            more += ' font-weight="bold"' if bold else ""
            more += ' font-style="italic"' if italic else ""
            start = MARGIN + WIDTH * (column + len(text) - len(text.lstrip()))
            shown = text.strip()
            found.append(f'<tspan x="{start:.1f}" textLength="{WIDTH * len(shown):.1f}"{more}>{escape(shown)}</tspan>')
        column += len(text)
    return "".join(found)


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    made = record()
    (PICTURES / "session.cast").write_text(cast(made) + "\n", encoding="utf-8")
    (PICTURES / "session.svg").write_text(svg(made), encoding="utf-8")


if __name__ == "__main__":
    main()

"""How an answer is displayed: unchanged in a pipe or with --plain, and as Markdown after the reasoning on a terminal.

The text of a model is untrusted. On a terminal all text passes through `printable` first.
"""

from __future__ import annotations

import os
from time import perf_counter
from typing import Protocol, TextIO, cast

from localllm.base.printable import printable
from localllm.cli.options import DisplayOptions
from localllm.cli.terminal.console import StreamGuard, raw
from localllm.cli.terminal.markdown import DIM, Markdown
from localllm.cli.terminal.wrapping import Wrapped, painted


class Shown(Protocol):
    """Displays the parts of one answer."""

    parted: bool  # whether reasoning arrives separately from content

    def reasoning(self, text: str) -> None: ...
    def content(self, text: str) -> None: ...
    def end(self) -> None:
        """End the answer's last line."""


def shown_on(stream: TextIO, display: DisplayOptions, markdown: bool = True) -> Shown:
    """Return the display for a stream. Without `markdown` a terminal only wraps words."""
    out = raw(stream)
    if not out.isatty() or os.environ.get("TERM", "dumb") == "dumb" or display.plain:
        return PlainShown(cast(TextIO, StreamGuard(out)) if out.isatty() else out, display.hide_think)
    return MarkdownShown(out, display.hide_think, not os.environ.get("NO_COLOR"), markdown)


class PlainShown:
    """Writes the text as it arrives, with the reasoning unless it is hidden."""

    def __init__(self, out: TextIO, hide: bool) -> None:
        self._out, self.parted = out, hide
        self._last = "\n"

    def reasoning(self, text: str) -> None:
        """Drop the reasoning. It arrives separately only if it is hidden."""

    def content(self, text: str) -> None:
        if text:
            self._out.write(text)
            self._out.flush()
            self._last = text[-1]

    def end(self) -> None:
        if self._last != "\n":
            self._out.write("\n")
            self._out.flush()


class MarkdownShown:
    """Renders Markdown, wraps words, and dims the reasoning or shows only its duration."""

    parted = True

    def __init__(self, out: TextIO, hide: bool, colours: bool, markdown: bool = True) -> None:
        self._out, self._hide = Wrapped(out), hide
        self._dim = DIM if colours else ""
        styled = colours and markdown  # without styles, the Markdown markers must stay visible
        self._markdown = Markdown(self._out) if styled else None
        self._thinking = False
        self._began, self._pieces = 0.0, 0

    def reasoning(self, text: str) -> None:
        if not self._thinking:
            self._end_content()
            self._thinking, self._began, self._pieces = True, perf_counter(), 0
            if self._hide:
                self._out.whole(painted("thinking ...", self._dim), 12)
        self._pieces += 1
        if not self._hide:
            self._lines(printable(text, None, keep="\n\t"), self._dim)
        self._out.flush()

    def content(self, text: str) -> None:
        if self._thinking:
            self._end_reasoning()
        text = printable(text, None, keep="\n\t")
        if self._markdown is not None:
            self._markdown.text(text)
        else:
            self._lines(text, "")
            self._out.flush()

    def end(self) -> None:
        if self._thinking:
            self._end_reasoning()
        self._end_content()

    def _lines(self, text: str, style: str) -> None:
        for number, line in enumerate(text.split("\n")):
            if number:
                self._out.line()
            self._out.text(line, style)

    def _end_reasoning(self) -> None:
        self._thinking = False
        if self._hide:
            spent = f" {self._pieces} tokens, {perf_counter() - self._began:.1f} s"
            self._out.whole(painted(spent, self._dim), len(spent))
            self._out.end()
        else:
            self._out.end()
            self._out.line()

    def _end_content(self) -> None:
        if self._markdown is not None:
            self._markdown.end()
        else:
            self._out.end()

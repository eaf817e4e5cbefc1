"""Word wrapping of streamed text. Written text is never changed, so resizing the terminal is harmless."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import TextIO

FALLBACK = 80  # columns if the terminal's width is unknown
NARROWEST = 20
_WORD = re.compile(r" *(?:[^ `]*`[^`]*`[^ `]*(?= |$)|[^ ]+)")
_DIVIDES = re.compile(r"(?<=[/;])(?=[^/;])")


def width_of(stream: TextIO, fallback: int = FALLBACK) -> int:
    """Return the current width in columns of the terminal behind a stream, or `fallback` without a terminal or if it is
    unknown."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError, AttributeError):
        columns = 0
    return max(columns, NARROWEST) if columns else fallback


def broken(text: str, width: int, hanging: str = "") -> list[str]:
    """Wrap a text at words and return the lines. All lines but the first begin with `hanging`.

    A command between backticks is one word, so that it can be copied. A path or list longer than a line breaks after a
    slash or semicolon.
    """
    lines, line = [], ""
    for word in _words(text, width - cells(hanging)):
        if line.strip() and cells(line) + cells(word) > width:
            lines.append(line)
            word = hanging + word.lstrip(" ")
            line = ""
        line += word
    return [*lines, line]


def longest(text: str, width: int) -> int:
    """Return the columns of the longest part of a text that `broken` does not divide on lines of `width` columns."""
    return max((cells(word.strip(" ")) for word in _words(text, width)), default=0)


def _words(text: str, width: int) -> Iterator[str]:
    """Yield words with the spaces before them, and the parts of words that are longer than `width` columns."""
    for found in _WORD.findall(text):
        for word in [found] if cells(found.strip(" ")) <= width else re.findall(r" *[^ ]+", found):
            whole = cells(word.strip(" ")) <= width
            yield from [word] if whole else _DIVIDES.split(word)


def cells(text: str) -> int:
    """Return the display width of a text in columns."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


class Wrapped:
    """Writes styled text to a terminal, wrapped at words.

    Styles are ANSI "select graphic rendition" numbers ("1;36"); "" means unstyled. The text must be printable, since it
    is not escaped here. Continuation lines of a paragraph begin with the text given to `hang`.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._word: list[tuple[str, str]] = []  # characters and their styles
        self._length = 0  # columns of the word
        self._gap = ""  # spaces before the word
        self.column = 0
        self._hanging, self._indent = "", 0

    @property
    def width(self) -> int:
        return width_of(self._stream)

    @property
    def empty(self) -> bool:
        """Return whether the current line is empty."""
        return not self.column and not self._word and not self._gap

    def text(self, text: str, style: str = "") -> None:
        """Write text without newlines."""
        for letter in text:
            if letter in " \t":
                self._end_word()
                self._gap += " " if letter == " " else "    "
                continue
            size = cells(letter)
            if size == 2:  # a line may break around wide characters
                self._end_word()
            self._word.append((letter, style))
            self._length += size
            if size == 2 or self._length >= self.width - self._indent or len(self._word) > 4 * self.width:
                self._end_word()

    def whole(self, text: str, size: int) -> None:
        """Write finished text of `size` columns, with its styles. Only the terminal may wrap it."""
        self._end_word()
        self._stream.write(self._gap + text)
        self.column += len(self._gap) + size
        self._gap = ""

    def hang(self, text: str = "", size: int = 0) -> None:
        """Set the finished text of `size` columns that begins continuation lines."""
        self._hanging, self._indent = text, size

    def line(self) -> None:
        """End the line and drop the spaces at its end."""
        self._end_word()
        self._gap = ""
        self._stream.write("\n")
        self.column = 0

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()

    def end(self) -> None:
        """End the last word, and the current line if it is not empty."""
        if not self.empty:
            self.line()
        self.flush()

    def _end_word(self) -> None:
        if not self._word:
            return
        if self.column and self.column + len(self._gap) + self._length > self.width:
            self._stream.write("\n" + self._hanging)
            self.column, self._gap = self._indent, ""
        self._stream.write(self._gap + _painted(self._word))
        self.column += len(self._gap) + self._length
        self._word, self._length, self._gap = [], 0, ""


def painted(text: str, style: str) -> str:
    """Return a text with a style applied."""
    return f"\x1b[{style}m{text}\x1b[0m" if style and text else text


def _painted(letters: list[tuple[str, str]]) -> str:
    text, run, last = "", "", ""
    for letter, style in letters:
        if style != last:
            text, run, last = text + painted(run, last), "", style
        run += letter
    return text + painted(run, last)

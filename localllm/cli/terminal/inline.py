"""Emphasis and code within a line of Markdown, for text that comes character by character.

A marker is held back until its partner comes. If none comes in the same line and soon, it is text: what is shown does
not depend on how the text was cut into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

BOLD, ITALIC, STRUCK, CODE = "1", "3", "9", "36"
_MOST_HELD = 200  # characters
_OPENERS = "`*_~\\"
_SPANS = (  # a whole span: the text in it, its style
    (re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)"), CODE),
    (re.compile(r"(\*\*\*)(?=[^\s*])(.+?)(?<=[^\s*])\*\*\*(?!\*)"), f"{BOLD};{ITALIC}"),
    (re.compile(r"(\*\*)(?=[^\s*])(.+?)(?<=\S)\*\*(?!\*)"), BOLD),
    (re.compile(r"(\*|_)(?=[^\s*_])(.+?)(?<=[^\s*_])\1(?![*_\w])"), ITALIC),
    (re.compile(r"(~~)(?=[^\s~])(.+?)(?<=[^\s~])~~(?!~)"), STRUCK),
)
_COUNTS = {"*": (1, 2, 3), "_": (1,), "~": (2,)}  # __init__ is a name, and no bold text
_ESCAPED = "`*_~\\#"

Segment = tuple[str, str]  # text and style


class Inline:
    """Turns the characters of a line into segments."""

    def __init__(self) -> None:
        self._held = ""
        self._before = " "  # the last character that was passed on

    def push(self, letter: str) -> Iterator[Segment]:
        """Yield what one more character of the line decides."""
        if not self._held and letter not in _OPENERS:
            self._before = letter
            yield letter, ""
            return
        self._held += letter
        held = self._held
        if 4 < len(held) <= _MOST_HELD and held[-2] != held[0]:
            return  # neither a marker's start nor its partner, so nothing is decided: this is what happens most often
        yield from self._decide(False)

    def end(self) -> Iterator[Segment]:
        """The line has ended: yield what was held back."""
        while self._held:
            yield from self._decide(True)
        self._before = " "

    def _decide(self, ended: bool) -> Iterator[Segment]:
        """Yield the span that `_held` begins with, or its first character if it begins none."""
        held = self._held
        if held[0] == "\\":
            if len(held) > 1 or ended:
                self._held = held[2:]
                escaped = held[1:] if held[1:] and held[1] in _ESCAPED else held
                yield from self._passed(escaped[:2] if escaped is held else escaped[:1])
            return
        found = self._span(ended)
        if found is not None:
            (text, style), self._held = found
            self._before = text[-1]
            yield from ((part, f"{style};{own}" if own else style) for part, own in _parsed(text, style))
            yield from self._again()
        elif ended or len(held) > _MOST_HELD or not self._can_open():
            count = len(held) - len(held.lstrip(held[0])) or 1
            self._held = held[count:]
            yield from self._passed(held[:count])
            yield from self._again()

    def _passed(self, text: str) -> Iterator[Segment]:
        self._before = text[-1]
        yield text, ""

    def _again(self) -> Iterator[Segment]:
        """Read what was held back behind a span or a marker that is none."""
        rest, self._held = self._held, ""
        for letter in rest:
            yield from self.push(letter)

    def _can_open(self) -> bool:
        """Return whether a span may begin with what is held."""
        marker, rest = self._held[0], self._held.lstrip(self._held[0])
        if marker == "`" or not rest:
            return True
        count = len(self._held) - len(rest)
        inside = count == 1 and (self._before.isalnum() or self._before == "_")
        return not rest[0].isspace() and not inside and count in _COUNTS[marker]

    def _span(self, ended: bool) -> tuple[Segment, str] | None:
        """Return the span at the start of what is held, and the rest. A span needs to see one character behind it."""
        held = self._held
        if not self._can_open() or (not ended and held[-2:-1] != held[0]):
            return None
        for pattern, style in _SPANS:
            found = pattern.match(held)
            if found is not None and (ended or found.end() < len(held)):
                return (found[2], style), held[found.end() :]
        return None


def _parsed(text: str, style: str) -> Iterator[Segment]:
    """Yield the segments within a span."""
    if style == CODE:
        yield text, ""
        return
    inner = Inline()
    for letter in text:
        yield from inner.push(letter)
    yield from inner.end()


def parsed(text: str) -> list[Segment]:
    """Return the segments of a whole line."""
    return list(_parsed(text, ""))

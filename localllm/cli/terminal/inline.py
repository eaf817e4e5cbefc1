"""Emphasis, code and links within a line of Markdown, for text that arrives character by character.

A marker is held back until its partner arrives. If no partner follows soon in the same line, the marker is text. The
output therefore does not depend on how the text was split.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

BOLD, ITALIC, STRUCK, CODE, LINK, TARGET = "1", "3", "9", "36", "4", "2"
_MOST_HELD = 200  # maximum characters held back
_OPENERS = "`*_~\\["
_LINK = re.compile(r"\[([^\[\]]+)\]\(([^()\s]+)\)")
_MAY_BE_LINK = re.compile(r"\[(?:[^\[\]]+(?:\](?:\((?:[^()\s]+\)?)?)?)?)?")
_SPANS = (  # patterns of whole spans, and their styles
    (re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)"), CODE),
    (re.compile(r"(\*\*\*)(?=[^\s*])(.+?)(?<=[^\s*])\*\*\*(?!\*)"), f"{BOLD};{ITALIC}"),
    (re.compile(r"(\*\*)(?=[^\s*])(.+?)(?<=\S)\*\*(?!\*)"), BOLD),
    (re.compile(r"(\*|_)(?=[^\s*_])(.+?)(?<=[^\s*_])\1(?![*_\w])"), ITALIC),
    (re.compile(r"(~~)(?=[^\s~])(.+?)(?<=[^\s~])~~(?!~)"), STRUCK),
)
_COUNTS = {"*": (1, 2, 3), "_": (1,), "~": (2,)}  # _ has no 2: __init__ is a name, not bold text
_ESCAPED = "`*_~\\#"

Segment = tuple[str, str]  # text and style


class Inline:
    """Turns the characters of a line into segments."""

    def __init__(self) -> None:
        self._held = ""
        self._before = " "  # the last character that was output

    def push(self, letter: str) -> Iterator[Segment]:
        """Add one character, and yield the segments that are now certain."""
        if not self._held and letter not in _OPENERS:
            self._before = letter
            yield letter, ""
            return
        self._held += letter
        held = self._held
        if held[0] != "[" and 4 < len(held) <= _MOST_HELD and held[-2] != held[0]:
            return  # neither the start of a marker nor its partner: the common case
        yield from self._decide(False)

    def end(self) -> Iterator[Segment]:
        """End the line: yield the characters that were held back."""
        while self._held:
            yield from self._decide(True)
        self._before = " "

    def _decide(self, ended: bool) -> Iterator[Segment]:
        """Yield the span at the start of `_held`, or the first character if no span starts there."""
        held = self._held
        if held[0] == "\\":
            if len(held) > 1 or ended:
                self._held = held[2:]
                escaped = held[1:] if held[1:] and held[1] in _ESCAPED else held
                yield from self._passed(escaped[:2] if escaped is held else escaped[:1])
            return
        if held[0] == "[":
            yield from self._link(ended)
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

    def _link(self, ended: bool) -> Iterator[Segment]:
        """Yield the text and the address of the link at the start of `_held`, or the bracket alone."""
        found = _LINK.match(self._held)
        if found is not None:
            self._held = self._held[found.end() :]
            yield from ((part, f"{LINK};{own}" if own else LINK) for part, own in parsed(found[1]))
            if found[1] != found[2]:
                yield f" ({found[2]})", TARGET
            self._before = ")"
            yield from self._again()
        elif ended or len(self._held) > _MOST_HELD or not _MAY_BE_LINK.fullmatch(self._held):
            self._held = self._held[1:]
            yield from self._passed("[")
            yield from self._again()

    def _passed(self, text: str) -> Iterator[Segment]:
        self._before = text[-1]
        yield text, ""

    def _again(self) -> Iterator[Segment]:
        """Process the characters that were held back behind a span or an unmatched marker."""
        rest, self._held = self._held, ""
        for letter in rest:
            yield from self.push(letter)

    def _can_open(self) -> bool:
        """Return whether the held characters may begin a span."""
        marker, rest = self._held[0], self._held.lstrip(self._held[0])
        if marker == "`" or not rest:
            return True
        count = len(self._held) - len(rest)
        inside = count == 1 and (self._before.isalnum() or self._before == "_")
        return not rest[0].isspace() and not inside and count in _COUNTS[marker]

    def _span(self, ended: bool) -> tuple[Segment, str] | None:
        """Return the span at the start of the held characters, and the remaining text. It needs one character of
        lookahead."""
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

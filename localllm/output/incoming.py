"""`Incoming`: streamed text, with the operations that parsers need.

A parser is a generator that yields when it needs text that has not arrived yet, so its code reads as if the text were
complete. Consumed text is dropped, and no text is searched twice, so the time is linear in the length of the text.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

from localllm.template.format import SPACES

_T = TypeVar("_T")
Wait = Generator[None, None, _T]  # a parser, which yields to wait for more text
Show = Callable[[str], object]  # callback that receives final text

MOST_SPACES = 256  # maximum length of white space between two parts
MOST_NAME = 256  # characters
MOST_HEADER = 1024
MOST_BACK = 4096  # maximum characters to go back and parse again
_NOWHERE = sys.maxsize


class Markers:
    """Strings to search for. If several match at one position, the longest is found."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = tuple(sorted({text for text in texts if text}, key=lambda text: (-len(text), text)))
        self._any = re.compile("|".join(map(re.escape, self.texts)) or r"(?!)")
        self._starts = {text[:length] for text in self.texts for length in range(1, len(text))}
        self._longest = max(map(len, self.texts), default=1) - 1
        firsts = re.escape("".join({text[0] for text in self.texts}))
        self.starts = re.compile(f"[{firsts}]" if firsts else r"(?!)")

    def find(self, text: str, start: int) -> re.Match[str] | None:
        return self._any.search(text, start)

    def unfinished(self, text: str, start: int) -> int:
        """Return the start of the longest suffix of `text` that may become a marker, or `len(text)` without such a
        suffix."""
        first = max(start, len(text) - self._longest)
        return next((place for place in range(first, len(text)) if text[place:] in self._starts), len(text))


class Incoming:
    """Text that arrives with `push` and ends with `close`. Methods that return a `Wait` may wait for more text."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._records: list[_Record] = []
        self.ended = False

    def push(self, text: str) -> None:
        for record in self._records:
            record.check(self._at)
        keep = min([self._at, *(record.start for record in self._records)])
        self._text = self._text[keep:] + text
        self._at -= keep
        for record in self._records:
            record.start -= keep if record.start != _NOWHERE else 0

    @property
    def empty(self) -> bool:
        """Whether all text has been consumed, and no record needs it again."""
        return self._at == len(self._text) and not self._records

    def close(self) -> None:
        self.ended = True

    # -- recording -------------------------------------------------------------------------------------------------

    def record(self) -> None:
        """Record all text that is consumed from here on, until `back` or `forget`. Records nest."""
        self._records.append(_Record(self._at, [len(outer.taken) for outer in self._records]))

    def back(self) -> str:
        """End the last record, go back to its start and return "". If the text since then is too long to parse again,
        return it instead of going back.
        """
        record = self._records.pop()
        record.check(self._at)
        if record.start == _NOWHERE:
            return "".join(record.taken)
        self._at = record.start
        for outer, length in zip(self._records, record.outer, strict=True):
            del outer.taken[length:]
        return ""

    def forget(self) -> None:
        """End the last record, if there is one."""
        if self._records:
            self._records.pop()

    # -- reading ---------------------------------------------------------------------------------------------------

    def take(self, count: int) -> str:
        """Consume and return the next `count` characters, which must have arrived."""
        taken = self._text[self._at : self._at + count]
        self._at += len(taken)
        for record in self._records if taken else ():
            record.taken.append(taken)
        return taken

    def peek(self, count: int = 1) -> Wait[str]:
        """Return the next `count` characters without consuming them. At the end of the text there may be fewer."""
        while len(self._text) - self._at < count and not self.ended:
            yield
        return self._text[self._at : self._at + count]

    def accept(self, text: str) -> Wait[bool]:
        """Consume `text` if it comes next; return whether it does."""
        if not text:
            return False
        while True:
            if self._text.startswith(text, self._at):
                self.take(len(text))
                return True
            left = len(self._text) - self._at
            if self.ended or left >= len(text) or not text.startswith(self._text[self._at :]):
                return False
            yield

    def accept_one(self, texts: Iterable[str]) -> Wait[str]:
        """Consume and return the longest of `texts` that comes next, or "" if none of them does."""
        for text in sorted(texts, key=len, reverse=True):
            if (yield from self.accept(text)):
                return text
        return ""

    def flow(self, pattern: re.Pattern[str], most: int, show: Show) -> Wait[int]:
        """Consume and show up to `most` characters, until the first character that does not match `pattern` (`[...]*`).

        Return the number of characters.
        """
        left = most
        while left:
            found = pattern.match(self._text, self._at, self._at + left)
            assert found is not None, "the pattern matches the empty text"
            taken = self.take(found.end() - found.start())
            left -= len(taken)
            if taken:
                show(taken)
            if self._at < len(self._text) or self.ended:
                break
            yield
        return most - left

    def run(self, pattern: re.Pattern[str], most: int) -> Wait[str]:
        """Consume and return the characters that `flow` would show."""
        taken: list[str] = []
        yield from self.flow(pattern, most, taken.append)
        return "".join(taken)

    def spaces(self, most: int = MOST_SPACES) -> Wait[str]:
        """Consume and return white space, at most `most` characters."""
        return (yield from self.run(_SPACES, most))

    def name(self) -> Wait[str]:
        """Consume and return a name, at most MOST_NAME characters."""
        return (yield from self.run(_NAME, MOST_NAME))

    def until(self, markers: Markers, show: Show, most: int = sys.maxsize) -> Wait[str]:
        """Show the text before the first marker, then consume and return the marker.

        Return "" at the end of the text, or when `most` characters were shown before a marker.
        """
        while True:
            found = markers.find(self._text, self._at)
            certain = len(self._text) if self.ended else markers.unfinished(self._text, self._at)
            sure = found is not None and (self.ended or found.start() < certain)
            stop = min(found.start() if found is not None and sure else certain, self._at + most)
            if stop > self._at:
                most -= stop - self._at
                show(self.take(stop - self._at))
            if found is not None and sure and found.start() == self._at:
                return self.take(len(found[0]))
            if self.ended or not most:
                return ""
            yield

    def up_to(self, end: str) -> Wait[str]:
        """Take the text up to and including `end`, and return the part before it, or "" if `end` does not follow
        soon.
        """
        parts: list[str] = []
        found = yield from self.until(Markers((end,)), parts.append, MOST_HEADER)
        return "".join(parts) if found else ""

    def follows(self, texts: tuple[str, ...]) -> Wait[bool]:
        """Return whether one of `texts`, or the end, comes next after white space. Consume nothing."""
        while True:
            rest = self._text[self._at : self._at + MOST_SPACES + max(map(len, texts))].lstrip(SPACES)
            if rest.startswith(texts):
                return True
            open_ = len(self._text) - self._at < MOST_SPACES and any(text.startswith(rest) for text in texts)
            if self.ended or not open_:
                return self.ended and not rest
            yield


_NAME = re.compile(r"[\w.\-]*")
_SPACES = re.compile(f"[{SPACES}]*")


class _Record:
    """The text consumed since `start`. `outer` is the length of each outer record when this record began."""

    __slots__ = ("outer", "start", "taken")

    def __init__(self, start: int, outer: list[int]) -> None:
        self.start, self.outer = start, outer
        self.taken: list[str] = []

    def check(self, at: int) -> None:
        """Make going back impossible if the text since `start` is too long to keep."""
        if self.start != _NOWHERE and at - self.start > MOST_BACK:
            self.start = _NOWHERE


def run_whole(parser: Callable[[Incoming], Wait[_T]], text: str) -> tuple[_T, bool]:
    """Run a parser over a complete text. Return its result, and whether it consumed the whole text."""
    incoming = Incoming()
    incoming.push(text)
    incoming.close()
    waiting = parser(incoming)
    try:
        next(waiting)
    except StopIteration as stop:
        return stop.value, not incoming._text[incoming._at :]
    raise AssertionError("a parser waits although the text has ended")

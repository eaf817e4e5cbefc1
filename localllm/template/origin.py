"""`Text`: a string that tracks the origin of each character through the operations of a template.

A control token only counts if the template itself wrote all of it. As with `Markup` for HTML, concatenation preserves
the origins. Unlike Markup, nothing is escaped, so a template finds, splits and measures user text unchanged. Methods
that are not overridden return a plain `str`, which counts as user text. A missing operation may therefore cost a
template its control token, but never lets a user write one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, SupportsIndex, TypeVar

GIVEN, MODEL, OWN = 0, 1, 2  # from a user, tool or schema; an earlier answer; the template (ascending trust)

_T = TypeVar("_T")
_CONVERSION = re.compile(r"%(?:\((?P<key>[^)]*)\))?(?P<spec>[#0\- +]*\d*(?:\.\d+)?[hlL]?)(?P<kind>.)", re.DOTALL)


class Text(str):
    """A string whose `_marks` have one byte per character: GIVEN, MODEL or OWN."""

    __slots__ = ("_marks",)
    _marks: bytes

    @classmethod
    def of(cls, text: str, marks: bytes | int) -> Text:
        """Return `text` with a mark for each character, or one mark for all."""
        made = cls(text)
        made._marks = bytes((marks,)) * len(text) if isinstance(marks, int) else marks
        return made

    def __str__(self) -> str:
        return self

    def __getnewargs__(self) -> tuple[str]:  # copies keep their marks
        raise TypeError("a text of a template cannot be pickled")

    @property
    def marks(self) -> bytes:
        """The marks: GIVEN, MODEL or OWN for each character."""
        return self._marks

    # -- parts -----------------------------------------------------------------------------------------------------

    def __getitem__(self, key: SupportsIndex | slice) -> Text:
        return Text.of(str.__getitem__(self, key), self._marks[key])

    def __iter__(self) -> Iterator[str]:
        return (Text.of(letter, mark) for letter, mark in zip(str.__iter__(self), self._marks, strict=True))

    def strip(self, chars: str | None = None, /) -> Text:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> Text:
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None, /) -> Text:
        return self[: len(str.rstrip(self, chars))]

    def removeprefix(self, prefix: str, /) -> Text:
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> Text:
        return self[: len(self) - len(suffix)] if suffix and self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Text]:  # type: ignore[override]
        return self._located(str.split(self, sep, maxsplit), len(sep or ""))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Text]:  # type: ignore[override]
        return self._located(str.rsplit(self, sep, maxsplit), len(sep or ""))

    def splitlines(self, keepends: bool = False) -> list[Text]:  # type: ignore[override]
        lines = self._located(str.splitlines(self, keepends=True), 0)
        return lines if keepends else [line[: len(str.splitlines(line)[0])] for line in lines]

    def partition(self, sep: str, /) -> tuple[Text, Text, Text]:
        before, found, after = str.partition(self, sep)
        return self[: len(before)], self[len(before) : len(before) + len(found)], self[len(self) - len(after) :]

    def rpartition(self, sep: str, /) -> tuple[Text, Text, Text]:
        before, found, after = str.rpartition(self, sep)
        return self[: len(before)], self[len(before) : len(before) + len(found)], self[len(self) - len(after) :]

    def _located(self, parts: list[str], gap: int) -> list[Text]:
        """Return `parts` of this text, separated by `gap` characters or by white space, with their marks."""
        found = []
        end = -gap
        for part in parts:
            start = end + gap if gap else str.find(self, part, max(end, 0))
            end = start + len(part)
            found.append(self[start:end])
        return found

    # -- letters ---------------------------------------------------------------------------------------------------

    def lower(self) -> Text:
        return self._like(str.lower(self))

    def upper(self) -> Text:
        return self._like(str.upper(self))

    def capitalize(self) -> Text:
        return self._like(str.capitalize(self))

    def title(self) -> Text:
        return self._like(str.title(self))

    def swapcase(self) -> Text:
        return self._like(str.swapcase(self))

    def casefold(self) -> Text:
        return self._like(str.casefold(self))

    def _like(self, text: str) -> Text:
        """Return `text`, this string after a change of case; if its length changed, all characters get the least
        trusted mark.
        """
        return Text.of(text, self._marks if len(text) == len(self) else min(self._marks, default=OWN))

    # -- joining ---------------------------------------------------------------------------------------------------

    def __add__(self, other: Any) -> Text:
        return joined((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any) -> Text:
        return joined((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> Text:
        return Text.of(str.__mul__(self, times), self._marks * times.__index__())

    __rmul__ = __mul__

    def join(self, parts: Iterable[str], /) -> Text:
        pieces: list[str] = []
        for part in parts:
            pieces += (self, part)
        return joined(pieces[1:])

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> Text:
        if old:
            return marked(new).join(self.split(old, count))
        letters = list(self)
        most = len(letters) + 1 if (given := count.__index__()) < 0 else min(given, len(letters) + 1)
        pieces: list[str] = []
        for place in range(len(letters) + 1):
            pieces += [new] if place < most else []
            pieces += letters[place : place + 1]
        return joined(pieces)

    def __mod__(self, values: Any) -> str:
        """Format in printf style. An unsupported form returns a plain string, which counts as user text."""
        whole = str.__mod__(self, values)
        waiting = iter(values if isinstance(values, tuple) else (values,))
        pieces: list[str] = []
        end = 0
        for found in _CONVERSION.finditer(self):
            if found["kind"] in "*.":  # a width or precision taken from the values
                return whole
            pieces.append(self[end : found.start()])
            end = found.end()
            if found["kind"] == "%":
                pieces.append(self[found.start() : found.start() + 1])
                continue
            if found["key"] is None:
                value = next(waiting, None)
            else:
                value = values.get(found["key"]) if isinstance(values, Mapping) else None
            plain = found["kind"] == "s" and not found["spec"]
            pieces.append(shown(value) if plain else str.__mod__(f"%{found['spec']}{found['kind']}", (value,)))
        made = joined([*pieces, self[end:]])
        return made if made == whole else whole


def marked(value: str) -> Text:
    """Return a `Text` unchanged; a plain string counts as user text."""
    return value if isinstance(value, Text) else Text.of(value, GIVEN)


def shown(value: Any) -> Text:
    """Return a value's text as printed by a template. Numbers count as the template's text, lists and dicts as user
    text.
    """
    if isinstance(value, str):
        return marked(value)
    return Text.of(str(value), OWN if value is None or isinstance(value, int | float) else GIVEN)


def joined(parts: Iterable[str], plain: int = GIVEN) -> Text:
    """Concatenate all parts. Raise TypeError for a part that is not a string."""
    parts = list(parts)
    marks = [part._marks if isinstance(part, Text) else bytes((plain,)) * len(part) for part in parts]
    return Text.of("".join(parts), b"".join(marks))


def given(value: _T, mark: int = GIVEN) -> _T:
    """Return the JSON `value` with all its strings marked, including keys."""
    made: Any = value
    if isinstance(value, str):
        made = Text.of(value, mark)
    elif isinstance(value, list):
        made = [given(item, mark) for item in value]
    elif isinstance(value, dict):
        made = {given(key, mark): given(item, mark) for key, item in value.items()}
    return made  # type: ignore[no-any-return]


def least(value: Any) -> int:
    """Return the least trusted mark of any string in `value`."""
    waiting, mark = [value], OWN
    while waiting and mark != GIVEN:
        value = waiting.pop()
        if isinstance(value, Text):
            mark = min(mark, min(value._marks, default=OWN))
        elif isinstance(value, str):
            mark = GIVEN
        elif isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            waiting += value
        elif value is not None and not isinstance(value, int | float):
            mark = GIVEN
    return mark

"""Typed access to the fields of a JSON request. Errors name the field: `messages[2].role: expected a text`.

A field that is null counts as missing: several clients send null for unset fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

from localllm.base.printable import printable
from localllm.server.errors import BadRequest
from localllm.server.turn import Json

T = TypeVar("T")
C = TypeVar("C", bound=str)
ITEMS = 100_000  # maximum length of a list
SHORT = 1000  # maximum characters of a search text, such as a stop string


class Fields:
    """The fields of one JSON object. `where` is the path of the object in the body, such as "tools[0]"."""

    __slots__ = ("data", "where")

    def __init__(self, data: Json, where: str = "") -> None:
        self.data = data
        self.where = where

    def path(self, name: str) -> str:
        """Return the path of a field in the request body."""
        return f"{self.where}.{name}" if self.where else name

    def has(self, name: str) -> bool:
        """Return whether the field is present and not null."""
        return self.data.get(name) is not None

    def wrong(self, name: str, message: str) -> BadRequest:
        """Return the error for an invalid field."""
        return BadRequest(f"{self.path(name)}: {message}", self.path(name))

    # -- one value: required without a default ----------------------------------------------------------------------

    def text(self, name: str, default: str | None = None) -> str:
        return self._one(name, default, self._text)

    def integer(self, name: str, default: int | None = None, least: int | None = None, most: int | None = None) -> int:
        value = self._one(name, default, self._integer)
        return self._within(name, value, least, most) if self.has(name) else value

    def number(
        self, name: str, default: float | None = None, least: float | None = None, most: float | None = None
    ) -> float:
        value = self._one(name, default, self._number)
        return self._within(name, value, least, most) if self.has(name) else value

    def flag(self, name: str, default: bool | None = None) -> bool:
        return self._one(name, default, self._flag)

    def choice(self, name: str, choices: Sequence[C], default: C | None = None) -> C:
        value = self.text(name, default)
        found = next((choice for choice in choices if choice == value), default)
        if found is None or found != value:
            raise self.wrong(name, f"expected one of {', '.join(choices)}; got {printable(value)!r}")
        return found

    def list(self, name: str, default: Sequence[Any] | None = None, most: int = ITEMS) -> Sequence[Any]:
        value = self._one(name, default, self._list)
        if len(value) > most:
            raise self.wrong(name, f"has {len(value)} items; the limit is {most}")
        return value

    def object(self, name: str, default: Json | None = None) -> Json:
        return self._one(name, default, self._object)

    # -- one value or None ------------------------------------------------------------------------------------------

    def optional_text(self, name: str) -> str | None:
        return self.text(name) if self.has(name) else None

    def optional_integer(self, name: str, least: int | None = None, most: int | None = None) -> int | None:
        return self.integer(name, None, least, most) if self.has(name) else None

    def optional_number(self, name: str, least: float | None = None, most: float | None = None) -> float | None:
        return self.number(name, None, least, most) if self.has(name) else None

    def optional_flag(self, name: str) -> bool | None:
        return self.flag(name) if self.has(name) else None

    def optional_object(self, name: str) -> Json | None:
        return self.object(name) if self.has(name) else None

    # -- objects and lists of one type ------------------------------------------------------------------------------

    def inner(self, name: str) -> Fields:
        """Return the fields of a nested object; they are empty if the object is missing."""
        return Fields(self.object(name, {}), self.path(name))

    def each(self, name: str, most: int = ITEMS) -> Iterator[Fields]:
        """Yield the objects in a list, or nothing if the list is missing."""
        for number, item in enumerate(self.list(name, (), most)):
            if not isinstance(item, dict):
                raise self.wrong(f"{name}[{number}]", f"expected an object, got {_name(item)}")
            yield Fields(item, f"{self.path(name)}[{number}]")

    def texts(self, name: str, most: int = ITEMS) -> tuple[str, ...]:
        """Return a list of strings. A single string becomes a list, and a missing field an empty list."""
        if isinstance(self.data.get(name), str):
            return (self.data[name],)
        return self._items(name, str, "a text", most)

    def short_texts(self, name: str, most: int) -> tuple[str, ...]:
        """Return a list of search texts of at most SHORT characters each."""
        found = self.texts(name, most)
        if long := next((text for text in found if len(text) > SHORT), ""):
            raise self.wrong(name, f"a text has {len(long)} characters; the limit is {SHORT}")
        return found

    def integers(self, name: str, most: int = ITEMS * 10) -> tuple[int, ...]:
        """Return a list of integers, which is empty if the field is missing."""
        return self._items(name, int, "a whole number", most)

    # -- checks -----------------------------------------------------------------------------------------------------

    def _one(self, name: str, default: T | None, read: Callable[[str, Any], T]) -> T:
        value = self.data.get(name)
        if value is not None:
            return read(name, value)
        if default is None:
            raise self.wrong(name, "required, but missing")
        return default

    def _text(self, name: str, value: Any) -> str:
        return value if isinstance(value, str) else self._refuse(name, "a text", value)

    def _flag(self, name: str, value: Any) -> bool:
        return value if isinstance(value, bool) else self._refuse(name, "true or false", value)

    def _list(self, name: str, value: Any) -> Sequence[Any]:
        return value if isinstance(value, list) else self._refuse(name, "a list", value)

    def _object(self, name: str, value: Any) -> Json:
        return value if isinstance(value, dict) else self._refuse(name, "an object", value)

    def _integer(self, name: str, value: Any) -> int:
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        return int(value) if whole and not isinstance(value, bool) else self._refuse(name, "a whole number", value)

    def _number(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return self._refuse(name, "a number", value)
        try:
            found = float(value)
        except OverflowError:
            found = math.inf
        return found if math.isfinite(found) else self._refuse(name, "a finite number", value)

    def _within(self, name: str, value: Any, least: float | None, most: float | None) -> Any:
        if least is not None and value < least:
            raise self.wrong(name, f"expected at least {least}, got {printable(str(value), 40)}")
        if most is not None and value > most:
            raise self.wrong(name, f"expected at most {most}, got {printable(str(value), 40)}")
        return value

    def _items(self, name: str, kind: type[T], noun: str, most: int) -> tuple[T, ...]:
        found = tuple(self.list(name, (), most))
        for number, item in enumerate(found):
            if type(item) is not kind:
                raise self.wrong(f"{name}[{number}]", f"expected {noun}, got {_name(item)}")
        return found

    def _refuse(self, name: str, noun: str, value: Any) -> NoReturn:
        raise self.wrong(name, f"expected {noun}, got {_name(value)}")


NAMES: dict[type, str] = {
    str: "a text",
    bool: "true or false",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


def _name(value: Any) -> str:
    return NAMES[type(value)]

"""Declares options: each is a dataclass field that holds its flags, its help, and the reader of its text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import field
from typing import Any, NamedTuple


class OptionError(ValueError):
    """A value that an option does not take; says what it does take."""


class Declared(NamedTuple):
    """One option, as the parser sees it."""

    flags: tuple[str, ...]  # empty for positional arguments
    help: str
    metavar: str
    read: Callable[[str], Any]  # one written value; OptionError where it is wrong
    repeat: bool = False  # the option may be repeated, each use adds a value
    shown: str = ""  # the default as shown in the help, if any
    finish: Callable[[list[Any]], Any] = tuple  # turns the values of a repeated option into the field
    complete: Callable[[str], list[str]] | None = None  # what a shell offers after the beginning of a value


def option(
    default: Any,
    *flags: str,
    help: str,
    metavar: str = "",
    read: Callable[[str], Any] = str,
    repeat: bool = False,
    shown: str | None = None,
    complete: Callable[[str], list[str]] | None = None,
) -> Any:
    """A field that is an option: a switch if the default is False, else a value that `read` makes from its text."""
    text = ("" if default in (None, False, "", ()) else str(default)) if shown is None else shown
    return field(
        default=default, metadata={"option": Declared(flags, help, metavar, read, repeat, text, complete=complete)}
    )


def whole(least: int) -> Callable[[str], int]:
    """Reads a whole number of at least `least`."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise OptionError(f"{text!r} is not a whole number of at least {least}")
        return number

    return read


def wholes(least: int) -> Callable[[str], tuple[int, ...]]:
    """Reads comma-separated whole numbers of at least `least`."""
    one = whole(least)
    return lambda text: tuple(one(part) for part in text.split(","))


def gpu_layers(text: str) -> int | str:
    """Reads a number of layers, "all" or "auto"; -1 is auto, as in llama.cpp."""
    if text in ("all", "auto", "-1"):
        return text if text != "-1" else "auto"
    try:
        return whole(0)(text)
    except OptionError:
        raise OptionError(f"{text!r} is not a number of layers, all or auto") from None


def one_of(*names: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in names:
            raise OptionError(f"{text!r} is not one of {', '.join(names)}")
        return text

    return read


def above(least: float) -> Callable[[str], float]:
    """Reads a finite number above `least`."""

    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = least
        if not least < number < float("inf"):
            raise OptionError(f"{text!r} is not a number above {least:g}")
        return number

    return read


def size(text: str) -> int:
    """Reads a number of bytes: 6GB, 700MiB, 1.5G. A single letter is a power of 1000, as on a disk's label."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([kmgt]?)(i?)(b?)", text.strip(), re.IGNORECASE)
    if found is None or (found[3] and not found[2]):
        raise OptionError(f"{text!r} is not a size like 6GB, 6GiB or 700MB")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2].lower() or " "))


def pair(form: str) -> Callable[[str], tuple[str, str]]:
    """Reads two texts separated by the last "="; `form` is shown in errors."""

    def read(text: str) -> tuple[str, str]:
        first, equals, second = text.rpartition("=")
        if not (first and equals and second):
            raise OptionError(f"{text!r} is not of the form {form}")
        return first, second

    return read

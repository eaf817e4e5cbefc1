"""How an option is declared: as a field of a dataclass that knows its flags, its help and how to read its text."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import field
from typing import Any, NamedTuple


class Declared(NamedTuple):
    """One option as the parser is to see it."""

    flags: tuple[str, ...]  # none: the arguments that are not options
    help: str
    metavar: str
    read: Callable[[str], Any]  # one written value; ArgumentTypeError where it is wrong
    repeat: bool = False  # every use adds a value
    shown: str = ""  # the default in words, where there is one to show
    finish: Callable[[list[Any]], Any] = tuple  # from the values of a repeated option to the field


def option(
    default: Any,
    *flags: str,
    help: str,
    metavar: str = "",
    read: Callable[[str], Any] = str,
    repeat: bool = False,
    shown: str | None = None,
) -> Any:
    """A field that is an option: a switch where the default is False, else a value that `read` makes of its text."""
    text = ("" if default in (None, False, "", ()) else str(default)) if shown is None else shown
    return field(default=default, metadata={"option": Declared(flags, help, metavar, read, repeat, text)})


def whole(least: int) -> Callable[[str], int]:
    """Reads a whole number from `least` up."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise ArgumentTypeError(f"{text!r} is not a whole number from {least} up")
        return number

    return read


def wholes(least: int) -> Callable[[str], tuple[int, ...]]:
    """Reads whole numbers from `least` up, with commas between them."""
    one = whole(least)
    return lambda text: tuple(one(part) for part in text.split(","))


def one_of(*names: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in names:
            raise ArgumentTypeError(f"{text!r} is not one of {', '.join(names)}")
        return text

    return read

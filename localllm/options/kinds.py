"""Kinds of option values: parse a value from text, and check a value given in Python."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any, NamedTuple

from localllm.base.errors import LocalLLMError


class OptionError(LocalLLMError):
    """An unknown option or an invalid value. The message lists the valid values."""


class Kind(NamedTuple):
    """The kind of an option's values."""

    read: Callable[[str], Any]  # parses a value; raises OptionError if it is invalid
    problem: Callable[[Any], str]  # returns the error: "is 3: it must be a number from 0 to 1", or ""
    metavar: str = "TEXT"  # placeholder for the value in help
    choices: tuple[str, ...] = ()  # the values, if they are few; the shell completes them
    clamp: tuple[float, float] | None = None  # range to which llama.cpp's API clamps values instead of refusing them


def checked(allows: Callable[[Any], bool], says: str) -> Callable[[Any], str]:
    """Return the `problem` function of a kind. `says` describes the values that `allows` accepts."""
    return lambda value: "" if allows(value) else f"is {value!r}: it must be {says}"


def optional(kind: Kind) -> Kind:
    """Return a kind whose values are None or of `kind`."""
    return kind._replace(problem=lambda value: "" if value is None else kind.problem(value))


def several(kind: Kind) -> Kind:
    """Return a kind for tuples of values of `kind`."""

    def problem(values: Any) -> str:
        if not isinstance(values, tuple):
            return f"is {values!r}: it must be a tuple"
        return next((found for value in values if (found := kind.problem(value))), "")

    return kind._replace(problem=problem)


MOST_WHOLE = 2**31 - 1  # positions and token counts are 32-bit integers
_DIGITS = 40  # maximum digits of a number in a message

TEXT = Kind(str, checked(lambda value: isinstance(value, str), "a text"))
PATH = Kind(str, checked(lambda value: isinstance(value, str | os.PathLike), "a text or a path"), "FILE")
SWITCH = Kind(lambda text: True, checked(lambda value: isinstance(value, bool), "True or False"))


def number(
    convert: type[int] | type[float],
    allows: Callable[[Any], bool],
    says: str,
    clamp: tuple[float, float] | None = None,
) -> Kind:
    """Return a kind for numbers that `allows` accepts."""
    family, noun = (Integral, "whole number") if convert is int else (Real, "number")

    def read(text: str) -> Any:
        try:
            return convert(text)
        except ValueError:
            raise OptionError(f"{text!r} is not a {noun}") from None

    return Kind(read, checked(lambda value: _is(value, family) and allows(value), says), "N", clamp=clamp)


def integer(least: int, most: int = MOST_WHOLE, noun: str = "a whole number") -> Kind:
    """Return a kind for integers from `least` to `most`. Errors mention the maximum only if the value exceeds it."""
    at_least, within = f"a whole number of at least {least}", f"{noun} from {least} to {most}"

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:  # also raised for more than 4300 digits
            raise OptionError(f"{_short(text)} is not {within if text.isdecimal() else at_least}") from None
        if not least <= value <= most:
            raise OptionError(f"{_short(text)} is not {at_least if value < least else within}")
        return value

    def problem(value: Any) -> str:
        if _is(value, Integral) and least <= value <= most:
            return ""
        large = _is(value, Integral) and value > most
        return f"is {_short(value)}: it must be {within if large else at_least}"

    return Kind(read, problem, "N")


def listed(kind: Kind) -> Kind:
    """Return a kind for comma-separated values of `kind`."""
    read = kind.read
    return several(kind)._replace(read=lambda text: tuple(read(part) for part in text.split(",")), metavar="N,...")


def above(least: float) -> Kind:
    """Return a kind for finite numbers above `least`. In Python, `least` itself means that nothing is given."""
    says = f"a number above {least:g}"

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = least
        if not least < value < math.inf:
            raise OptionError(f"{text!r} is not {says}")
        return value

    return Kind(read, checked(lambda value: _is(value, Real) and least <= value < math.inf, says), "X")


def one_of(*names: str, nothing: Any = "") -> Kind:
    """Return a kind for a choice of names; Python callers may also pass `nothing`."""

    def read(text: str) -> str:
        if text not in names:
            raise OptionError(f"{text!r} is not one of {', '.join(names)}")
        return text

    allows = lambda value: value == nothing or (isinstance(value, str) and value in names)  # noqa: E731
    return Kind(read, checked(allows, f"one of {', '.join(names)}"), "NAME", names)


def pair_of(form: str) -> Kind:
    """Return a kind for two texts separated by the last "=". Help and errors show `form`."""

    def read(text: str) -> tuple[str, str]:
        first, equals, second = text.rpartition("=")
        if not (first and equals and second):
            raise OptionError(f"{text!r} is not of the form {form}")
        return first, second

    return Kind(read, checked(lambda value: isinstance(value, tuple) and len(value) == 2, "a pair of texts"), form)


def _size(text: str) -> int:
    """Parse a size such as 6GB, 700MiB or 1.5G to bytes. A single letter is a power of 1000, as on disk labels."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([kmgt]?)(i?)(b?)", text.strip(), re.IGNORECASE)
    if found is None or (found[3] and not found[2]):
        raise OptionError(f"{text!r} is not a size like 6GB, 6GiB or 700MB")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2].lower() or " "))


SIZE = Kind(_size, checked(lambda value: _is(value, Integral) and value >= 0, "a number of bytes"), "SIZE")


def _layers(text: str) -> int | str:
    """Parse a number of layers, "all" or "auto". As in llama.cpp, -1 is auto."""
    if text in ("all", "auto", "-1"):
        return text if text != "-1" else "auto"
    try:
        return int(integer(0).read(text))
    except OptionError:
        raise OptionError(f"{text!r} is not a number of layers, all or auto") from None


LAYERS = Kind(
    _layers,
    checked(lambda value: value in ("all", "auto") or not integer(0).problem(value), "a number of layers, all or auto"),
    "N",
)


def _json(text: str) -> dict[str, Any]:
    import json  # imported here, because help does not need it

    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise OptionError(f"{text!r} is not a JSON object")
    return value


def _is_json(value: Any) -> bool:
    import json

    try:
        return isinstance(value, Mapping) and isinstance(json.loads(json.dumps(dict(value))), dict)
    except (TypeError, ValueError, RecursionError):
        return False


JSON = Kind(_json, checked(lambda value: value == {} or _is_json(value), "a dict of names and JSON values"), "JSON")


def _is(value: Any, family: type) -> bool:
    return isinstance(value, family) and not isinstance(value, bool)


def _short(value: Any) -> str:
    """Return a value for a message, without the digits of a very long number."""
    if _is(value, Integral) and abs(value) >= 10**_DIGITS:
        return f"a number of more than {_DIGITS} digits"
    if isinstance(value, str) and value.isdecimal() and len(value) > _DIGITS:
        return repr(f"{value[:_DIGITS]}...")
    return repr(value)

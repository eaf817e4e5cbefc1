"""Option values on the command line, in configuration files and environment variables, checked by their kinds."""

from __future__ import annotations

import os
from typing import Any

from localllm.options import DeclaredOption, OptionError
from localllm.options.kinds import PATH

_ON, _OFF = ("1", "true", "on", "yes"), ("0", "false", "off", "no")


def keys_of(each: DeclaredOption) -> tuple[str, ...]:
    """Return the names of an option in a file: its long flags, the usual flag first, and its Python name."""
    own = each.name.replace("_", "-")
    long = [flag[2:] for flag in each.option.flags if flag.startswith("--")]
    return tuple(dict.fromkeys([*([own] if own in long else []), *long, own]))


def key_of(each: DeclaredOption) -> str:
    return keys_of(each)[0]


def plain_key(key: str) -> str:
    """Return a key as `keys_of` writes it. A file may use _ for -."""
    return key.replace("_", "-")


def value_of_word(each: DeclaredOption, text: str) -> Any:
    """Parse a word of the command line, which is one of several if the option may be repeated. Raise OptionError if it
    is invalid."""
    value = each.option.kind.read(text)
    _single(each, value)
    return value


def finished(each: DeclaredOption, value: Any) -> Any:
    """Return the option value of the parsed words of a command line."""
    return each.option.finish(list(value)) if each.option.repeat or each.option.argument else value


def value_of_text(each: DeclaredOption, text: str) -> Any:
    """Parse the text of a variable, as the command line does. Switches are on or off. Raise OptionError if it is
    invalid."""
    if each.default is False:
        word = text.strip().lower()
        if word not in _ON + _OFF:
            raise OptionError(f"{text!r} is not on or off")
        return word in _ON
    value = each.option.kind.read(text)
    if (each.option.kind is PATH or each.option.offers in ("files", "models")) and isinstance(value, str):
        value = os.path.expanduser(value)
    return _single(each, value)


def value_of(each: DeclaredOption, raw: Any) -> Any:
    """Return the option value of a TOML value. Texts are parsed as on the command line. Raise OptionError if the value
    is invalid."""
    if each.default is False and not isinstance(raw, bool):
        raise OptionError(f"{raw!r} is not true or false")
    if isinstance(raw, str):
        return value_of_text(each, raw)
    if isinstance(raw, list):
        parts = [_element(each, part) for part in raw] if each.option.repeat else tuple(raw)
        return _checked(each, finished(each, parts))
    if isinstance(raw, int | float) and each.option.kind.problem(raw):
        return _single(each, _element(each, raw))  # such as -1 for no limit, or a single number for a list option
    return _checked(each, raw)


def _element(each: DeclaredOption, raw: Any) -> Any:
    """Parse a number or a text as the command line does. A text option rejects an unquoted number."""
    if isinstance(raw, str):
        return each.option.kind.read(raw)
    if isinstance(raw, bool) or not isinstance(raw, int | float):
        raise OptionError(f"{raw!r} is not a value of this option")
    value = each.option.kind.read(str(raw))
    if isinstance(value, str):
        raise OptionError(f"{raw!r} is not a text; put it in quotes")
    return value


def _single(each: DeclaredOption, value: Any) -> Any:
    """Return the option value of a single parsed value."""
    return _checked(each, finished(each, [value]) if each.option.repeat else value)


def _checked(each: DeclaredOption, value: Any) -> Any:
    problem = each.option.kind.problem(value)
    if problem:
        raise OptionError(problem.removeprefix("is "))
    return value

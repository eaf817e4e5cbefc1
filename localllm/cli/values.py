"""Values of options in a configuration file and in environment variables, checked by the options' own kinds."""

from __future__ import annotations

import os
from typing import Any

from localllm.options import Declared, OptionError
from localllm.options.kinds import PATH

_ON, _OFF = ("1", "true", "on", "yes"), ("0", "false", "off", "no")


def keys_of(each: Declared) -> tuple[str, ...]:
    """Return the names of an option in a file, the usual one first: its long flags, and its name in Python."""
    own = each.name.replace("_", "-")
    long = [flag[2:] for flag in each.option.flags if flag.startswith("--")]
    return tuple(dict.fromkeys([*([own] if own in long else []), *long, own]))


def key_of(each: Declared) -> str:
    return keys_of(each)[0]


def plain(key: str) -> str:
    """Return a key as `keys_of` writes it; files may have _ for -."""
    return key.replace("_", "-")


def value_of_text(each: Declared, text: str) -> Any:
    """Return the value of a text, read as on the command line. OptionError if it has none."""
    kind, option = each.option.kind, each.option
    if each.default is False:
        word = text.strip().lower()
        if word not in _ON + _OFF:
            raise OptionError(f"{text!r} is not on or off")
        return word in _ON
    value = kind.read(text)
    if (kind is PATH or option.offers in ("files", "models")) and isinstance(value, str):
        value = os.path.expanduser(value)
    return _checked(each, option.finish([value]) if option.repeat else value)


def value_of(each: Declared, raw: Any) -> Any:
    """Return the value of a TOML value: a text is read as on the command line. OptionError if it does not fit."""
    kind, option = each.option.kind, each.option
    if each.default is False:
        if not isinstance(raw, bool):
            raise OptionError(f"{raw!r} is not true or false")
        return raw
    if isinstance(raw, str):
        return value_of_text(each, raw)
    if isinstance(raw, list):
        if option.repeat:
            return _checked(each, option.finish([_element(each, part) for part in raw]))
        return _checked(each, tuple(raw))
    if isinstance(raw, int | float) and kind.problem(raw):
        value = _element(each, raw)  # such as -1 for no limit, or one number where several may stand
        return _checked(each, option.finish([value]) if option.repeat else value)
    return _checked(each, raw)


def _element(each: Declared, raw: Any) -> Any:
    """Return a number or a text as the command line reads it. A number is not a text."""
    if isinstance(raw, str):
        return each.option.kind.read(raw)
    if isinstance(raw, bool) or not isinstance(raw, int | float):
        raise OptionError(f"{raw!r} is not a value of this option")
    value = each.option.kind.read(str(raw))
    if isinstance(value, str):
        raise OptionError(f"{raw!r} is not a text; put it in quotes")
    return value


def _checked(each: Declared, value: Any) -> Any:
    problem = each.option.kind.problem(value)
    if problem:
        raise OptionError(problem.removeprefix("is "))
    return value

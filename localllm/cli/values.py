"""Option values in configuration files and environment variables, checked by the types of the options."""

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


def value_of_text(each: DeclaredOption, text: str) -> Any:
    """Parse a text as the command line does. Raise OptionError if it is invalid."""
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


def value_of(each: DeclaredOption, raw: Any) -> Any:
    """Return the option value of a TOML value. Texts are parsed as on the command line. Raise OptionError if the value
    is invalid."""
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
        value = _element(each, raw)  # a number, such as -1 for no limit, or a single number for a list option
        return _checked(each, option.finish([value]) if option.repeat else value)
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


def _checked(each: DeclaredOption, value: Any) -> Any:
    problem = each.option.kind.problem(value)
    if problem:
        raise OptionError(problem.removeprefix("is "))
    return value

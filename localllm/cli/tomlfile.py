"""Read a TOML file with the line number of each value, which Python's tomllib does not report."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from localllm.base.files.regular import read_given
from localllm.cli.app import UsageError

MOST = 1 << 18  # maximum bytes of a file; a usual configuration has a few hundred bytes
_AT = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")
_ENDS = re.compile(r"\"\"\"|'''|[\]}]")  # tokens that can end a multi-line value


class TomlFile(NamedTuple):
    """The content of a file: its tables, and the line number of every value and table by their keys."""

    path: Path
    content: Mapping[str, Any]
    lines: Mapping[tuple[str, ...], int]

    def place(self, *keys: str) -> str:
        """Return the place of a value: FILE:LINE."""
        return f"{self.path}:{self.lines[keys]}" if keys in self.lines else str(self.path)


def read_toml(path: Path, required: bool) -> TomlFile | None:
    """Return the parsed file, or None if it is missing and not `required`. Raise UsageError if it cannot be read or
    parsed."""
    text = _text(path, required)
    if text is None:
        return None
    import tomllib

    try:
        return TomlFile(path, tomllib.loads(text), dict(_lines(text)))
    except RecursionError:
        raise UsageError(f"{path}: the values are nested too deeply") from None
    except ValueError as error:  # TOMLDecodeError, or an integer with thousands of digits
        at = _AT.search(str(error))
        line = f":{at[1] or text.count(chr(10)) + 1}" if at else ""
        raise UsageError(f"{path}{line}: not valid TOML: {_AT.sub('', str(error))}") from None


def _text(path: Path, required: bool) -> str | None:
    try:
        if not required and not os.path.isfile(path):  # also False if a parent folder denies access
            return None
        data = read_given(path, 2 * MOST)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MOST:
        raise UsageError(f"{path}: larger than {MOST >> 10} KiB; is this a configuration file?")
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{path}:{line}: not UTF-8 text") from None


def _lines(text: str) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield the keys and the line number of every value in a valid file.

    Each statement is parsed alone: lines are added until they are valid TOML by themselves.
    """
    import tomllib

    table: tuple[str, ...] = ()
    statement, start = "", 1
    for number, line in enumerate(text.split("\n"), 1):
        if not statement:
            start = number
        statement += line + "\n"
        if start != number and not _ENDS.search(line):
            continue  # inside a multi-line value
        try:
            found = tomllib.loads(statement)
        except ValueError:
            continue
        if statement.lstrip().startswith("["):
            *_, table = _keys(found, ())
            yield table, start
        else:
            yield from ((keys, start) for keys in _keys(found, table))
        statement = ""


def _keys(found: Mapping[str, Any], before: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for key, value in found.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from _keys(value, (*before, key))

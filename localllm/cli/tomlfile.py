"""Read a TOML file with the line number of each value, which Python's tomllib does not report, and change single
values of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from localllm.base.files.regular import read_given
from localllm.cli.app import UsageError

FILE_VARIABLE = "LOCALLLM_CONFIG"


def file_path(given: str, environ: Mapping[str, str]) -> tuple[Path, bool]:
    """Return the path of the configuration file, and whether the user named it."""
    named = given or environ.get(FILE_VARIABLE, "")
    if named:
        return Path(os.path.expanduser(named)), True
    from platformdirs import user_config_path

    return user_config_path("localllm", appauthor=False) / "config.toml", False


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
    text = read_text(path, required)
    return None if text is None else parse_toml(path, text)


def parse_toml(path: Path, text: str) -> TomlFile:
    """Return the parsed text of a file. Raise UsageError if it is invalid."""
    import tomllib

    try:
        text = _without_mark(text)[1]
        lines = {keys: each.start + 1 for each in _statements(text) for keys in each.keys}
        return TomlFile(path, tomllib.loads(text), lines)
    except RecursionError:
        raise UsageError(f"{path}: the values are nested too deeply") from None
    except ValueError as error:  # TOMLDecodeError, or an integer with thousands of digits
        at = _AT.search(str(error))
        line = f":{at[1] or text.count(chr(10)) + 1}" if at else ""
        raise UsageError(f"{path}{line}: not valid TOML: {_AT.sub('', str(error))}") from None


def read_text(path: Path, required: bool) -> str | None:
    """Return the text of a file, or None if it is missing and not `required`. A byte order mark and the ends of lines
    stay. Raise UsageError if it cannot be read."""
    try:
        if not required and not os.path.isfile(path):  # also False if a parent folder denies access
            return None
        data = read_given(path, 2 * MOST)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MOST:
        raise UsageError(f"{path}: larger than {MOST >> 10} KiB; is this a configuration file?")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{path}:{line}: not UTF-8 text") from None


def changed(file: Path, text: str, keys: tuple[str, ...], value: str | None) -> str:
    """Return a TOML text with another value, written as TOML, for a key; None removes the key. All else stays,
    character for character. Raise UsageError if the key is part of an inline table.
    """
    import tomllib

    mark, text = _without_mark(text)
    lines, statements = text.split("\n"), list(_statements(text))
    ending = "\r" if "\r\n" in text else ""
    found = next((each for each in statements if keys in each.keys and not each.header), None)
    if found is not None:
        written = _replaced("\n".join(lines[found.start : found.stop]), value) if value is not None else None
        lines[found.start : found.stop] = [] if written is None else [written]
    elif value is not None:
        *table, key = keys
        if lines[-1]:  # end the last line
            lines[-1:] = [lines[-1] + ending, ""]
        at, before = _place(lines, statements, tuple(table))
        lines[at:at] = [line + ending for line in (*before, f"{key} = {value}")]
    after = "\n".join(lines)
    expected = _with(tomllib.loads(text), keys, None if value is None else tomllib.loads(f"v = {value}")["v"])
    try:
        same = tomllib.loads(after) == expected
    except ValueError:
        same = False
    if not same:
        line = f":{found.start + 1}" if found is not None else ""
        raise UsageError(f"{file}{line}: {keys[-1]} cannot be changed here; edit the file")
    return mark + after


def _with(content: Mapping[str, Any], keys: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Return the content of a file with another value for a key, or without it if the value is None."""
    key, *rest = keys
    if rest:
        value = _with(content.get(key, {}), tuple(rest), value)
    others = {name: each for name, each in content.items() if name != key}
    return others if value is None else others | {key: value}


def _replaced(statement: str, value: str) -> str:
    """Return a statement KEY = VALUE with another value, and with the comment after it."""
    import tomllib

    key, _, old = statement.partition("=")
    for at, character in enumerate(old):  # the comment begins at the first # outside of the value
        if character == "#":
            try:
                tomllib.loads(f"v ={old[:at]}")
            except ValueError:
                continue
            old = old[:at]
            break
    rest = statement[len(key) + 1 + len(old.rstrip()) :]
    return f"{key}={old[: len(old) - len(old.lstrip())]}{value}{rest}"


def _place(lines: list[str], statements: list[_Statement], table: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
    """Return the index of the line where a key can be added to a table, and the lines to write before it."""
    own = [each for each in statements if each.table == table]
    if own:
        return own[-1].stop, ()
    if table:
        end = len(lines) - 1
        return end, (*([""] if end else []), f"[{'.'.join(table)}]")
    if not statements:
        return len(lines) - 1, ()
    first = statements[0].start
    while first and lines[first - 1].startswith("#"):  # comments that belong to the table
        first -= 1
    return first, ()


class _Statement(NamedTuple):
    """A statement in lines start:stop, counted from 0: a value, or the header of a table."""

    start: int
    stop: int
    table: tuple[str, ...]  # the table that it belongs to or begins
    keys: list[tuple[str, ...]]  # the keys that it defines
    header: bool


def _without_mark(text: str) -> tuple[str, str]:
    """Return a byte order mark, if there is one, and the text after it."""
    return (text[:1], text[1:]) if text.startswith("\ufeff") else ("", text)


def _statements(text: str) -> Iterator[_Statement]:
    """Yield the statements of a valid file.

    Each statement is parsed alone: lines are added until they are valid TOML by themselves.
    """
    import tomllib

    table: tuple[str, ...] = ()
    statement, start = "", 0
    for number, line in enumerate(text.split("\n")):
        if not statement:
            start = number
        statement += line + "\n"
        if start != number and not _ENDS.search(line):
            continue  # inside a multi-line value
        try:
            found = tomllib.loads(statement)
        except ValueError:
            continue
        header = statement.lstrip().startswith("[")
        if header:
            *_, table = _keys(found, ())
        keys = [table] if header else list(_keys(found, table))
        if keys:
            yield _Statement(start, number + 1, table, keys, header)
        statement = ""


def _keys(found: Mapping[str, Any], before: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for key, value in found.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from _keys(value, (*before, key))

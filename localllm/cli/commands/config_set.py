"""`localllm config set` and `unset`: change one option in the configuration file, and leave the rest as it is."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from localllm.base.files.outputs import new_file
from localllm.base.printable import printable
from localllm.cli.app import UsageError
from localllm.cli.catalogue import SHARED
from localllm.cli.configuration import Sources
from localllm.cli.flags import typed
from localllm.cli.naming import lasting
from localllm.cli.table import COMMANDS
from localllm.cli.terminal.console import YELLOW, say
from localllm.cli.tomlfile import changed, file_path, read_text
from localllm.cli.values import key_of, value_of, value_of_text
from localllm.loading.resolve import resolve
from localllm.options import DeclaredOption, OptionError
from localllm.options.serve import KEYS

_LOCK_SECONDS = 10.0
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")


def set_option(config: str, *words: str) -> str:
    """Write KEY = VALUE to the file, and return what was written. KEY is an option that commands share, or
    COMMAND.OPTION."""
    if len(words) < 2:
        raise UsageError("expected KEY and VALUE, as in localllm config set model NAME")
    key, *given = words
    table, each, sources = _found(config, key, "set")
    if len(given) > 1 and not each.option.repeat:
        raise UsageError(f"expected one value for {printable(key)}, got {len(given)}; put a text into quotes")
    texts = [_checked(each, key, text) for text in given]
    value = _toml([_raw(each, text) for text in texts] if len(texts) > 1 else _raw(each, texts[0]))
    _write(config, sources, table, each, value)
    above = Sources(COMMANDS, config, os.environ).found(table, {}).get(each.name)
    if above is not None and above.source != "file":
        say(f"note: {above.where} comes first", YELLOW)
    return f"{sources.path}: {_name(table, each)} = {'(set)' if each.option.kind is KEYS else value}"


def unset_option(config: str, *words: str) -> str:
    """Remove KEY from the file, and return what was done."""
    if len(words) != 1:
        raise UsageError("expected one KEY, as in localllm config unset model")
    table, each, sources = _found(config, words[0], "unset")
    if not _write(config, sources, table, each, None):
        return f"{sources.path}: {_name(table, each)} was not set"
    return f"{sources.path}: {_name(table, each)} is no longer set"


def _found(config: str, key: str, action: str) -> tuple[str, DeclaredOption, Sources]:
    """Return the table and the option that a key means, and the present configuration. Raise UsageError if either is
    invalid."""
    exists = os.path.isfile(file_path(config, os.environ)[0])
    sources = Sources(COMMANDS, config, os.environ, None if exists else "")
    table, dot, name = key.partition(".")
    if dot and table not in sources.catalogue.commands:
        raise UsageError(f"{printable(key)}: no command {printable(table)} has a table; write COMMAND.OPTION")
    place = f"localllm config {action} {printable(key)}"
    each = sources.catalogue.option(table, name, place) if dot else sources.catalogue.option(SHARED, key, place)
    return (table if dot else SHARED), each, sources


def _name(table: str, each: DeclaredOption) -> str:
    return f"{table}.{key_of(each)}" if table else key_of(each)


def _checked(each: DeclaredOption, key: str, text: str) -> str:
    """Return the text of a value as the file holds it. A model must exist, and is written for any folder."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{printable(key)}: {printable(text, 100)} is not UTF-8 text; the file needs it") from None
    try:
        value_of_text(each, text)
    except OptionError as error:
        raise UsageError(f"{printable(key)}: {typed(error)}") from None
    if each.option.offers != "models" or each.name == "hf_repo" or not text:
        return text
    resolve(text)
    return lasting(text)


def _raw(each: DeclaredOption, text: str) -> Any:
    """Return a text as the TOML value that means the same: true or false, a number, or a text."""
    if each.default is False:
        return value_of_text(each, text)
    if _NUMBER.fullmatch(text):
        number = float(text) if "." in text else int(text)
        try:
            if value_of(each, number) == value_of_text(each, text):
                return number
        except OptionError:
            pass
    return text


def _toml(value: Any) -> str:
    """Return a value in TOML, whose texts, numbers, lists and switches are written as in JSON."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _write(config: str, sources: Sources, table: str, each: DeclaredOption, value: str | None) -> bool:
    """Change the file, and return whether it was changed. Raise UsageError, and write nothing, if it would be
    invalid."""
    path = Path(os.path.realpath(sources.path))  # the file that a link in a folder of settings leads to
    if value is None and not path.exists():
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{path.parent}: cannot be created: {error.strerror or error}") from None
    with _alone(path.parent):
        return _change(path, config, sources, table, each, value)


def _change(path: Path, config: str, sources: Sources, table: str, each: DeclaredOption, value: str | None) -> bool:
    text = read_text(path, required=False) or ""
    key = _key_in(sources, table, each)
    after = changed(sources.path, text, (table, key) if table else (key,), value)
    if after == text:
        return False
    checked = Sources(COMMANDS, config, os.environ, after)
    for name in (SHARED, *checked.catalogue.commands):
        checked.found(name, {})
    with new_file(path, overwrite=True) as file:
        file.write(after.encode())
    return True


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other commands that change a file in this folder waiting, so that no change is lost. Windows has no such
    lock."""
    try:
        import fcntl

        lock = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        yield
        return
    try:
        end = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise UsageError(f"{folder}: another program is changing the configuration; try again") from None
                time.sleep(0.02)
            except OSError:  # a network file system without locks
                break
        yield
    finally:
        os.close(lock)


def _key_in(sources: Sources, table: str, each: DeclaredOption) -> str:
    """Return the key of an option as the file writes it, or its usual key if the file does not have it."""
    return sources.keys.get((table, each.name), key_of(each))

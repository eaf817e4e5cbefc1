"""`localllm config`: show every option with its value and source, or check the configuration."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from localllm.base.printable import printable
from localllm.cli.app import Command, UsageError, nearest_name
from localllm.cli.catalogue import ALIKE, SHARED
from localllm.cli.configuration import ConfiguredValue, Sources, file_path
from localllm.cli.flags import typed
from localllm.cli.options import ConfigOptions
from localllm.cli.terminal.formatting import in_columns
from localllm.cli.values import key_of
from localllm.options import DeclaredOption
from localllm.options.serve import KEYS

PATH, CHECK = "path", "check"
TITLE = "all commands"


class ConfigRow(NamedTuple):
    """A line of the listing: an option, its value and its source."""

    each: DeclaredOption
    found: ConfiguredValue | None  # the configured value and its source; None: the default applies

    @property
    def origin(self) -> tuple[str, str]:
        """Return the kind of the source, and the source."""
        return (self.found.source, self.found.where) if self.found is not None else ("default", "")


def config(own: ConfigOptions, commands: Mapping[str, Command]) -> None:
    """Show the options of one or all commands, print the path of the configuration file, or only check the file."""
    wanted = " ".join(own.words)
    if wanted == PATH:
        print(file_path(own.config, os.environ)[0])
        return
    sources = Sources(commands, own.config, os.environ)
    known = sources.catalogue.commands
    wanted = ALIKE.get(wanted, wanted)
    if wanted not in ("", CHECK, *known):
        hint = nearest_name(wanted, [*known, PATH, CHECK])
        raise UsageError(f"expected a command, path or check, got {wanted!r}{hint}")
    given = {"preset": own.preset} if own.preset else {}
    sections = {name: list(_rows(sources, name, given)) for name in (SHARED, *known)}  # checks all values
    if wanted == CHECK:
        state = "no errors" if sources.has_file else "no such file, so the defaults count"
        print(printable(f"{sources.path}: {state}", None))
        return
    shown = {wanted: sections[wanted]} if wanted else _shortened(sections)
    preset, _ = sources.preset(wanted, given)
    print(_as_json(sources, preset, shown) if own.json else _as_text(sources, preset, shown))


def _rows(sources: Sources, command: str, given: Mapping[str, Any]) -> Iterator[ConfigRow]:
    found = sources.found(command, given)
    for name, each in sources.catalogue.of(command).items():
        if name != "preset":
            yield ConfigRow(each, found.get(name))


def _shortened(sections: Mapping[str, list[ConfigRow]]) -> dict[str, list[ConfigRow]]:
    """Return every option once: the shared options, then for each command its own options and the shared options that
    have a different source for this command."""
    shared = {row.each.name: row.origin for row in sections[SHARED]}
    own = {name: [row for row in rows if shared.get(row.each.name) != row.origin] for name, rows in sections.items()}
    return {SHARED: sections[SHARED], **{name: rows for name, rows in own.items() if rows}}


def _as_text(sources: Sources, preset: str, sections: Mapping[str, list[ConfigRow]]) -> str:
    facts = (
        f"file: {sources.path}{'' if sources.has_file else ' (no such file)'}",
        f"preset: {preset or 'none'} (known: {', '.join(sources.presets)})",
    )
    parts = ["\n".join(printable(fact, None) for fact in facts)]
    for name, rows in sections.items():
        lines = in_columns([(key_of(row.each), _source(row, sources), _value(row)) for row in rows])
        parts.append(f"{f'[{name}]' if name else TITLE}\n{lines}")
    return "\n\n".join(parts)


def _value(row: ConfigRow) -> str:
    """Return a value as typed after a flag, or a default as shown in help. Of API keys, only the number is shown."""
    option, default = row.each.option, row.each.default
    if row.found is None:
        return typed(option.shown) or (str(default).lower() if isinstance(default, int | float) else "-")
    value = row.found.value
    if option.kind is KEYS:
        return f"({len(value)} set)"
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return typed(option.shown)
    if isinstance(value, tuple | list):
        return ", ".join(str(part) for part in value) or "-"
    return json.dumps(_plain(value)) if isinstance(value, Mapping) else str(value)


def _source(row: ConfigRow, sources: Sources) -> str:
    """Return the source of a value as text. The header shows the path of the file, so here the file name is enough."""
    source, where = row.origin
    where = where.replace(str(sources.path), sources.path.name)
    if source == "default" and row.each.option.key:
        return "default, or the model file's"
    return f"environment {where}" if source == "environment" else where or source


def _as_json(sources: Sources, preset: str, sections: Mapping[str, list[ConfigRow]]) -> str:
    options = {
        name or "all": {
            key_of(row.each): {
                "value": _value(row) if row.each.option.kind is KEYS else _plain(_raw(row)),
                "source": row.origin[0],
                "where": row.origin[1],
            }
            for row in rows
        }
        for name, rows in sections.items()
    }
    facts = {"file": str(sources.path), "exists": sources.has_file, "preset": preset, "presets": sources.presets}
    return json.dumps({**facts, "options": options}, indent=2)


def _raw(row: ConfigRow) -> Any:
    return row.each.default if row.found is None else row.found.value


def _plain(value: Any) -> Any:
    """Return a value as a JSON type."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

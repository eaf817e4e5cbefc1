"""`localllm config`: show every option with its value and source, or check the configuration."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any

from localllm.cli.app import UsageError, nearest_name
from localllm.cli.catalogue import ALIKE, SHARED
from localllm.cli.configuration import Configured, Sources, default_model
from localllm.cli.flags import typed
from localllm.cli.options import ConfigOptions
from localllm.cli.table import COMMANDS
from localllm.cli.terminal.console import fitted, room
from localllm.cli.terminal.formatting import in_columns
from localllm.cli.tomlfile import file_path
from localllm.cli.values import key_of
from localllm.options import DeclaredOption
from localllm.options.serve import KEYS

PATH, CHECK, SET, UNSET = "path", "check", "set", "unset"
TITLE = "all commands"
DEFAULT = "default"  # the source of an option that is not configured


_Rows = list[tuple[DeclaredOption, Configured]]  # each option with its value, which may be the default


def config(own: ConfigOptions) -> None:
    """Show the options of one or all commands, print the path of the configuration file, check it, or change it."""
    if own.words[:1] in ((SET,), (UNSET,)):
        from localllm.cli.commands.config_set import set_option, unset_option

        change = set_option if own.words[0] == SET else unset_option
        print(fitted(change(own.config, *own.words[1:])))
        return
    wanted = " ".join(own.words)
    if wanted == PATH:
        print(file_path(own.config, os.environ)[0])
        return
    sources = Sources(COMMANDS, own.config, os.environ)
    known = sources.catalogue.commands
    wanted = ALIKE.get(wanted, wanted)
    if wanted not in ("", CHECK, *known):
        hint = nearest_name(wanted, [*known, PATH, CHECK, SET, UNSET])
        raise UsageError(f"expected a command, path, check, set or unset, got {wanted!r}{hint}")
    given = {"preset": own.preset} if own.preset else {}
    found = {name: sources.found(name, given) for name in (SHARED, *known)}  # checks all values
    if wanted == CHECK:
        state = "no errors" if sources.has_file else "no such file, so the defaults apply"
        print(fitted(f"{sources.path}: {state}"))
        return
    sections = {name: _rows(sources.catalogue.of(name), values) for name, values in found.items()}
    shown = {wanted: sections[wanted]} if wanted else _shortened(sections)
    preset = own.preset or (found[wanted]["preset"].value if "preset" in found[wanted] else "")
    print(_as_json(sources, preset, shown) if own.json else _as_text(sources, preset, shown))


def _rows(options: Mapping[str, DeclaredOption], found: Mapping[str, Configured]) -> _Rows:
    default = {name: Configured(each.default, DEFAULT, "") for name, each in options.items()}
    return [(each, found.get(name, default[name])) for name, each in options.items() if name != "preset"]


def _shortened(sections: Mapping[str, _Rows]) -> dict[str, _Rows]:
    """Return every option once: the shared options, then for each command its own options and the shared options that
    have a different source for this command."""
    shared = {each.name: found[1:] for each, found in sections[SHARED]}
    own = {
        name: [(each, found) for each, found in rows if shared.get(each.name) != found[1:]]
        for name, rows in sections.items()
    }
    return {SHARED: sections[SHARED], **{name: rows for name, rows in own.items() if rows}}


def _as_text(sources: Sources, preset: str, sections: Mapping[str, _Rows]) -> str:
    model = default_model(sources, {"preset": preset} if preset else {})
    facts = (
        f"file: {sources.path}{'' if sources.has_file else ' (no such file)'}",
        f"default model: {model or 'none (localllm config set model NAME chooses one)'}",
        f"preset: {preset or 'none'} (known: {', '.join(sources.presets)})",
    )
    parts = ["\n".join(map(fitted, facts))]
    for name, rows in sections.items():
        cells = [(key_of(each), _source(each, found, sources), _value(each, found)) for each, found in rows]
        lines = in_columns(cells)
        if 0 < room() < max(map(len, lines.split("\n"))):
            short = [(key, value if source == DEFAULT else f"{value} ({source})") for key, source, value in cells]
            lines = in_columns(short, room=room())
        parts.append(f"{f'[{name}]' if name else TITLE}\n{lines}")
    return "\n\n".join(parts)


def _value(each: DeclaredOption, found: Configured) -> str:
    """Return a value as typed after a flag, or a default as shown in help. Of API keys, only the number is shown."""
    value = found.value
    if found.source == DEFAULT:
        return typed(each.option.shown) or (str(value).lower() if isinstance(value, int | float) else "-")
    if each.option.kind is KEYS:
        return f"({len(value)} set)"
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return typed(each.option.shown)
    if isinstance(value, tuple | list):
        return ", ".join(str(part) for part in value) or "-"
    return json.dumps(_plain(value)) if isinstance(value, Mapping) else str(value)


def _source(each: DeclaredOption, found: Configured, sources: Sources) -> str:
    """Return the source of a value as text. The header shows the path of the file, so here the file name is enough."""
    where = found.where.replace(str(sources.path), sources.path.name)
    if found.source == DEFAULT and each.option.key:
        return "default, or the model file's"
    return f"environment {where}" if found.source == "environment" else where or found.source


def _as_json(sources: Sources, preset: str, sections: Mapping[str, _Rows]) -> str:
    options = {
        name or "all": {
            key_of(each): {
                "value": _value(each, found) if each.option.kind is KEYS else _plain(found.value),
                "source": found.source,
                "where": found.where,
            }
            for each, found in rows
        }
        for name, rows in sections.items()
    }
    presets = list(sources.presets)
    model = default_model(sources, {"preset": preset} if preset else {})
    facts = {"file": str(sources.path), "exists": sources.has_file, "model": model}
    facts |= {"preset": preset, "presets": presets}
    return json.dumps({**facts, "options": options}, indent=2)


def _plain(value: Any) -> Any:
    """Return a value as a JSON type."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

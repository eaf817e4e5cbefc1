"""Options that are not on the command line: from the environment, a preset and the configuration file.

The order of precedence is: the flag, the variable LOCALLLM_NAME, the preset, the command's table in the file, and the
top level of the file. Then come a model file's recommendation and the default. Only the command line reads these
sources; the Python API takes options from its caller alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

from localllm.cli import own_names
from localllm.cli.app import Command, CommandLine, UsageError, nearest_name
from localllm.cli.catalogue import ALIKE, APART, OWN, SHARED, Catalogue
from localllm.cli.flags import typed
from localllm.cli.naming import is_prompt
from localllm.cli.options import ModelName
from localllm.cli.presets import PRESETS
from localllm.cli.tomlfile import FILE_VARIABLE, TomlFile, file_path, parse_toml, read_toml
from localllm.cli.values import value_of, value_of_text
from localllm.options import DeclaredOption, OptionError

PREFIX = "LOCALLLM_"
TABLE_OF_PRESETS = "presets"
RIVALS = (  # an option overrides its rivals from sources of lower precedence
    {"words", "model", "hf_repo", "models"},  # each names the model
    {"json_schema", "grammar"},
    {"system_prompt", "system_prompt_file"},
)


class Configured(NamedTuple):
    """The value of an option, and its source. In an entry, the value is not parsed, since commands may interpret it
    differently."""

    value: Any
    source: str  # environment, preset or file
    where: str  # the variable, the preset, or FILE:LINE
    place: str = ""  # the beginning of a message about the value

    def parsed(self, each: DeclaredOption) -> Configured:
        """Return the value of an entry for an option of a command. Raise UsageError if it is invalid."""
        read = value_of_text if self.source == "environment" else value_of
        try:
            return self._replace(value=read(each, self.value))
        except OptionError as error:
            raise UsageError(f"{self.place}: {typed(error)}") from None


_Entries = dict[str, Configured]  # by the name of the option


def filled(commands: Mapping[str, Command], line: CommandLine) -> CommandLine:
    """Return a command line completed from the other sources. Raise UsageError if a value is invalid."""
    if line.name == OWN:
        return line
    sources = Sources(commands, line.values.get("config", ""), os.environ)
    name, given = ALIKE.get(line.name, line.name), dict(line.values)
    if _takes_text(commands[name]) and given.get("words") and is_prompt(given["words"][0]):
        del given["words"]  # no model, so that the configured one counts
    found = sources.found(name, given)
    values = {option: each.value for option, each in found.items()}
    if (name, "model") in APART:
        values["default_model"] = default_model(sources, given)
    return CommandLine(line.name, {**values, **line.values}, {option: each.where for option, each in found.items()})


def default_model(sources: Sources, given: Mapping[str, Any]) -> str:
    """Return the model for commands without MODEL, or "". `given` may choose a preset."""
    found = sources.found(SHARED, given).get("model")
    return found.value if found is not None else ""


def _takes_text(command: Command) -> bool:
    """Return whether the arguments of a command are MODEL and a text."""
    return any(issubclass(group, ModelName) and group is not ModelName for group in command.groups)


class Sources:
    """The contents of the environment, the presets and the file. The constructor raises UsageError if the file is
    invalid, or a variable names no option.
    """

    def __init__(
        self, commands: Mapping[str, Command], config: str, environ: Mapping[str, str], text: str | None = None
    ) -> None:
        """Read the sources. `text` replaces the content of the file."""
        self._commands = commands
        self.path, named = file_path(config, environ)
        self.keys: dict[tuple[str, str], str] = {}  # keys as the file writes them, by table and option
        self._tables: dict[str, _Entries] = {}  # tables of the file by command; SHARED is the top level of the file
        self.presets = {  # built-in presets have no place
            name: {option: Configured(value, "file", "") for option, value in values.items()}
            for name, values in PRESETS.items()
        }
        file = read_toml(self.path, named) if text is None else parse_toml(self.path, text)
        self.has_file = file is not None
        if file is not None and file.content:
            self._read(file)
        self._variables = {  # empty variables are ignored
            variable: text
            for variable, text in environ.items()
            if variable.startswith(PREFIX) and variable != FILE_VARIABLE and text
        }
        for variable in self._variables:
            self.catalogue.check_variable(variable, _key(variable))

    def found(self, command: str, given: Mapping[str, Any]) -> dict[str, Configured]:
        """Return the options in the other sources that are missing in `given`, for a command or for SHARED."""
        layers = [self._environment(command), self._table(command, command), self._table(SHARED, command)]
        chosen = [layer["preset"] for layer in layers if "preset" in layer]
        if "preset" in given:
            chosen = [Configured(given["preset"], "", "--preset")]
        layers.insert(1, self._preset(chosen[0], command) if chosen and chosen[0].value else {})
        found: dict[str, Configured] = {}
        for layer in layers:
            above = {*given, *found}
            rivals = {each for group in RIVALS if group & above for each in group}
            found |= {option: each for option, each in layer.items() if option not in above | rivals}
        return found

    @cached_property
    def catalogue(self) -> Catalogue:
        return Catalogue(self._commands)

    def _environment(self, command: str) -> _Entries:
        found: _Entries = {}
        for variable, text in self._variables.items():
            each = self.catalogue.named(_key(variable), command)
            if each is None or not self.catalogue.takes(command, each.name):
                continue
            if each.name in found:
                raise UsageError(f"{variable}: {found[each.name].where} is the same option; unset one of them")
            found[each.name] = Configured(text, "environment", variable, variable).parsed(each)
        return found

    def _preset(self, chosen: Configured, command: str) -> _Entries:
        name = chosen.value
        if name not in self.presets:
            hint = nearest_name(name, self.presets) or f"; known presets: {', '.join(self.presets)}"
            raise UsageError(f"{chosen.where}: unknown preset {name!r}{hint}")
        return {
            option: each._replace(source="preset", where=", ".join(filter(None, (f"preset {name}", each.where))))
            for option, each in self._meant(self.presets[name], command).items()
        }

    def _table(self, table: str, command: str) -> _Entries:
        return self._meant(self._tables.get(table, {}), command, own=table == command)

    def _meant(self, entries: _Entries, command: str, own: bool = False) -> _Entries:
        """Return the values that entries have for a command. `own` is true if the entries are in the command's
        table."""
        return {
            option: entry.parsed(self.catalogue.of(command)[option])
            for option, entry in entries.items()
            if own or self.catalogue.takes(command, option)
        }

    def _read(self, file: TomlFile) -> None:
        """Read the values of the file, and check each of them."""
        top = {}
        for key, raw in file.content.items():
            if key == TABLE_OF_PRESETS:
                for name, table in _table(file, raw, key).items():
                    self.presets[name] = self._entries(file, SHARED, _table(file, table, key, name), key, name)
            elif key == own_names.TABLE and isinstance(raw, dict):
                own_names.names_in(file)  # checks them
            elif key in self.catalogue.commands:
                self._tables[key] = self._entries(file, key, _table(file, raw, key), key)
            else:
                top[key] = raw
        self._tables[SHARED] = self._entries(file, SHARED, top)

    def _entries(self, file: TomlFile, command: str, table: Mapping[str, Any], *keys: str) -> _Entries:
        entries: _Entries = {}
        for key, raw in table.items():
            place = file.place(*keys, key)
            name = self.catalogue.option(command, key, place).name
            if name in entries:
                raise UsageError(f"{place}: {key} is the same option as in {entries[name].where}; remove one of them")
            if keys[:1] != (TABLE_OF_PRESETS,):
                self.keys[command, name] = key
            if name == "preset" and keys[:1] == (TABLE_OF_PRESETS,):
                raise UsageError(f"{place}: a preset cannot name another preset")
            entries[name] = Configured(raw, "file", place, f"{place}: {key}")
            for taker in [command] if command != SHARED else self.catalogue.takers(name):
                entries[name].parsed(self.catalogue.of(taker)[name])
        return entries


def _key(variable: str) -> str:
    return variable.removeprefix(PREFIX).lower()


def _table(file: TomlFile, raw: Any, *keys: str) -> Mapping[str, Any]:
    if not isinstance(raw, dict):
        name = ".".join(keys)
        raise UsageError(f"{file.place(*keys)}: {name} is a table; write [{name}], and its options below")
    return raw

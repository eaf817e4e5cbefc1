"""Options that are not on the command line: from the environment, a preset and the configuration file.

The order of precedence is: the flag, the variable LOCALLLM_NAME, the preset, the command's table in the file, and the
top level of the file. Then come a model file's recommendation and the default. Only the command line reads these
sources; the Python API takes options from its caller alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from localllm.cli.app import Command, Filled, UsageError, nearest_name
from localllm.cli.catalogue import ALIKE, OWN, SHARED, Catalogue
from localllm.cli.flags import typed
from localllm.cli.presets import PRESETS
from localllm.cli.tomlfile import TomlFile, read_toml
from localllm.cli.values import value_of, value_of_text
from localllm.options import OptionError

PREFIX, FILE_VARIABLE = "LOCALLLM_", "LOCALLLM_CONFIG"
TABLE_OF_PRESETS = "presets"
RIVALS = (  # an option overrides its rivals from sources of lower precedence
    {"words", "model", "hf_repo", "models"},  # each names the model
    {"json_schema", "grammar"},
    {"system_prompt", "system_prompt_file"},
)


class ConfiguredValue(NamedTuple):
    """The value of an option, and its source."""

    value: Any
    source: str  # environment, preset or file
    where: str  # the variable, the preset, or FILE:LINE


class _Entry(NamedTuple):
    """An unparsed value in the file. Commands may interpret it differently."""

    raw: Any
    where: str


_Entries = dict[str, _Entry]  # key: option name


def filled(commands: Mapping[str, Command], name: str, given: Mapping[str, Any]) -> Filled:
    """Return the options of a command line, completed from the other sources. Raise UsageError if a value is
    invalid."""
    if name == OWN:
        return Filled(name, given, {})
    found = Sources(commands, given.get("config", ""), os.environ).found(ALIKE.get(name, name), given)
    values = {option: each.value for option, each in found.items()}
    return Filled(name, {**values, **given}, {option: each.where for option, each in found.items()})


def file_path(given: str, environ: Mapping[str, str]) -> tuple[Path, bool]:
    """Return the path of the configuration file, and whether the user named it."""
    named = given or environ.get(FILE_VARIABLE, "")
    if named:
        return Path(os.path.expanduser(named)), True
    from platformdirs import user_config_path

    return user_config_path("localllm", appauthor=False) / "config.toml", False


class Sources:
    """The contents of the environment, the presets and the file. The constructor raises UsageError if the file is
    invalid.
    """

    def __init__(self, commands: Mapping[str, Command], config: str, environ: Mapping[str, str]) -> None:
        self._commands = commands
        self.path, named = file_path(config, environ)
        file = read_toml(self.path, named)
        self.has_file = file is not None
        self._tables: dict[str, _Entries] = {}  # tables of the file by command; SHARED is the top level of the file
        self._presets: dict[str, _Entries] = {}
        if file is not None and file.content:
            self._read(file)
        self._variables = dict(self._known_variables(environ))

    def found(self, command: str, given: Mapping[str, Any]) -> dict[str, ConfiguredValue]:
        """Return the options in the other sources that are missing in `given`, for a command or for SHARED."""
        found: dict[str, ConfiguredValue] = {}
        for layer in self._layers(command, given):
            above = {*given, *found}
            rivals = {each for group in RIVALS if group & above for each in group}
            found |= {option: each for option, each in layer.items() if option not in above | rivals}
        return found

    def preset(self, command: str, given: Mapping[str, Any]) -> tuple[str, str]:
        """Return the preset of a command and the source that selects it, or "" if none is selected."""
        if "preset" in given:
            return given["preset"], "--preset"
        for layer in (self._environment(command), self._table(command, command), self._table(SHARED, command)):
            if "preset" in layer:
                return layer["preset"].value, layer["preset"].where
        return "", ""

    @property
    def presets(self) -> list[str]:
        """Return the names of all presets."""
        return [*PRESETS, *(name for name in self._presets if name not in PRESETS)]

    @cached_property
    def catalogue(self) -> Catalogue:
        return Catalogue(self._commands)

    # -- sources ----------------------------------------------------------------------------------------------------

    def _layers(self, command: str, given: Mapping[str, Any]) -> Iterator[dict[str, ConfiguredValue]]:
        yield self._environment(command)
        yield self._preset(command, given)
        yield self._table(command, command)
        if command != SHARED:
            yield self._table(SHARED, command)

    def _environment(self, command: str) -> dict[str, ConfiguredValue]:
        found: dict[str, ConfiguredValue] = {}
        for variable, text in self._variables.items():
            each = self.catalogue.named(variable.removeprefix(PREFIX).lower(), command)
            if each is None or not self.catalogue.takes(command, each.name):
                continue
            if each.name in found:
                raise UsageError(f"{variable}: {found[each.name].where} is the same option; unset one of them")
            try:
                found[each.name] = ConfiguredValue(value_of_text(each, text), "environment", variable)
            except OptionError as error:
                raise UsageError(f"{variable}: {typed(error)}") from None
        return found

    def _preset(self, command: str, given: Mapping[str, Any]) -> dict[str, ConfiguredValue]:
        name, where = self.preset(command, given)
        if not name:
            return {}
        if name in self._presets:
            found = self._meant(self._presets[name], command)
            where = f"preset {name}, "
            return {option: ConfiguredValue(each.value, "preset", where + each.where) for option, each in found.items()}
        if name not in PRESETS:
            hint = nearest_name(name, self.presets) or f"; known are {', '.join(self.presets)}"
            raise UsageError(f"{where}: unknown preset {name!r}{hint}")
        takes = self.catalogue.of(command)
        return {
            key: ConfiguredValue(value, "preset", f"preset {name}")
            for key, value in PRESETS[name].items()
            if key in takes
        }

    def _table(self, table: str, command: str) -> dict[str, ConfiguredValue]:
        entries = self._tables.get(table)
        return self._meant(entries, command, own=table == command) if entries else {}

    def _meant(self, entries: _Entries, command: str, own: bool = False) -> dict[str, ConfiguredValue]:
        """Return the values that entries have for a command. `own` is true if the entries are in the command's
        table."""
        options = self.catalogue.of(command)
        return {
            option: ConfiguredValue(value_of(options[option], entry.raw), "file", entry.where)
            for option, entry in entries.items()
            if (option in options if own else self.catalogue.takes(command, option))
        }

    # -- reading ---------------------------------------------------------------------------------------------------

    def _known_variables(self, environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """Yield the environment variables that set an option. Empty variables are ignored."""
        for variable, text in environ.items():
            if variable.startswith(PREFIX) and variable != FILE_VARIABLE and text:
                self.catalogue.check_variable(variable, variable.removeprefix(PREFIX).lower())
                yield variable, text

    def _read(self, file: TomlFile) -> None:
        """Read the values of the file, and check each of them."""
        top = {}
        for key, raw in file.content.items():
            if key == TABLE_OF_PRESETS:
                for name, table in _table(file, raw, key).items():
                    self._presets[name] = self._entries(file, SHARED, _table(file, table, key, name), key, name)
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
            if name == "preset" and keys[:1] == (TABLE_OF_PRESETS,):
                raise UsageError(f"{place}: a preset cannot name another preset")
            entries[name] = _Entry(raw, place)
            for taker in [command] if command != SHARED else self.catalogue.takers(name):
                try:
                    value_of(self.catalogue.of(taker)[name], raw)
                except OptionError as error:
                    raise UsageError(f"{place}: {key}: {typed(error)}") from None
        return entries


def _table(file: TomlFile, raw: Any, *keys: str) -> Mapping[str, Any]:
    if not isinstance(raw, dict):
        name = ".".join(keys)
        raise UsageError(f"{file.place(*keys)}: {name} is a table; write [{name}], and its options below")
    return raw

"""The options of each command by their keys in a configuration file, and the options that several commands share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property

from localllm.base.spelling import closest
from localllm.cli.app import Command, UsageError, nearest_name
from localllm.cli.values import keys_of, plain_key
from localllm.options import DeclaredOption, Options, declared

OWN = "config"  # the command that shows the configuration; its own options cannot be configured
ALIKE = {"web": "serve"}  # command -> the command whose options and configuration it uses
SHARED = ""  # key of the shared options, in place of a command name
EACH_TIME = ("force", "yes", "config")  # options that only the command line can set
# Never shared: options that change a measurement, and the model of a server, which offers all models without one
APART = {("perplexity", "ctx_size"), ("imatrix", "ctx_size"), ("serve", "model")}
_SHOWN = 3  # maximum number of commands in a message


class Catalogue:
    """The options of every command. An option in the groups of several commands is shared."""

    def __init__(self, commands: Mapping[str, Command]) -> None:
        users = Counter(group for name, command in commands.items() if name not in ALIKE for group in command.groups)
        self.commands = [name for name in commands if name != OWN and name not in ALIKE]
        self._options = {name: _by_name(commands[name].groups) for name in self.commands}
        self._options[SHARED] = _by_name(group for group, count in users.items() if count > 1)

    def of(self, command: str) -> Mapping[str, DeclaredOption]:
        """Return the options of a command, or the shared options, by name."""
        return self._options[command]

    def takes(self, command: str, name: str) -> bool:
        """Return whether a command accepts this shared option."""
        return name in self._options[command] and (command, name) not in APART

    def takers(self, name: str) -> list[str]:
        """Return the commands that accept this shared option; the result is empty if it is not shared."""
        return [each for each in self.commands if self.takes(each, name)]

    def named(self, key: str, command: str) -> DeclaredOption | None:
        """Return the option of a command by its key."""
        return self._by_key[command].get(plain_key(key))

    def option(self, command: str, key: str, place: str) -> DeclaredOption:
        """Return the option of a command by its key. Raise UsageError with a hint if it does not exist."""
        found = self.named(key, command)
        if found is not None:
            return found
        _check_each_time(key, place)
        if not command and key in ALIKE:
            raise UsageError(f"{place}: localllm {key} is configured in [{ALIKE[key]}]; write its options there")
        having = [f"[{each}]" for each in self.commands if self.named(key, each) is not None]
        if having:
            tables = ", ".join(having[:_SHOWN]) + (" and others" if len(having) > _SHOWN else "")
            all_ = f"{command} does not have {key}" if command else f"not all commands share {key}"
            raise UsageError(f"{place}: {all_}; it belongs in {tables}")
        tables_here = [] if command else [*self.commands, "presets"]
        hint = nearest_name(plain_key(key), [*self._by_key[command], *tables_here])
        raise UsageError(f"{place}: unknown option {key}{hint}")

    def check_variable(self, variable: str, key: str) -> None:
        """Raise UsageError with a hint if no command has an option with this key."""
        if all(self.named(key, command) is None for command in self.commands):
            _check_each_time(key, variable)
            start = variable[: len(variable) - len(key)]
            near = closest(key, [each for keys in self._by_key.values() for each in keys])
            hint = f"; did you mean {start}{near.upper().replace('-', '_')}?" if near else ""
            raise UsageError(f"{variable}: no option has this name{hint}")

    @cached_property
    def _by_key(self) -> dict[str, dict[str, DeclaredOption]]:
        return {
            command: {key: each for each in options.values() for key in keys_of(each)}
            for command, options in self._options.items()
        }


def _check_each_time(key: str, place: str) -> None:
    if plain_key(key) in EACH_TIME:
        raise UsageError(f"{place}: {key} cannot be configured; give it on the command line each time")


def _by_name(groups: Iterable[type[Options]]) -> dict[str, DeclaredOption]:
    found: dict[str, DeclaredOption] = {}
    for group in groups:
        for each in declared(group):
            if each.option.flags and each.name not in EACH_TIME:
                found.setdefault(each.name, each)
    return found

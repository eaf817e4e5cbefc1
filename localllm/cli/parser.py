"""Parses the words of a command line into the option groups of a command, by argparse; prints its help page."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from localllm.cli.declare import Declared
from localllm.cli.options import declared
from localllm.sampling.options import SamplerOptions


class UsageError(Exception):
    """A wrong command line; one line that names the option."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        text = message.removeprefix("argument ")
        raise UsageError(f"{text} ({self.prog} --help lists the options)")


def parser(usage: str, help: str, groups: Sequence[type[Any]]) -> argparse.ArgumentParser:
    """The parser of one command; `usage` is its name and its arguments."""
    made = _Parser(
        prog=f"localllm {usage.split()[0]}",
        usage=f"localllm {usage} [OPTIONS]",
        description=help,
        allow_abbrev=False,
        add_help=False,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=36),
    )
    for group in groups:
        section = made.add_argument_group(title(group))
        for dest, default, option in declared(group):
            _add(section, dest, default, option)
        if group.__name__ not in _TITLES:  # the group of the command itself
            section.add_argument("-h", "--help", action="help", help="this page")
    return made


def parse(usage: str, help: str, groups: Sequence[type[Any]], words: Sequence[str]) -> list[Any]:
    """The groups, filled from the words. Samplers become a dict of the given values, because a file has defaults too.

    UsageError; SystemExit after --help.
    """
    given = vars(parser(usage, help, groups).parse_intermixed_args(words))
    try:
        return [(dict if group is SamplerOptions else group)(**_values(group, given)) for group in groups]
    except argparse.ArgumentTypeError as error:
        raise UsageError(str(error)) from None


def _values(group: type[Any], given: dict[str, Any]) -> dict[str, Any]:
    """The given values by field."""
    values = {}
    for dest, _, option in declared(group):
        if (value := given[dest]) is not None:
            values[dest] = option.finish(value) if isinstance(value, list) else value
    return values


def title(group: type[Any]) -> str:
    """The heading of an option group."""
    return _TITLES.get(group.__name__, "options")


_TITLES = {
    "ModelName": "which model",
    "Opening": "opening a model",
    "Measuring": "opening a model to measure it",
    "Answering": "the answer",
    "Keeping": "keeping a conversation",
    "SamplerOptions": "sampling",
}


def _add(section: argparse._ArgumentGroup, dest: str, default: Any, option: Declared) -> None:
    text = option.help + (f" [{option.shown}]" if option.shown else "")
    text = text.replace("%", "%%")
    if not option.flags:
        section.add_argument(dest, nargs="*", metavar=option.metavar, help=text, type=option.read)
    elif default is False:
        section.add_argument(*option.flags, dest=dest, action="store_true", help=text)
    else:
        action = "append" if option.repeat else "store"
        metavar = option.metavar
        section.add_argument(*option.flags, dest=dest, action=action, metavar=metavar, help=text, type=option.read)

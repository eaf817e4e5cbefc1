"""The command line as a Typer application, built from the table of commands and their option groups.

Typer only parses the arguments. The command runs later (`CommandCall.run`), outside of Typer, so that only
`localllm.cli.main` handles errors and exit codes. The options of a command are built when it is looked up. This module
adds three features to Typer: llama.cpp's long options with one dash (`-ngl 5`), help in sections, and one-line errors.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import typer
from typer._click.exceptions import ClickException, NoSuchOption  # Typer exports its Click only here
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command_from_info
from typer.models import CommandInfo

from localllm.base.spelling import closest
from localllm.cli import complete
from localllm.cli.flags import typed
from localllm.cli.foreign import FOREIGN
from localllm.cli.options import ConfigurationOptions
from localllm.options import Option, OptionError, Options, SamplingOptions, declared

_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
_NONE = object()  # an explicit None, such as `-n -1`; in Typer, None means that the option is missing
_SHORT = re.compile(r"-[A-Za-z](-?[\d.].*)?")  # an attached value must be a number: -n5, but not -f with value a


class UsageError(Exception):
    """An invalid command line. The one-line message names the option."""


class Command(NamedTuple):
    """A command: its arguments, a one-line summary, more help, its option groups, and the function that runs it.

    If `placed` is true, the first argument of the function maps each option that is not on the command line to its
    source.
    """

    arguments: str
    line: str
    more: str
    groups: tuple[type[Options], ...]
    call: Callable[..., None]
    placed: bool = False


class Filled(NamedTuple):
    """A command, the values of its options by name, and the source of each option that is not on the command line."""

    command: str
    values: Mapping[str, Any]
    where: Mapping[str, str]


Fill = Callable[[str, Mapping[str, Any]], Filled]


class _Given(NamedTuple):
    """The parsed arguments: the name of the command, and the values of the options by name."""

    name: str
    values: Mapping[str, Any]


class CommandCall(NamedTuple):
    """A parsed command line: a command, and the values of its option groups except `ConfigurationOptions`."""

    command: Command
    groups: tuple[Any, ...]
    where: Mapping[str, str]  # source of each option that is not on the command line

    def run(self) -> None:
        self.command.call(*([self.where] if self.command.placed else []), *self.groups)


def read_command_line(
    commands: Mapping[str, Command], words: Sequence[str], fill: Fill | None = None
) -> CommandCall | None:
    """Parse a command line. Return None after printing a help page; raise UsageError if the command line is invalid.

    `fill` adds options from other sources than the command line, and may change the command. Sampler
    options are returned as a dict of the given options only, because the model file may have defaults for the others.
    """

    class Group(_Group):
        table = commands

    app = typer.Typer(
        cls=Group,
        rich_markup_mode=None,
        context_settings=_SETTINGS,
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    try:
        done = app(list(words), prog_name="localllm", standalone_mode=False)
    except ClickException as error:
        page = f"localllm {words[0]}" if words and words[0] in commands else "localllm"
        raise UsageError(f"{_line(error)} ({page} --help lists the options)") from None
    if not isinstance(done, _Given):
        return None
    filled = fill(done.name, done.values) if fill is not None else Filled(done.name, done.values, {})
    command = commands[filled.command]
    groups = tuple(_value(group, filled) for group in command.groups if group is not ConfigurationOptions)
    return CommandCall(command, groups, filled.where)


def _root(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="With any command: show the traceback of an error.")] = False,
) -> None:
    """Run large language models from GGUF files on this computer."""


def _line(error: ClickException) -> str:
    option = getattr(error, "param", None)
    return f"{'/'.join(option.opts)}: {error.message}" if option is not None else error.message.rstrip(".")


def nearest_name(name: str, known: Collection[str]) -> str:
    """Return a "did you mean" question with the closest name in `known`, to end a message, or "" if no name is
    close."""
    near = closest(name, known)
    return f"; did you mean {near}?" if near else ""


class _Strict:
    """A Typer parser that never splits `-ngl` into `-n gl`, and suggests the closest option for an unknown option."""

    def make_parser(self, ctx: Any) -> Any:
        parser = super().make_parser(ctx)  # type: ignore[misc]
        known = [*parser._long_opt, *parser._short_opt]
        long, short = parser._match_long_opt, parser._match_short_opt

        def unknown(option: str) -> NoSuchOption:
            reason = FOREIGN.get(option)
            told = f"{option} is not supported: {reason}" if reason else f"unknown option {option}"
            return NoSuchOption(option, told if reason else told + nearest_name(option, known), ctx=ctx)

        def match_long(option: str, value: str | None, state: Any) -> None:
            if option not in parser._long_opt:
                raise unknown(option)
            long(option, value, state)

        def match_short(word: str, state: Any) -> None:
            if not _SHORT.fullmatch(word) or word[:2] not in parser._short_opt:
                raise unknown(word)
            short(word, state)

        parser._match_long_opt, parser._match_short_opt = match_long, match_short
        return parser


class _Command(_Strict, TyperCommand):
    """A command whose help has one section per option group."""

    arguments = ""
    sections: Mapping[str, str] = {}

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*([self.arguments] if self.arguments else []), "[OPTIONS]"]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        by_section: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                by_section.setdefault(self.sections.get(parameter.name or "", "Options"), []).append(record)
        for section, records in by_section.items():
            with formatter.section(section):
                formatter.write_dl(records, col_max=36)


class _Group(_Strict, TyperGroup):
    """The commands of `table`. Each command is built when it is looked up."""

    table: Mapping[str, Command] = {}

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {name: TyperCommand(name, short_help=command.line) for name, command in self.table.items()}

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.table)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["COMMAND", "[OPTIONS]"]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name not in self.table:
            ctx.fail(f"unknown command {name!r}{nearest_name(name, self.table)}")
        return name, _made(name, self.table[name]), args[1:]


def _made(name: str, command: Command) -> _Command:
    """Build a command with all its options."""
    sections: dict[str, str] = {}
    parameters: list[inspect.Parameter] = []
    for group in command.groups:
        for parameter in _parameters(group):
            sections[parameter.name] = group.TITLE
            parameters.append(parameter)

    def call(**given: Any) -> _Given:
        return _Given(name, {key: value for group in command.groups for key, value in _chosen(group, given)})

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    page = f"{command.line[0].upper()}{command.line[1:]}." + (f"\n\n\b\n{command.more}" if command.more else "")
    info = CommandInfo(name=name, cls=_Command, callback=call, help=page, context_settings=_SETTINGS)
    made: _Command = get_command_from_info(  # type: ignore[assignment]
        info, pretty_exceptions_short=True, rich_markup_mode=None
    )
    made.arguments, made.sections = command.arguments, sections
    return made


def _parameters(group: type[Options]) -> Iterator[inspect.Parameter]:
    """Yield the fields of an option group as Typer parameters. Missing options are None or an empty list."""
    for name, _, default, option in declared(group):
        if not option.flags and not option.argument:
            continue
        text = typed(option.help) + (f" [{typed(option.shown)}]" if option.shown else "")
        offered = getattr(complete, option.offers) if option.offers else None
        common: dict[str, Any] = {"help": text, "show_default": False, "autocompletion": offered}
        kind: Any = str
        if option.argument:
            declaration = typer.Argument(metavar=option.metavar, **common)
            kind = list[str]
        elif default is False:
            declaration = typer.Option(*option.flags, help=text, show_default=False)
            kind = bool
        else:
            declaration = typer.Option(*option.flags, metavar=option.metavar, parser=_reader(option), **common)
            kind = list[str] if option.repeat else str
        yield inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, declaration]
        )


def _reader(option: Option) -> Callable[[str], Any]:
    """Return a function that parses and checks one value."""

    def read(text: str) -> Any:
        try:
            value = option.kind.read(text)
        except OptionError as error:
            raise typer.BadParameter(typed(error)) from None
        problem = option.kind.problem(option.finish([value]) if option.repeat else value)
        if problem:
            raise typer.BadParameter(problem.removeprefix("is "))
        return _NONE if value is None else value

    return read


def _chosen(group: type[Options], given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the options of a group that are on the command line, and their values."""
    for name, _, default, option in declared(group):
        value = given.get(name)
        if value is not None and value != [] and not (value is False and default is False):
            value = option.finish(list(value)) if option.repeat or option.argument else value
            yield name, None if value is _NONE else value


def _value(group: type[Options], filled: Filled) -> Any:
    """Build an option group from the given values, with defaults for the other options."""
    values = {name: filled.values[name] for name in group.names() if name in filled.values}
    if group is SamplingOptions:
        return values
    try:
        return group.of(values)
    except OptionError as error:  # contradictory options
        places = sorted({filled.where[name] for name in values if name in filled.where})
        if not places:
            raise
        raise UsageError(f"{typed(error)} (options come from {', '.join(places)})") from None

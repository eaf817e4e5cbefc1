"""The command line as a Typer group, built from the table of commands and their option groups.

Typer only parses the arguments and prints help pages. `localllm.cli.configuration` then adds the options from other
sources, and the command runs outside of Typer, so that only `localllm.cli.main` handles errors and exit codes. The
options of a command are built when it is looked up.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from shutil import get_terminal_size
from typing import Any, NamedTuple

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption
from typer.main import get_install_completion_arguments

from localllm.base.spelling import closest
from localllm.cli import complete
from localllm.cli.flags import typed
from localllm.cli.foreign import FOREIGN, HARMLESS
from localllm.cli.options import ConfigurationOptions
from localllm.cli.values import finished, value_of_word
from localllm.options import DeclaredOption, OptionError, Options, SamplingOptions, declared

_HELP_LEAST = 52  # columns below which Typer's help is wider than the terminal
_SHORT = re.compile(r"-[A-Za-z](-?[\d.].*)?")  # an attached value must be a number: -n5, but not -f with value a
_NEGATIVE = re.compile(r"-\d[\d.]*|-\.\d+")
_NUMBERS = ("config",)  # commands whose arguments may be negative numbers


def _settings() -> dict[str, Any]:
    columns = get_terminal_size().columns
    narrow = {"terminal_width": columns - 2} if columns < _HELP_LEAST else {}
    return {"help_option_names": ["-h", "--help"], "max_content_width": 120, **narrow}


class UsageError(Exception):
    """An invalid command line. The one-line message names the option."""


class CommandLine(NamedTuple):
    """The name of a command, the values of its options by name, and the source of each option that was not typed."""

    name: str
    values: Mapping[str, Any]
    where: Mapping[str, str] = {}


class Command(NamedTuple):
    """A command: its arguments, a one-line summary, more help, its option groups, and the function that runs it.

    If `placed` is true, the first argument of the function maps each option that is not on the command line to its
    source.
    """

    arguments: str
    line: str
    more: str
    groups: tuple[type[Options], ...]
    call: str  # MODULE:FUNCTION of localllm.cli, imported when the command runs
    placed: bool = False

    def run(self, line: CommandLine) -> None:
        module, _, function = self.call.partition(":")
        start = getattr(import_module(f"localllm.cli.{module}"), function)
        start(*([line.where] if self.placed else []), *self.options(line))

    def options(self, line: CommandLine) -> tuple[Any, ...]:
        """Return the option groups except `ConfigurationOptions`, with defaults for missing options.

        Sampler options are a dict of the given options only, because the model file may have defaults for the others.
        """
        return tuple(_group(each, line) for each in self.groups if each is not ConfigurationOptions)


def read_command_line(commands: Mapping[str, Command], words: Sequence[str]) -> CommandLine | None:
    """Parse a command line. Return None after printing a help page; raise UsageError if the command line is invalid."""
    try:
        done = _Group(commands).main(list(words), prog_name="localllm", standalone_mode=False)
    except typer.TyperException as error:
        page = f"localllm {words[0]}" if words and words[0] in commands else "localllm"
        option = getattr(error, "param", None)
        text = f"{'/'.join(option.opts)}: {error.message}" if option is not None else error.message.rstrip(".")
        raise UsageError(f"{text} ({page} --help lists the options)") from None
    return done if isinstance(done, CommandLine) else None


def nearest_name(name: str, known: Collection[str]) -> str:
    """Return a "did you mean" question with the closest name in `known`, to end a message, or "" if no name is
    close."""
    near = closest(name, known)
    return f"; did you mean {near}?" if near else ""


def one_word(words: Sequence[str], noun: str, default: str = "") -> str:
    """Return the only argument of a command, or the default. Raise UsageError if there are several, or none at all."""
    if len(words) > 1 or not (words or default):
        raise UsageError(f"expected one {noun}" + (f", got {len(words)}: {', '.join(words)}" if words else ""))
    return words[0] if words else default


class _Strict:
    """A Typer command that knows llama.cpp's long options with one dash, and never splits `-ngl` into `-n gl`."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        if not ctx.resilient_parsing:  # true for shell completion
            args = _known_words(ctx, args)
        return super().parse_args(ctx, args)  # type: ignore[misc]


def _known_words(ctx: Any, args: list[str]) -> list[str]:
    """Return the words without harmless options of llama.cpp, which a note names. Raise BadParameter for an unknown
    option, with the closest one.
    """
    kept, ignored = _divided(ctx, args)
    if ignored:
        from localllm.cli.terminal.console import say

        say(f"note: ignored, because localllm does not need it: {', '.join(ignored)}")
    return kept


def _divided(ctx: Any, args: list[str]) -> tuple[list[str], list[str]]:
    """Return the words to parse, and the harmless options with their values."""
    kept: list[str] = []
    ignored: list[str] = []
    known = {flag: each for each in ctx.command.get_params(ctx) for flag in each.opts if flag[0] == "-"}
    rest = list(args)
    while rest:
        word = rest[0]
        if word == "--" or not (word.startswith("-") or ctx.allow_interspersed_args):
            break
        kept.append(rest.pop(0))
        if word[:1] != "-" or word == "-" or (ctx.info_name in _NUMBERS and _NEGATIVE.fullmatch(word)):
            continue
        flag, attached, _ = word.partition("=")
        if flag in HARMLESS and flag not in known:
            kept.pop()
            values = HARMLESS[flag]
            takes = not attached and rest and (values is None or rest[0] in values)
            ignored.append(f"{word} {rest.pop(0)}" if takes else word)
            continue
        if word[:2] in known and _SHORT.fullmatch(word):
            flag, attached = word[:2], word[2:]
        elif flag not in known or len(flag) == 2:
            raise typer.BadParameter(_unknown(flag if word.startswith("--") else word, known))
        is_switch = getattr(known[flag], "is_flag", False)
        if is_switch and attached:
            break  # Typer refuses the value
        if not is_switch and not attached:
            kept += rest[:1]
            del rest[:1]
    return kept + rest, ignored


def _unknown(flag: str, known: Collection[str]) -> str:
    if flag in FOREIGN:
        return f"{flag} is not supported: {FOREIGN[flag]}"
    return f"unknown option {flag}{nearest_name(flag, known)}"


class _Command(_Strict, TyperCommand):
    """A command with all its options, whose help has one section per option group."""

    def __init__(self, name: str, command: Command) -> None:
        self.shown = {each.name: (group.TITLE, each) for group in command.groups for each in declared(group)}
        self.usage = f"{command.arguments} [OPTIONS]".lstrip()
        page = f"{command.line[0].upper()}{command.line[1:]}." + (f"\n\n{command.more}" if command.more else "")
        options = [each for _, each in self.shown.values() if each.option.flags or each.option.argument]
        super().__init__(
            name,
            params=[_parameter(each) for each in options],
            help=page,
            # `_known_words` has refused unknown options, except the negative numbers that are arguments here
            context_settings={**_settings(), "ignore_unknown_options": name in _NUMBERS},
            rich_markup_mode=None,
        )

    def invoke(self, ctx: Any) -> CommandLine:
        """Return the options that were typed."""
        given = [name for name in ctx.params if ctx.get_parameter_source(name).name == "COMMANDLINE"]
        return CommandLine(ctx.info_name, {name: finished(self.shown[name][1], ctx.params[name]) for name in given})

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [self.usage]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[Any]] = {}
        for parameter in self.get_params(ctx):
            title, _ = self.shown.get(parameter.name or "", ("Options", None))
            sections.setdefault(title, []).append(parameter.get_help_record(ctx))
        for section, records in sections.items():
            with formatter.section(section):
                formatter.write_dl(records, col_max=min(36, formatter.width // 2))


class _Group(_Strict, TyperGroup):
    """The commands. Each one is built when it is looked up; until then, only its summary is known."""

    def __init__(self, table: Mapping[str, Command]) -> None:
        flags = {"version": "Show the version and exit.", "debug": "With any command: show the traceback of an error."}
        super().__init__(
            name="localllm",
            commands={name: TyperCommand(name, short_help=command.line) for name, command in table.items()},
            help="Run large language models from GGUF files on this computer.",
            params=[TyperOption(param_decls=[f"--{name}"], is_flag=True, help=flags[name]) for name in flags]
            + [*get_install_completion_arguments()],
            context_settings=_settings(),
            rich_markup_mode=None,
        )
        self.table = table

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["COMMAND", "[OPTIONS]"]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name not in self.table:
            ctx.fail(f"unknown command {name!r}{nearest_name(name, self.table)}")
        return name, _Command(name, self.table[name]), args[1:]


def _parameter(each: DeclaredOption) -> Any:
    """Return an option as a Typer parameter."""
    option = each.option
    offered = getattr(complete, option.offers) if option.offers else lambda incomplete: option.kind.choices
    common: dict[str, Any] = {
        "help": typed(option.help) + (f" [{typed(option.shown)}]" if option.shown else ""),
        "show_default": False,
        "autocompletion": lambda ctx, args, incomplete: offered(incomplete),
    }
    if option.argument:
        return TyperArgument(param_decls=[each.name], nargs=-1, metavar=option.metavar, **common)
    flags = [each.name, *option.flags]
    if each.default is False:
        return TyperOption(param_decls=flags, is_flag=True, **common)

    def read(text: str) -> Any:
        try:
            return value_of_word(each, text)
        except OptionError as error:
            raise typer.BadParameter(typed(error)) from None

    return TyperOption(param_decls=flags, type=read, multiple=option.repeat, metavar=option.metavar, **common)


def _group(group: type[Options], line: CommandLine) -> Any:
    """Build an option group from the given values, with defaults for the other options."""
    values = {name: line.values[name] for name in group.names() if name in line.values}
    if group is SamplingOptions:
        return values
    try:
        return group.of(values)
    except OptionError as error:  # contradictory options
        places = sorted({line.where[name] for name in values if name in line.where})
        if not places:
            raise
        raise UsageError(f"{typed(error)} (options come from {', '.join(places)})") from None

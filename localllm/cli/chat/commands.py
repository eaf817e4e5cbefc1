"""The slash commands of a chat: their table, the loop that reads them, and completion."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from localllm.cli import complete
from localllm.cli.app import nearest_name
from localllm.cli.chat.entry import LineReader, Piped
from localllm.cli.chat.talk import STATS, Talk, tell
from localllm.cli.terminal.console import RED, say

_WORD = re.compile(r"/[a-zA-Z?][\w-]*")  # a slash command, but not a path such as /etc/hosts
LEAVE = ("/bye", "/exit", "/quit")


class SlashCommand(NamedTuple):
    """A slash command: its names, argument, help line and action."""

    words: tuple[str, ...]
    argument: str  # placeholder in help; "": no argument; in brackets: optional argument
    help: str
    call: Callable[[Talk, str], None]
    offers: Callable[[Talk, str], Iterable[str]] = lambda talk, begun: ()  # completion of the argument


def _help(talk: Talk, _: str) -> None:
    rows = [(f"{', '.join(each.words)} {each.argument}", each.help) for each in COMMANDS]
    rows.append((", ".join(LEAVE), "leave; so does Ctrl-D"))
    rows.append(("Ctrl-C", "stop the answer and keep what was written; at the prompt, clear the line"))
    rows.append(('"""', "begin and end a message of several lines; so does \\ at the end of a line"))
    tell(rows)


def _files(talk: Talk, begun: str) -> Iterable[str]:
    return complete.files(begun)


def _settings(talk: Talk, begun: str) -> Iterable[str]:
    return sorted(name for name in talk.settings.names if name.startswith(begun))


def _statistics(talk: Talk, begun: str) -> Iterable[str]:
    return (name for name in STATS if name.startswith(begun))


COMMANDS = (
    SlashCommand(("/clear", "/new"), "", "forget the conversation and start over", Talk.clear),
    SlashCommand(("/undo",), "", "remove the last turn", Talk.undo),
    SlashCommand(("/regen",), "", "answer the last turn again", Talk.regenerate),
    SlashCommand(("/shift",), "", "drop the oldest turns and continue", Talk.shift),
    SlashCommand(("/summary",), "TEXT", "start over from your summary", Talk.summary),
    SlashCommand(("/set",), "NAME [VALUE]", "change a setting, such as /set temperature 0", Talk.set, _settings),
    SlashCommand(("/show",), "[NAME|all]", "show the model and the settings", Talk.show, _settings),
    SlashCommand(("/edit",), "", "write a message in $EDITOR", Talk.edit),
    SlashCommand(("/read",), "FILE", "put a file's text before the next message", Talk.read, _files),
    SlashCommand(("/image",), "FILE", "put a picture before the next message", Talk.image, _files),
    SlashCommand(("/audio",), "FILE", "put a sound before the next message", Talk.audio, _files),
    SlashCommand(("/copy",), "", "copy the last answer to the clipboard, if the terminal can (OSC 52)", Talk.copy),
    SlashCommand(("/tokens",), "[TEXT]", "count the tokens of the conversation, or of a text", Talk.tokens),
    SlashCommand(("/save",), "FILE", "save the conversation and its cache (--force FILE: replace)", Talk.save, _files),
    SlashCommand(("/load",), "FILE", "load a saved conversation", Talk.load, _files),
    SlashCommand(("/stats",), "[full]", "turn statistics on or off; full: every number", Talk.statistics, _statistics),
    SlashCommand(("/help", "/?"), "", "show this list", _help),
)
_BY_WORD = {word: command for command in COMMANDS for word in command.words}


def converse(talk: Talk, reader: LineReader) -> None:
    """Read and run the user's input until the user leaves."""
    while (line := reader.read(talk.begun())) is not None:
        text = line.strip()
        word, _, rest = text.partition(" ")
        rest = rest.strip()
        if not text:
            continue
        if line.startswith("/") and _WORD.fullmatch(text.split()[0]):
            if word in LEAVE and not rest:
                return
            if word in LEAVE:
                say(f"error: wrong usage; write {word} alone", RED)
            else:
                _command(talk, word, rest)
        elif isinstance(reader, Piped) or not talk.drop(text):
            talk.ask(text)


def _command(talk: Talk, word: str, rest: str) -> None:
    command = _BY_WORD.get(word)
    if command is None:
        hint = nearest_name(word, (*_BY_WORD, *LEAVE)) or "; /help lists the commands"
        say(f"unknown command {word}{hint} (a space before / sends the line to the model)", RED)
    elif command.argument.startswith("[") or bool(command.argument) == bool(rest):
        talk.attempt(lambda: command.call(talk, rest))
    else:
        say(f"error: wrong usage; write {f'{word} {command.argument}' if command.argument else f'{word} alone'}", RED)


def offers(talk: Talk) -> Callable[[str], Iterable[str]]:
    """Return completions of a line: command names and command arguments."""

    def offered(before: str) -> Iterable[str]:
        word, space, rest = before.partition(" ")
        if not space:
            return [known for known in (*_BY_WORD, *LEAVE) if word and known.startswith(word)]
        command = _BY_WORD.get(word)
        begun = rest.rpartition(" ")[2]
        return command.offers(talk, begun) if command is not None else ()

    return offered

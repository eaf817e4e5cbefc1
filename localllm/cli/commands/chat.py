"""`localllm chat`: read a turn, stream the answer, print statistics. From a pipe, each line is one turn."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

from localllm import load
from localllm.backends.base import Memory
from localllm.cache.prompt_cache import check_replaceable
from localllm.cli.flags import typed
from localllm.cli.naming import title
from localllm.cli.options import Chat, Keeping, Opening
from localllm.cli.terminal.answer import Roof, converse, explain_end, interruptible, statistics_line, tell, write
from localllm.cli.terminal.console import RED, YELLOW, LoadProgress, say
from localllm.cli.terminal.formatting import columns, size
from localllm.cli.terminal.keeping import PromptCache, put_down, take_up
from localllm.confined import Confined
from localllm.conversation import Conversation, template_of
from localllm.engine import ContextFull
from localllm.errors import LocalLLMError
from localllm.generation.statistics import Piece
from localllm.model import Model
from localllm.options import AnswerOptions
from localllm.template import Family, renderer

FORCE = "--force "  # precedes a file name: the file may be replaced
CHOICES = (
    "/shift drops the oldest turns and continues, /summary TEXT continues from your summary alone, /undo removes the "
    "last turn, /clear starts over"
)


def chat(
    own: Chat,
    name: str,
    opening: Opening,
    answering: AnswerOptions,
    keeping: Keeping,
    sampling: Mapping[str, Any],
    format_: Family | None = None,
) -> None:
    """Chat until the user leaves. `format_` replaces the chat template."""
    with renderer() as confined:
        confined.start()  # starts while the model loads
        with LoadProgress() as progress:
            model = load(name, opening.options, progress=progress)
        with model:
            _talk(own, title(name), model, confined, answering, keeping, sampling, format_)


def _talk(
    own: Chat,
    name: str,
    model: Model,
    confined: Confined,
    answering: AnswerOptions,
    keeping: Keeping,
    sampling: Mapping[str, Any],
    format_: Family | None,
) -> None:
    tell(model)
    template, note = template_of(model, confined, format_)
    if note:
        say(f"note: {note}", YELLOW)
    conversation = converse(model, template, answering, sampling, context_shift=own.context_shift)
    cache = PromptCache(keeping, model)
    cache.go_on(conversation)
    try:
        _Talk(name, model, conversation, stats=not own.no_stats).run()
    finally:
        cache.keep_all(conversation)


class _Talk:
    """Reads what the user types and acts on it."""

    def __init__(self, name: str, model: Model, conversation: Conversation, stats: bool) -> None:
        self.name, self.model, self.conversation, self.stats = name, model, conversation, stats
        self.roof = Roof(model)
        self.refused = ""  # a turn that did not fit
        self.cut = False  # whether the last answer stopped at a full context

    def run(self) -> None:
        if sys.stdin.isatty():
            memory = self.model.executable.memory
            say(
                f"{self.name} on {self.model.device}, context {self.model.context}, cache "
                f"{size(memory.cache)} ({_per_token(memory)}); /help lists the commands"
            )
        for line in _turns():
            text = line.strip()
            word, _, rest = text.partition(" ")
            command = _BY_WORD.get(word)
            if word in _LEAVE and not rest:
                return
            if command is not None and bool(command.argument) == bool(rest.strip()):
                self.attempt(lambda command=command, rest=rest: command.call(self, rest.strip()))  # type: ignore[misc]
            elif command is not None:
                wanted = f"{word} {command.argument}" if command.argument else f"{word} alone"
                say(f"error: wrong usage; write {wanted}", RED)
            elif text.startswith("/") and text[1:].isalpha():
                say(f"unknown command {text}; /help lists the commands", RED)
            elif text:
                self.ask(text)

    def ask(self, text: str) -> None:
        self.refused = text
        if self.answer(lambda cancel: self.conversation.say(text, cancel)):
            self.refused = ""

    def answer(self, answer: Callable[[Event], Iterator[Piece]]) -> bool:
        """Print an answer and its statistics; False if the context has no room for it."""
        self.cut = False
        with interruptible() as cancel:
            try:
                statistics = write(answer(cancel))
            except ContextFull as error:
                say(f"error: {typed(error)}", RED)
                say(CHOICES, YELLOW)
                return False
            except LocalLLMError as error:  # an error of this turn, such as a template that rejects it
                say(f"error: {typed(error)}", RED)
                return True
            if statistics.reason == "context":
                self.cut = True
                say(explain_end(self.model), YELLOW)
                say(CHOICES, YELLOW)
            if self.stats:
                used = len(self.conversation.session.tokens)
                say(f"{statistics_line(statistics, self.roof.measure())} | context {used} of {self.model.context}")
        return True

    def attempt(self, command: Callable[[], None]) -> None:
        try:
            command()
        except LocalLLMError as error:
            say(f"error: {typed(error)}", RED)

    # -- commands --------------------------------------------------------------------------------------------------

    def clear(self, _: str) -> None:
        self.conversation.clear()
        self.refused, self.cut = "", False
        say("started a new conversation")

    def undo(self, _: str) -> None:
        say(f"removed: {self.conversation.undo()}")
        self.refused, self.cut = "", False

    def regenerate(self, _: str) -> None:
        self.answer(self.conversation.again)

    def shift(self, _: str) -> None:
        """Drop the oldest turns, then continue the answer that the full context stopped."""
        refused, cut = self.refused, self.cut
        dropped = self.conversation.shift()
        if not dropped:
            raise LocalLLMError("no older turn to drop; /summary TEXT or /clear starts over")
        say(f"dropped the oldest {'turn' if dropped == 1 else f'{dropped} turns'}")
        if refused:
            self.ask(refused)
        elif cut:
            self.answer(self.conversation.go_on)

    def summary(self, text: str) -> None:
        refused, self.refused = self.refused, ""
        self.conversation.clear(f"What was said so far: {text}")
        say("started a new conversation with your summary")
        if refused:
            self.ask(refused)

    def save(self, name: str) -> None:
        name, forced = name.removeprefix(FORCE), name.startswith(FORCE)
        path = Path(name.strip()).expanduser()
        if not forced and path.exists():
            check_replaceable(path)
            raise LocalLLMError(f"{path} exists; /save --force {name} replaces it")
        put_down(self.conversation, path, force=forced)

    def load(self, name: str) -> None:
        take_up(self.conversation, Path(name).expanduser())
        self.refused, self.cut = "", False

    def toggle(self, _: str) -> None:
        self.stats = not self.stats
        say(f"statistics are {'on' if self.stats else 'off'}")

    def help(self, _: str) -> None:
        rows = [(f"{', '.join(each.words)} {each.argument}", each.help) for each in COMMANDS]
        rows.append((", ".join(_LEAVE), "leave; so does Ctrl-D"))
        rows.append(("Ctrl-C", "stop the answer and keep what was written"))
        for line in columns(rows, indent=0).split("\n"):
            say(line)


def _per_token(memory: Memory) -> str:
    text = f"{size(memory.cache_per_token)} a token"
    text += f", {size(memory.window_per_token)} in a window of {memory.window}" if memory.window else ""
    return text + (f", {size(memory.states)} of states" if memory.states else "")


class _SlashCommand(NamedTuple):
    words: tuple[str, ...]
    argument: str  # the required argument; "": none
    help: str
    call: Callable[[_Talk, str], None]


COMMANDS = (
    _SlashCommand(("/clear", "/new"), "", "forget the conversation and start over", _Talk.clear),
    _SlashCommand(("/undo",), "", "remove the last turn", _Talk.undo),
    _SlashCommand(("/regen",), "", "answer the last turn again", _Talk.regenerate),
    _SlashCommand(("/shift",), "", "drop the oldest turns and continue", _Talk.shift),
    _SlashCommand(("/summary",), "TEXT", "start over from your summary", _Talk.summary),
    _SlashCommand(("/save",), "FILE", "save the conversation and its cache (--force FILE: replace)", _Talk.save),
    _SlashCommand(("/load",), "FILE", "load a saved conversation", _Talk.load),
    _SlashCommand(("/stats",), "", "turn statistics on or off", _Talk.toggle),
    _SlashCommand(("/help", "/?"), "", "show this list", _Talk.help),
)
_BY_WORD = {word: command for command in COMMANDS for word in command.words}
_LEAVE = ("/bye", "/exit", "/quit")


def _turns() -> Iterator[str]:
    """Yield lines that the user types, until the end of input. Raises KeyboardInterrupt on Ctrl-C."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    with suppress(ImportError):
        import readline  # noqa: F401 - input() then edits lines and remembers them
    while True:
        try:
            yield input(">>> " if sys.stdout.isatty() else "")
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print(file=sys.stderr)
            raise

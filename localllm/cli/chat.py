"""`localllm chat`: read a turn, stream the answer, say what it cost; from a terminal or, a turn a line, from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

from localllm import load
from localllm.backends.base import Memory
from localllm.chat import Conversation, template_of
from localllm.cli.answer import Roof, converse, explain_end, interruptible, statistics_line, tell, write
from localllm.cli.console import RED, YELLOW, LoadProgress, say
from localllm.cli.keeping import PromptCache, put_down, take_up
from localllm.cli.options import Answering, Chat, Keeping, Loading
from localllm.cli.text import columns, size
from localllm.confined import Confined
from localllm.errors import LocalLLMError
from localllm.model import Model
from localllm.prompt_cache import check_replaceable
from localllm.session import ContextFull, Piece
from localllm.template import renderer

FORCE = "--force "  # before the name of a file: it may be replaced
CHOICES = (
    "/shift drops the oldest turns and goes on, /summary TEXT goes on from your summary alone, /undo takes the last "
    "turn back, /clear starts over"
)


def chat(
    own: Chat, name: str, loading: Loading, answering: Answering, keeping: Keeping, sampling: Mapping[str, Any]
) -> None:
    """Talk until the user leaves."""
    with renderer() as confined:
        confined.start()  # it is ready when the model is
        with LoadProgress() as progress:
            model = load(name, **loading.of_load(), progress=progress)
        with model:
            _talk(own, model, confined, answering, keeping, sampling)


def _talk(
    own: Chat, model: Model, confined: Confined, answering: Answering, keeping: Keeping, sampling: Mapping[str, Any]
) -> None:
    tell(model)
    template, note = template_of(model, confined)
    if note:
        say(f"note: {note}", YELLOW)
    conversation = converse(model, template, answering, sampling, context_shift=own.context_shift)
    cache = PromptCache(keeping, model)
    cache.go_on(conversation)
    try:
        _Talk(model, conversation, stats=not own.no_stats).run()
    finally:
        cache.keep_all(conversation)


class _Talk:
    """What is typed, and what becomes of it."""

    def __init__(self, model: Model, conversation: Conversation, stats: bool) -> None:
        self.model, self.conversation, self.stats = model, conversation, stats
        self.roof = Roof(model)
        self.refused = ""  # a turn that did not fit
        self.cut = False  # the last answer ended with the context

    def run(self) -> None:
        if sys.stdin.isatty():
            memory = self.model.executable.memory
            say(
                f"{self.model.file.path.name} on {self.model.device}, context {self.model.context}, cache "
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
                say(f"error: write {wanted}", RED)
            elif text.startswith("/") and text[1:].isalpha():
                say(f"there is no command {text}; /help lists those there are", RED)
            elif text:
                self.ask(text)

    def ask(self, text: str) -> None:
        self.refused = text
        if self.answer(lambda cancel: self.conversation.say(text, cancel)):
            self.refused = ""

    def answer(self, answer: Callable[[Event], Iterator[Piece]]) -> bool:
        """Show an answer and what it cost; False where the context is too full for one."""
        self.cut = False
        with interruptible() as cancel:
            try:
                statistics = write(answer(cancel))
            except ContextFull as error:
                say(f"error: {error}", RED)
                say(CHOICES, YELLOW)
                return False
            except LocalLLMError as error:  # of this turn, as a template that refuses it; the next may do better
                say(f"error: {error}", RED)
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
            say(f"error: {error}", RED)

    # -- commands --------------------------------------------------------------------------------------------------

    def clear(self, _: str) -> None:
        self.conversation.clear()
        self.refused, self.cut = "", False
        say("a new conversation")

    def undo(self, _: str) -> None:
        say(f"taken back: {self.conversation.undo()}")
        self.refused, self.cut = "", False

    def regenerate(self, _: str) -> None:
        self.answer(self.conversation.again)

    def shift(self, _: str) -> None:
        """Make room; then go on with what the full context has stopped."""
        refused, cut = self.refused, self.cut
        dropped = self.conversation.shift()
        if not dropped:
            raise LocalLLMError("there is no older turn to drop; /summary TEXT or /clear starts over")
        say(f"the oldest {'turn was' if dropped == 1 else f'{dropped} turns were'} dropped")
        if refused:
            self.ask(refused)
        elif cut:
            self.answer(self.conversation.go_on)

    def summary(self, text: str) -> None:
        refused, self.refused = self.refused, ""
        self.conversation.clear(f"What was said so far: {text}")
        say("a new conversation that begins with your summary")
        if refused:
            self.ask(refused)

    def save(self, name: str) -> None:
        name, forced = name.removeprefix(FORCE), name.startswith(FORCE)
        path = Path(name.strip()).expanduser()
        if not forced and path.exists():
            check_replaceable(path)
            raise LocalLLMError(f"{path}: exists; /save --force {name} replaces it")
        put_down(self.conversation, path, overwrite=forced)

    def load(self, name: str) -> None:
        take_up(self.conversation, Path(name).expanduser())
        self.refused, self.cut = "", False

    def toggle(self, _: str) -> None:
        self.stats = not self.stats
        say(f"statistics are {'on' if self.stats else 'off'}")

    def help(self, _: str) -> None:
        rows = [(f"{', '.join(each.words)} {each.argument}", each.help) for each in COMMANDS]
        rows.append((", ".join(_LEAVE), "leave; so does Ctrl-D"))
        rows.append(("Ctrl-C", "stop an answer; what there is of it counts as said"))
        for line in columns(rows, indent=0).split("\n"):
            say(line)


def _per_token(memory: Memory) -> str:
    text = f"{size(memory.cache_per_token)} a token"
    return text + (f", {size(memory.window_per_token)} in a window of {memory.window}" if memory.window else "")


class _Command(NamedTuple):
    words: tuple[str, ...]
    argument: str  # what must be written behind; "": nothing
    help: str
    call: Callable[[_Talk, str], None]


COMMANDS = (
    _Command(("/clear", "/new"), "", "forget the conversation and start over", _Talk.clear),
    _Command(("/undo",), "", "take back the last turn", _Talk.undo),
    _Command(("/regen",), "", "another answer to the last turn", _Talk.regenerate),
    _Command(("/shift",), "", "drop the oldest turns; what a full context has stopped goes on", _Talk.shift),
    _Command(("/summary",), "TEXT", "start over with your summary of what was said", _Talk.summary),
    _Command(("/save",), "FILE", "save the conversation and its cache; /save --force FILE replaces one", _Talk.save),
    _Command(("/load",), "FILE", "go on with the conversation of a file", _Talk.load),
    _Command(("/stats",), "", "statistics after each answer, or no more", _Talk.toggle),
    _Command(("/help", "/?"), "", "these lines", _Talk.help),
)
_BY_WORD = {word: command for command in COMMANDS for word in command.words}
_LEAVE = ("/bye", "/exit", "/quit")


def _turns() -> Iterator[str]:
    """Lines of the user. Ends at the end of input; KeyboardInterrupt at Ctrl-C."""
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

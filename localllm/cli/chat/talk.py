"""A running chat: send messages to the model, print answers and statistics, and run slash commands."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

from localllm.backends.base import Memory
from localllm.base.errors import LocalLLMError
from localllm.chat import Conversation
from localllm.cli.chat import files
from localllm.cli.chat.journal import Journal
from localllm.cli.chat.settings import ChatSettings
from localllm.cli.flags import typed
from localllm.cli.terminal.answer import (
    MeasuredRoof,
    explain_end,
    explain_refusal,
    full_statistics,
    interruptible,
    statistics_line,
    write,
)
from localllm.cli.terminal.console import RED, YELLOW, say
from localllm.cli.terminal.formatting import in_columns, size
from localllm.cli.terminal.keeping import put_down, take_up
from localllm.cli.terminal.quiet import Quiet
from localllm.cli.terminal.wrapping import width_of
from localllm.engine import ContextFull
from localllm.generation.statistics import Usage
from localllm.loading.media_parts import WORDS, Kind, Medium, file_kind, part_of
from localllm.model import Model
from localllm.plan import summarize
from localllm.reply import Reply
from localllm.saved.prompt_cache import check_replaceable

FORCE = "--force "  # prefix of a file name that allows the file to be replaced
CHOICES = (
    "/shift drops the oldest turns and continues, /summary TEXT continues from your summary alone, /undo removes the "
    "last turn, /clear starts over"
)
STATS = ("off", "on", "full")
EDITABLE = 4000  # maximum characters of a refused message that returns to the prompt; /edit opens any


class Talk:
    """Runs turns and slash commands. `quiet` controls the terminal's echo, and `journal` saves the conversation."""

    def __init__(
        self,
        name: str,
        model: Model,
        conversation: Conversation,
        settings: ChatSettings,
        stats: str,
        quiet: Quiet,
        journal: Journal | None = None,
    ) -> None:
        self.name, self.model, self.conversation, self.settings = name, model, conversation, settings
        self.stats, self.quiet, self.journal = stats, quiet, journal
        self._roof = MeasuredRoof(model)
        self._media: list[dict[str, Any]] = []  # pictures and sounds that precede the next message
        self._refused = ""  # text of a turn that did not fit in the context
        self._again = False  # whether the next prompt begins with this text
        self._cut = False  # whether the last answer stopped at a full context
        self._attached: list[str] = []  # texts of files that precede the next message

    def greet(self, toy: bool) -> None:
        """Print what the model is; `toy` is true for a bundled one. With all statistics, print its place too."""
        count = summarize(self.model.plan).parameters if self.model.plan is not None else 0
        held = f"{count / 1e9:.3g}B parameters" if count >= 1e9 else f"{count / 1e6:.3g}M parameters"
        if toy:
            say(f"{self.name}: a toy with {held}. For a real model, leave and type: localllm pull")
        else:
            say(f"{self.name}: {held}, a context of {self.model.context} tokens")
        if self.stats == "full":
            memory = self.model.executable.memory
            cache = f"cache {size(memory.cache)} ({_per_token(memory)})"
            say(f"on {self.model.device}, context {self.model.context}, {cache}")
        say("/help lists the commands, Ctrl-D leaves")

    def ask(self, text: str) -> None:
        text = "\n\n".join((*self._attached, text))
        self._attached = []
        self._put(text)

    def _put(self, text: str) -> None:
        self._refused = text
        said = [*self._media, {"type": "text", "text": text}] if self._media else text
        if self._answer(lambda cancel: self.conversation.say(said, cancel)):
            self._refused, self._media = "", []
        self._again = bool(self._refused)

    def begun(self) -> str:
        """Return the text that the next prompt begins with: a message that was refused just before, to shorten it."""
        again, self._again = self._again, False
        if not again or len(self._refused) > EDITABLE:
            return ""
        return f" {self._refused}" if self._refused.startswith("/") else self._refused  # a space: not a command

    def _answer(self, answer: Callable[[Event], Reply]) -> bool:
        """Print an answer and its statistics. Return False if the context has no room for the turn."""
        self._cut = False
        self.quiet.apply()
        with interruptible() as cancel:
            try:
                with answer(cancel) as reply:  # if a signal ends the program, `finally` saves the partial answer
                    end = write(reply, self.settings.display, self.conversation)
            except ContextFull as error:
                say(f"error: {explain_refusal(self.model, error)}", RED)
                say(CHOICES, YELLOW)
                return False
            except LocalLLMError as error:  # an error in this turn, such as a template error
                say(f"error: {typed(error)}", RED)
                return True
            finally:
                self.keep()
            if end.reason == "cancelled" and self._media and not end.usage.answer_tokens:
                say("stopped before the answer: the message and its pictures were not added", YELLOW)
            if end.reason == "context":
                self._cut = True
                say(explain_end(self.model), YELLOW)
                say(CHOICES, YELLOW)
            self._tell(end.usage)
        return True

    def _tell(self, statistics: Usage) -> None:
        used, context = len(self.conversation.tokens), self.model.context
        if self.stats == "on":
            say(statistics_line(statistics, used, context))
        elif self.stats == "full":
            say(f"{full_statistics(statistics, self._roof)} | context {used} of {context}")

    def keep(self) -> None:
        """Write the conversation to the journal."""
        if self.journal is not None:
            told, located = self.conversation.located if self.conversation.begun else ([], [])
            self.journal.keep(told, located, self.conversation.attachments)

    def attempt(self, command: Callable[[], None]) -> None:
        try:
            command()
        except LocalLLMError as error:
            say(f"error: {typed(error)}", RED)
        self.keep()

    # -- the conversation ------------------------------------------------------------------------------------------

    def clear(self, _: str) -> None:
        self._begin_anew("")
        self._refused = ""
        say("started a new conversation")

    def _begin_anew(self, summary: str) -> None:
        if self.journal is not None:
            self.journal.close()  # keep the old conversation in its file
        self.conversation.clear(summary)
        self._cut, self._attached, self._media = False, [], []

    def undo(self, _: str) -> None:
        say(f"removed: {self.conversation.undo()}")
        self._refused, self._cut = "", False

    def regenerate(self, _: str) -> None:
        self._answer(self.conversation.again)

    def shift(self, _: str) -> None:
        """Drop the oldest turns, then continue the answer that stopped at a full context."""
        refused, cut = self._refused, self._cut
        dropped = self.conversation.shift()
        if not dropped:
            raise LocalLLMError("no older turn to drop; /summary TEXT or /clear starts over")
        say(f"dropped the oldest {'turn' if dropped == 1 else f'{dropped} turns'}")
        if refused:
            self._put(refused)
        elif cut:
            self._answer(self.conversation.go_on)

    def summary(self, text: str) -> None:
        refused, self._refused = self._refused, ""
        self._begin_anew(f"Summary of the conversation so far: {text}")
        say("started a new conversation with your summary")
        if refused:
            self._put(refused)

    # -- files and other programs ----------------------------------------------------------------------------------

    def save(self, name: str) -> None:
        name, forced = name.removeprefix(FORCE), name.startswith(FORCE)
        path = Path(name.strip()).expanduser()
        if not forced and path.exists():
            check_replaceable(path)
            raise LocalLLMError(f"{path} exists; /save --force {name} replaces it")
        put_down(self.conversation, path, overwrite=forced)

    def load(self, name: str) -> None:
        take_up(self.conversation, files.path_of(name))
        if self.journal is not None:
            self.journal.close()  # keep the previous conversation in its file
        self._refused, self._cut = "", False

    def read(self, name: str) -> None:
        """Insert the text of a file before the next message."""
        text = files.text_of(files.path_of(name), self.model.context * self.model.tokenizer.longest)
        self._attached.append(text)
        count = len(self.model.tokenizer.encode(text, add_special=False))
        say(f"{name}: {count} tokens, added before your next message")

    def image(self, name: str) -> None:
        self._attach("image", name)

    def audio(self, name: str) -> None:
        self._attach("audio", name)

    def drop(self, text: str) -> bool:
        """Put dropped pictures and sounds before the next message. Return False for any other text."""
        found = files.dropped(text) if self.model.reads else []
        for kind, name in found:
            self.attempt(partial(self._attach, kind, name))
        return bool(found)

    def _attach(self, kind: Kind, name: str) -> None:
        """Put a picture or a sound before the next message. A file that cannot be read is refused at once."""
        path = files.path_of(name)
        if (found := file_kind(path)) not in (None, kind):
            raise LocalLLMError(f"{name}: is a {WORDS[found]}; write /{found} {name}")
        medium = Medium(kind, str(path), name if Path(name).expanduser() == path else str(path)).loaded()
        model, parts = self.model, self.model.encoders.parts(medium)
        tokens = sum(len(model.media_marks(part)) if isinstance(part, str) else part.tokens for part in parts)
        self._media.append(part_of(medium))
        say(f"{medium.name}: {tokens} tokens, added before your next message")

    def edit(self, _: str) -> None:
        """Open an editor, and send the text that the user writes in it."""
        with self.quiet.paused():
            text = files.edited(self._refused)
        if text.strip():
            self.ask(text)
        else:
            say("the message is empty, so nothing was sent")

    def copy(self, _: str) -> None:
        answers = [message["content"] for message in self.conversation.messages if message["role"] == "assistant"]
        if not answers:
            raise LocalLLMError("nothing to copy yet")
        files.copy(answers[-1])
        say(f"copied {len(answers[-1])} characters")

    # -- settings --------------------------------------------------------------------------------------------------

    def set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        say(self.settings.set(name, value.strip()) if value.strip() else self.settings.line(name))

    def show(self, name: str) -> None:
        if name and name != "all":
            say(self.settings.line(name))
            return
        used, context = len(self.conversation.tokens), self.model.context
        rows = [("model", f"{self.name} on {self.model.device}"), ("context", f"{used} of {context} tokens")]
        tell([*rows, *self.settings.rows(name == "all")])

    def tokens(self, text: str) -> None:
        tokenizer = self.model.tokenizer
        if text:
            say(f"{len(tokenizer.encode(text, add_special=False))} tokens")
            return
        counts: dict[str, int] = {}
        for message in self.conversation.told:
            size_of = len(tokenizer.encode(message["content"], add_special=False))
            counts[message["role"]] = counts.get(message["role"], 0) + size_of
        parts = "".join(f", {role} {count}" for role, count in counts.items())
        say(f"{len(self.conversation.tokens)} of {self.model.context} tokens of the context are used{parts}")

    def statistics(self, how: str) -> None:
        """Choose which statistics are printed. Without an argument, toggle them."""
        if how and how not in STATS:
            raise LocalLLMError(f"statistics are on, off or full, not {how}")
        self.stats = how or ("on" if self.stats == "off" else "off")
        say(f"statistics are {self.stats}")


def tell(rows: Sequence[Sequence[str]]) -> None:
    """Print a table on stderr, with aligned columns."""
    room = width_of(sys.stderr, 0) if sys.stderr.isatty() else 0
    for line in in_columns(rows, indent=0, room=room).split("\n"):
        say(line)


def _per_token(memory: Memory) -> str:
    text = f"{size(memory.cache_per_token)} per token"
    text += f", {size(memory.window_per_token)} in a window of {memory.window}" if memory.window else ""
    if memory.selected:
        text += f", {size(memory.selected_per_token)} per token; attention reads {memory.selected} tokens"
    return text + (f", {size(memory.states)} of states" if memory.states else "")

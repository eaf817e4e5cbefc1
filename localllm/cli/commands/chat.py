"""`localllm chat`: open a model and talk with it, in a terminal or through a pipe."""

from __future__ import annotations

import os
import sys
from time import time

from localllm import load
from localllm.chat import template_of
from localllm.cli.app import UsageError
from localllm.cli.chat import commands
from localllm.cli.chat.entry import PROMPT, LineReader, Lines, Piped
from localllm.cli.chat.history import HistoryFile
from localllm.cli.chat.journal import Journal, Talked, last
from localllm.cli.chat.settings import ChatSettings
from localllm.cli.chat.state import state_folder
from localllm.cli.chat.talk import Talk
from localllm.cli.commands.asking import Asking
from localllm.cli.commands.splitting import splitting
from localllm.cli.naming import lasting, title
from localllm.cli.options import ChatOptions, DisplayOptions, KeepingOptions
from localllm.cli.terminal.answer import converse, tell
from localllm.cli.terminal.console import YELLOW, LoadProgress, say
from localllm.cli.terminal.formatting import age
from localllm.cli.terminal.keeping import PromptCache, check_place
from localllm.cli.terminal.quiet import Quiet
from localllm.cli.terminal.shown import shown_on
from localllm.loading.resolve import BOX
from localllm.model import Model
from localllm.sandbox import Confined
from localllm.template import renderer


def chat(name: str, going_on: Talked | None, asked: Asking[ChatOptions]) -> None:
    """Chat until the user leaves, continuing the saved conversation `going_on` if given."""
    check_place(asked.keeping)
    with renderer() as confined:
        confined.start()  # start while the model loads
        with splitting(asked.opening.machines) as split:
            with LoadProgress() as progress:
                model = load(name, asked.opening.options, progress=progress, split=split)
            with model:
                _talk(name, going_on, model, confined, asked)


def last_talked(own: ChatOptions, keeping: KeepingOptions) -> Talked | None:
    """Return the conversation that --continue selects, or None without --continue.

    Raise UsageError if no conversation is saved.
    """
    if not own.go_on:
        return None
    if keeping.prompt_cache:
        raise UsageError("--continue and --prompt-cache both select a conversation; give one of them")
    folder = state_folder()
    found = last(folder / "conversations") if folder is not None else None
    if found is None:
        raise UsageError("no conversation to continue; a chat on a terminal is saved after its first turn")
    return found


def _talk(name: str, going_on: Talked | None, model: Model, confined: Confined, asked: Asking[ChatOptions]) -> None:
    own, display = asked.own, asked.display
    tell(model)
    template, note = template_of(model, confined, asked.format_)
    if note:
        say(f"note: {note}", YELLOW)
    conversation = converse(
        model, template, asked.answering, asked.sampling, asked.first_messages, context_shift=own.context_shift
    )
    cache = PromptCache(asked.keeping, model)
    cache.go_on(conversation)
    if going_on is not None:
        with LoadProgress() as progress:
            conversation.resume(going_on.messages, *going_on.attached(), progress)
        turns = sum(message["role"] == "user" for message in going_on.messages)
        when = age(time() - going_on.path.stat().st_mtime)
        say(f"continuing the conversation of {when}: {turns} turn{'s' * (turns != 1)}")
        if sys.stdout.isatty():
            _recall(going_on, display)
    on_terminal, edited = sys.stdin.isatty(), _can_edit()
    folder = state_folder() if not own.no_history and (on_terminal or going_on is not None) else None
    stats = "off" if own.no_stats else "full" if own.stats else "on"
    speculation = asked.opening.options.speculation
    settings = ChatSettings(model, conversation, asked.answering, asked.sampling, speculation, display)
    journal = Journal(folder / "conversations", lasting(name), going_on) if folder is not None else None
    with Quiet(by_key=edited) as quiet:
        if journal is not None and going_on is not None:
            journal.began(*conversation.located, conversation.attachments().keys)
        talk = Talk(title(name), model, conversation, settings, stats, quiet, journal)
        reader: LineReader = Piped() if not on_terminal else Lines(quiet)
        if edited:
            from localllm.cli.chat.editor import Editor

            reader = Editor(commands.offers(talk), HistoryFile(folder / "history.jsonl") if folder else None)
        if on_terminal:
            talk.greet(toy=name in BOX and not os.path.exists(name))
        try:
            commands.converse(talk, reader)
        finally:
            talk.keep()
            cache.keep_all(conversation)


def _recall(going_on: Talked, display: DisplayOptions) -> None:
    """Print the last turn of a conversation."""
    question, answer = ("", *(message["content"] for message in going_on.messages))[-2:]
    say(f"{PROMPT}{question}")
    shown = shown_on(sys.stdout, display)
    shown.content(answer)
    shown.end()


def _can_edit() -> bool:
    """Return whether the terminal supports the line editor."""
    shown = sys.stdout.isatty() or sys.stderr.isatty()
    return sys.stdin.isatty() and shown and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")

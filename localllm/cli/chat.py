"""`localllm chat`: read a turn, stream the answer, say what it cost; from a terminal or, a turn a line, from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from localllm import load
from localllm.chat import Conversation, template_of
from localllm.cli.answer import Roof, converse, explain_end, interruptible, statistics_line, write
from localllm.cli.console import RED, YELLOW, LoadProgress, say
from localllm.cli.options import Answering, Chat, Loading
from localllm.errors import LocalLLMError
from localllm.model import Model
from localllm.session import ContextFull

HELP = """/clear, /new   forget the conversation and start over
/stats         statistics after each answer, or no more
/bye, /exit    leave; so does Ctrl-D
/help          these lines
Ctrl-C         stop an answer; what there is of it counts as said"""


def chat(own: Chat, name: str, loading: Loading, answering: Answering, sampling: Mapping[str, Any]) -> None:
    """Talk until the user leaves."""
    with LoadProgress() as progress:
        model = load(name, **loading.of_load(), progress=progress)
    with model:
        template, note = template_of(model)
        if note:
            say(f"note: {note}", YELLOW)
        conversation = converse(model, template, answering, sampling)
        _talk(model, conversation, stats=not own.no_stats)


def _talk(model: Model, conversation: Conversation, stats: bool) -> None:
    roof = Roof(model)
    if sys.stdin.isatty():
        say(f"{model.file.path.name} on {model.device}, context {model.context}; /help lists the commands")
    for line in _turns():
        text = line.strip()
        match text:
            case "":
                continue
            case "/bye" | "/exit" | "/quit":
                return
            case "/clear" | "/new":
                conversation.clear()
                say("a new conversation")
            case "/stats":
                stats = not stats
                say(f"statistics are {'on' if stats else 'off'}")
            case "/help" | "/?":
                say(HELP)
            case _ if text.startswith("/") and text[1:].isalpha():
                say(f"there is no command {text}; /help lists those there are", RED)
            case _:
                _answer(model, conversation, text, roof if stats else None)


def _answer(model: Model, conversation: Conversation, text: str, roof: Roof | None) -> None:
    with interruptible() as cancel:
        try:
            statistics = write(conversation.say(text, cancel))
        except ContextFull as error:
            say(f"error: {error}, or forget the conversation (/clear)", RED)
            return
        except LocalLLMError as error:  # of this turn, as a template that refuses it; the next may do better
            say(f"error: {error}", RED)
            return
        if statistics.reason == "context":
            say(explain_end(model), YELLOW)
        if roof is not None:
            say(statistics_line(statistics, roof.measure()))


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

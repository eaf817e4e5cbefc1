"""The line editor of a chat. It uses prompt_toolkit, which is imported when an editor is created.

Pasted text is one message. Tab completes, Ctrl-R searches the history, Ctrl-C clears the line, and Ctrl-Z suspends the
program.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from localllm.cli.chat.entry import CONTINUED, LEAVING, PROMPT, is_open, unquoted
from localllm.cli.terminal.console import raw, say

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import Completer
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    from localllm.cli.chat.history import HistoryFile

Offers = Callable[[str], Iterable[str]]  # maps the text before the cursor to completions


class Editor:
    """Reads messages with a line editor. `offers` returns completions; `kept` holds earlier messages."""

    def __init__(self, offers: Offers, kept: HistoryFile | None) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.output import create_output
        from prompt_toolkit.styles import Style

        output = create_output(raw(sys.stdout) if sys.stdout.isatty() else raw(sys.stderr))
        self._session: PromptSession[str] = PromptSession(
            [("class:prompt", PROMPT)],
            multiline=True,  # `_keys` rebinds Enter, which would only add a line
            prompt_continuation=[("class:prompt", CONTINUED)],
            style=Style([("prompt", "ansicyan bold"), ("", "bold")]),
            completer=_completer(offers),
            complete_while_typing=False,
            search_ignore_case=True,
            enable_suspend=True,
            enable_open_in_editor=True,
            history=_history(kept),
            key_bindings=_keys(),
            output=output,
        )
        self._session.app.renderer.cpr_not_supported_callback = None  # no warning: the editor works without CPR

    def read(self, begun: str = "") -> str | None:
        try:
            return unquoted(self._session.prompt(default=begun))
        except EOFError:
            return None


def _keys() -> KeyBindings:
    from prompt_toolkit.application import run_in_terminal
    from prompt_toolkit.filters import is_searching
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter", filter=~is_searching)
    @keys.add("c-j", filter=~is_searching)
    def enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.complete_state is not None and buffer.complete_state.current_completion is not None:
            buffer.complete_state = None  # accepts the completion
        elif is_open(buffer.text):
            buffer.newline(copy_margin=False)
        elif buffer.document.is_cursor_at_the_end and buffer.text.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def line_break(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    @keys.add("c-c", filter=~is_searching)
    @keys.add("<sigint>")
    def clear(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.text:
            buffer.save_to_undo_stack()
            buffer.text = ""
        else:
            run_in_terminal(lambda: say(LEAVING))

    return keys


def _completer(offers: Offers) -> Completer:
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion
    from prompt_toolkit.document import Document

    class Offered(Completer):
        def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
            before = document.text_before_cursor
            begun = before.rpartition(" ")[2]
            return (Completion(word, -len(begun)) for word in offers(before))

    return Offered()


def _history(kept: HistoryFile | None) -> History:
    from prompt_toolkit.history import History, InMemoryHistory

    class Kept(History):
        def __init__(self, file: HistoryFile) -> None:
            super().__init__()
            self._file = file

        def load_history_strings(self) -> Iterable[str]:
            return reversed(self._file.messages())

        def store_string(self, string: str) -> None:
            self._file.add(string)

    return Kept(kept) if kept is not None else InMemoryHistory()

"""Join input lines to messages, and read lines without a line editor: from a dumb terminal or a pipe.

A message that begins with triple quotes continues until the quotes are closed. A backslash at the end of a line
continues the line.
"""

from __future__ import annotations

import sys
from typing import Protocol

from localllm.cli.terminal.console import say
from localllm.cli.terminal.quiet import Quiet

PROMPT, CONTINUED = ">>> ", "... "
LEAVING = "Ctrl-D or /bye leaves"
_QUOTES = '"""'


class LineReader(Protocol):
    """Reads messages."""

    def read(self, begun: str = "") -> str | None:
        """Return the next message, or None at the end of input. An editor begins with the text `begun`."""


def is_open(text: str) -> bool:
    """Return whether a message begins with triple quotes that are not closed yet."""
    return text.lstrip().startswith(_QUOTES) and text.count(_QUOTES) % 2 == 1


def unquoted(text: str) -> str:
    """Return the text between triple quotes that enclose a whole message; return other messages unchanged."""
    body = text.strip()
    if text.count(_QUOTES) == 2 and body.startswith(_QUOTES) and body.endswith(_QUOTES):
        return body[len(_QUOTES) : -len(_QUOTES)].strip("\n")
    return text


class Lines:
    """Reads lines from a dumb terminal, without an editor. Ctrl-C drops an unfinished message."""

    def __init__(self, quiet: Quiet) -> None:
        self._quiet = quiet

    def read(self, begun: str = "") -> str | None:
        with self._quiet.paused(interrupts=True):
            return self._read()

    def _read(self) -> str | None:
        text, prompt = "", PROMPT
        while True:
            try:
                line = input(prompt if sys.stdout.isatty() else "")
            except EOFError:
                print(file=sys.stderr)
                return None
            except KeyboardInterrupt:
                print(file=sys.stderr)
                say(LEAVING)
                text, prompt = "", PROMPT
                continue
            text += line
            if text.endswith("\\") and not is_open(text):
                text = text[:-1] + "\n"
            elif is_open(text):
                text += "\n"
            else:
                return unquoted(text)
            prompt = CONTINUED


class Piped:
    """Reads lines from a pipe. Each line is a message."""

    def read(self, begun: str = "") -> str | None:
        return sys.stdin.readline() or None

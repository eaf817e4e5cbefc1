"""Ask the user yes or no."""

from __future__ import annotations

import os
import select
import sys

from localllm.cli.app import UsageError
from localllm.cli.terminal.wrapping import broken, width_of


def agrees(question: str) -> bool:
    """Return whether the user answers yes. Raise UsageError if stdin is not a terminal."""
    if not sys.stdin.isatty():
        raise UsageError("use --yes to delete without confirmation")
    _put(f"{question} [y/N]")
    return _line().strip().lower() in ("y", "yes")


def _put(question: str) -> None:
    print("\n".join(broken(question, width_of(sys.stderr))) + " ", end="", file=sys.stderr, flush=True)


def _line() -> str:
    """Read a line.

    A Ctrl-C that arrives just before the read begins does not interrupt it. A wait with a limit notices it.
    """
    if os.name == "posix":  # elsewhere `select` accepts only sockets
        while not select.select([sys.stdin], [], [], 0.2)[0]:
            pass
    return sys.stdin.readline()


def on_terminal() -> bool:
    """Return whether a question can be asked, and its answer be followed by a chat."""
    return all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))


def accepts(question: str) -> bool:
    """Return whether the user accepts an offer; an empty line does. Raise EOFError at the end of input."""
    _put(f"{question} [Y/n]")
    try:
        answer = _line()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        raise
    if not answer:
        print(file=sys.stderr)
        raise EOFError
    return answer.strip().lower() in ("", "y", "yes")

"""Ask the user yes or no."""

from __future__ import annotations

import sys

from localllm.cli.app import UsageError


def agrees(question: str) -> bool:
    """Return whether the user answers yes. Raise UsageError if stdin is not a terminal."""
    if not sys.stdin.isatty():
        raise UsageError("use --yes to delete without confirmation")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def on_terminal() -> bool:
    """Return whether a question can be asked, and its answer be followed by a chat."""
    return all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))


def accepts(question: str) -> bool:
    """Return whether the user accepts an offer; an empty line does. Raise EOFError at the end of input."""
    print(f"{question} [Y/n] ", end="", file=sys.stderr, flush=True)
    try:
        answer = sys.stdin.readline()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        raise
    if not answer:
        print(file=sys.stderr)
        raise EOFError
    return answer.strip().lower() in ("", "y", "yes")

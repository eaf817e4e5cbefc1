"""Ask the user to confirm a deletion."""

from __future__ import annotations

import sys

from localllm.cli.app import UsageError


def agrees(question: str) -> bool:
    """Return whether the user answers yes. Raise UsageError if stdin is not a terminal."""
    if not sys.stdin.isatty():
        raise UsageError("use --yes to delete without confirmation")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")

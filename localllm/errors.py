"""The base of every error that the user can fix; `localllm.cli` turns it into one red line and an exit code."""

from __future__ import annotations

from localllm.printable import printable


class LocalLLMError(Exception):
    """What went wrong, where, and what to do next, in one line without control characters."""

    def __str__(self) -> str:
        return printable(super().__str__(), None)

"""The base of every error that the user can fix; `localllm.cli` prints it as one red line and sets an exit code."""

from __future__ import annotations

from localllm.base.printable import printable


class LocalLLMError(Exception):
    """A one-line message without control characters: the problem, its place, and the next step."""

    def __str__(self) -> str:
        return printable(super().__str__(), None)

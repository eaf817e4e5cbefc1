"""The base of all errors that the user can fix. `localllm.cli` prints such an error as one red line and sets an exit
code."""

from __future__ import annotations

from localllm.base.printable import printable


class LocalLLMError(Exception):
    """A one-line message without control characters. It states the problem, the place, and the next step."""

    def __str__(self) -> str:
        return printable(super().__str__(), None)

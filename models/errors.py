"""The one error of this package: a model file does not hold what its architecture requires."""

from __future__ import annotations

from localllm.printable import printable


class ModelError(Exception):
    """A missing, absurd or unsupported key or tensor; the message names it, what was found and what is expected."""

    def __str__(self) -> str:
        return printable(super().__str__(), None)

"""The error of this package: a model file does not hold what its architecture requires."""

from __future__ import annotations

from localllm.base.printable import printable


class ModelError(Exception):
    """A missing, out-of-range or unsupported key or tensor; the message has the found and expected values."""

    def __str__(self) -> str:
        return printable(super().__str__(), None)

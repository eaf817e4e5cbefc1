"""The error of this package: the GGUF does not match its architecture."""

from __future__ import annotations

from localllm.base.printable import printable


class ModelError(Exception):
    """Raised for a missing, invalid or unsupported key or tensor; the message gives the expected and found values."""

    def __str__(self) -> str:
        return printable(super().__str__(), None)

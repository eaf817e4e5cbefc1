"""USER/REPO[:QUANT], the name of a model on the hub."""

from __future__ import annotations

import re
from typing import NamedTuple

from localllm.base.printable import printable
from localllm.hub.errors import StoreError

_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}"
OWNER_AND_REPO = re.compile(rf"{_PART}/{_PART}")
ONE_REPO = re.compile(_PART)  # a few of the oldest repositories have no owner
REFERENCE = re.compile(rf"({OWNER_AND_REPO.pattern})(?::(.+))?", re.DOTALL)
_ADDRESS = re.compile(r"(?:https?://)?(?:hf\.co|huggingface\.co)/", re.IGNORECASE)


class Reference(NamedTuple):
    """A repository and the model in it: a quantization, the start of a quantization, a file name, or "" for any
    model."""

    repo: str
    quant: str = ""

    def __str__(self) -> str:
        return f"{self.repo}:{self.quant}" if self.quant else self.repo


def reference(text: str) -> Reference:
    """Parse USER/REPO[:QUANT], optionally after hf.co/; raise StoreError for other texts."""
    found = REFERENCE.fullmatch(_ADDRESS.sub("", text.strip()))
    if found is None or ".." in found[1] or "--" in found[1]:
        raise StoreError(f"{printable(text)} is not of the form USER/REPO or USER/REPO:QUANT")
    quant = found[2] or ""
    return Reference(found[1], "" if quant.lower() == "latest" else quant)

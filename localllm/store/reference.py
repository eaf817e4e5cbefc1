"""USER/REPO[:QUANT]: how a model of the hub is named."""

from __future__ import annotations

import re
from typing import NamedTuple

from localllm.printable import printable
from localllm.store.errors import StoreError

_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}"
OWNER_AND_REPO = re.compile(rf"{_PART}/{_PART}")
ONE_REPO = re.compile(_PART)  # a few of the oldest have no owner
REFERENCE = re.compile(rf"({OWNER_AND_REPO.pattern})(?::(.+))?", re.DOTALL)
_ADDRESS = re.compile(r"(?:https?://)?(?:hf\.co|huggingface\.co)/", re.IGNORECASE)


class Reference(NamedTuple):
    """A repository, and which of its models: a quantization, the beginning of one, a file's name, or "" for any."""

    repo: str
    quant: str = ""

    def __str__(self) -> str:
        return f"{self.repo}:{self.quant}" if self.quant else self.repo


def reference(text: str) -> Reference:
    """Parse USER/REPO[:QUANT], also with hf.co/ before it. StoreError if it is not of this form."""
    found = REFERENCE.fullmatch(_ADDRESS.sub("", text.strip()))
    if found is None or ".." in found[1] or "--" in found[1]:
        raise StoreError(f"{printable(text)} is not of the form USER/REPO or USER/REPO:QUANT")
    quant = found[2] or ""
    return Reference(found[1], "" if quant.lower() == "latest" else quant)

"""A model that was found on this computer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Found:
    """A model in a store. `problem` says why it cannot be opened, if so."""

    name: str  # what finds it again: user/repo:Q4_K_M, llama3.2:1b
    store: str
    paths: tuple[Path, ...]  # its files, in order; the first is opened
    bytes: int = 0
    label: str = ""  # quantization, where a name or a manifest tells it
    used: float = 0.0  # seconds since 1970: when it was last read or written
    repo: str = ""  # USER/REPO, if it came from there
    file: str = ""  # path within its repository or folder, without the number of a part and without ".gguf"
    problem: str = ""

    @property
    def path(self) -> Path:
        return self.paths[0]

    @property
    def files(self) -> tuple[str, ...]:
        """Names of files that mean this model."""
        return (self.file, *(path.name for path in self.paths)) if self.file else ()

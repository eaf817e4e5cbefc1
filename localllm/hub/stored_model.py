"""A model found on this computer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class DerivedModel:
    """What a derived model adds to its base (`derived.py`)."""

    name: str
    base: str  # full name of another model
    system: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)  # under Ollama's names
    messages: tuple[Mapping[str, str], ...] = ()  # the beginning of every conversation: role and content
    license: str = ""
    created: float = 0.0  # seconds since 1970


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model in a store. `problem` is the reason why it cannot be opened, or ""."""

    name: str  # full name that `locate` finds: user/repo:Q4_K_M, llama3.2:1b
    store: str
    paths: tuple[Path, ...]  # files of the model, in order; localllm opens the first
    bytes: int = 0
    label: str = ""  # quantization, from the file name or a manifest
    used: float = 0.0  # last access or change, in seconds since 1970
    repo: str = ""  # USER/REPO, if known
    file: str = ""  # path within the repository or folder, without part number and ".gguf"
    problem: str = ""
    derived: DerivedModel | None = None

    @property
    def path(self) -> Path:
        return self.paths[0]

    @property
    def files(self) -> tuple[str, ...]:
        """The file names that refer to this model."""
        return (self.file, *(path.name for path in self.paths)) if self.file else ()

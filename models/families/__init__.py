"""Families of models that need their own code, one file each; this package imports every file in its folder."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from localllm.models.architecture import Architecture
from localllm.models.draft_architecture import DraftArchitecture

_FILES = [import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__)]
ROWS: list[Architecture] = [row for file in _FILES for row in file.ROWS]
DRAFTERS: dict[str, DraftArchitecture] = {row.name: row for file in _FILES for row in getattr(file, "DRAFTERS", ())}

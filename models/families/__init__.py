"""Families of models that need their own code, one file each; this package imports every file in its folder."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from localllm.models.architecture import Architecture

ROWS: list[Architecture] = [
    row for file in iter_modules(__path__) for row in import_module(f"{__name__}.{file.name}").ROWS
]

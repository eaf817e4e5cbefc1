"""The models that a server offers: one file, a folder of files, or everything that `localllm list` shows.

A scan returns them as `StoredModel`s, most recently used first. It may block, and is repeated while the server runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from localllm.base.errors import LocalLLMError
from localllm.base.files.regular import inside
from localllm.hub import StoredModel, StoreFolders, everything
from localllm.hub.labels import is_model

log = logging.getLogger("localllm.server")
Scan = Callable[[], Sequence[StoredModel]]


def only(name: str, path: Path) -> Scan:
    """Return the scan of a server with one model."""
    found = [StoredModel(name, "", (path,))]
    return lambda: found


def stores(places: StoreFolders) -> Scan:
    """Return the scan of all models on this computer."""
    return lambda: sorted(everything(places), key=lambda each: -each.used)


def folder_of(folder: Path) -> Scan:
    """Return the scan of a folder; raise LocalLLMError if it has no models now."""
    if not models_in(folder):
        raise LocalLLMError(f"{folder}: no GGUF files in this folder; give a folder with models")
    return lambda: models_in(folder)


def models_in(folder: Path) -> list[StoredModel]:
    """Return the models in a folder and its subfolders. A split model counts once. Files such as projectors
    and prediction heads are skipped."""
    found: dict[str, StoredModel] = {}
    for path in sorted(folder.rglob("*.gguf")):
        name = path.relative_to(folder).as_posix().removesuffix(".gguf")
        if not is_model(path.name):
            continue
        problem = "" if inside(path, folder) else f"it is a link to a file outside {folder}"
        if not problem and not path.is_file():
            continue
        first, _, parts = name.rpartition("-00001-of-")
        if first and parts.isdigit():
            name = first
        elif _is_part(name):
            continue
        found.setdefault(name, StoredModel(name, "", (path,), problem=problem))
    return list(found.values())


def _is_part(name: str) -> bool:
    rest, _, count = name.rpartition("-of-")
    return count.isdigit() and rest.rpartition("-")[2].isdigit() and len(count) == 5

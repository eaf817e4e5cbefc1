"""Read the stores of other programs safely: open nothing outside a store, and limit names, sizes and depth.

Without these checks, a program with write access to a store could make localllm read any file, or read endlessly.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from localllm.base.files.regular import open_regular

MAX_JSON = 1 << 20  # maximum bytes of a JSON file; manifests have a few hundred bytes
MAX_ENTRIES = 100_000  # maximum files and folders to visit per store
MAX_DEPTH = 6


class Unusable(Exception):
    """A file in a store is unusable. The message is the reason, without the name of the file."""


def files_below(root: Path, depth: int = MAX_DEPTH, budget: list[int] | None = None) -> Iterator[str]:
    """Yield files below a folder as sorted relative paths with slashes. Links to folders are not followed.

    Unreadable entries are skipped. `budget` holds the remaining number of entries to visit.
    """
    budget = [MAX_ENTRIES] if budget is None else budget
    for name, is_folder in _entries(root, budget):
        if not is_folder:
            yield name
        elif depth > 1:
            yield from (f"{name}/{below}" for below in files_below(root / name, depth - 1, budget))


def folders_in(root: Path) -> list[str]:
    """Return the sorted names of the subfolders, without links. The result is empty if the folder is unreadable."""
    return [name for name, is_folder in _entries(root, [MAX_ENTRIES]) if is_folder]


def _entries(root: Path, budget: list[int]) -> list[tuple[str, bool]]:
    found = []
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                budget[0] -= 1
                if budget[0] < 0:
                    break
                found.append((entry.name, entry.is_dir(follow_symlinks=False)))
    except OSError:
        return []
    return sorted(found)


def regular(root: Path, path: Path) -> os.stat_result:
    """Return the stat of a regular file whose links stay inside `root`. For other files, raise Unusable with the
    reason."""
    try:
        base, real = os.path.realpath(root), os.path.realpath(path, strict=True)
    except FileNotFoundError:
        target = _target(path)
        raise Unusable(f"its file is missing{f' ({target})' if target else ''}; fetch it again") from None
    except (OSError, ValueError) as error:
        raise Unusable(f"cannot be opened: {getattr(error, 'strerror', None) or error}") from None
    if os.path.commonpath([base, real]) != base:
        raise Unusable(f"links to {real}, which is outside {base}; give that path to use it")
    try:
        facts = os.stat(real)
    except OSError as error:
        raise Unusable(f"cannot be opened: {error.strerror}") from None
    if not stat.S_ISREG(facts.st_mode):
        raise Unusable("is not a regular file")
    return facts


def read_object(root: Path, path: Path) -> dict[str, Any]:
    """Return the JSON object in a small file inside `root`; raise Unusable for other content."""
    regular(root, path)
    try:
        with open_regular(path) as file:
            data = file.read(MAX_JSON + 1)
    except OSError as error:
        raise Unusable(f"{path.name} cannot be read: {error.strerror}") from None
    if len(data) > MAX_JSON:
        raise Unusable(f"{path} is larger than {MAX_JSON >> 20} MiB, so it is not a manifest")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise Unusable(f"{path} is not JSON, or nested too deeply") from None
    if not isinstance(value, dict):
        raise Unusable(f"{path} is not a JSON object")
    return value


def _target(path: Path) -> str:
    try:
        return os.readlink(path)
    except (OSError, ValueError):
        return ""

"""The decorator `compiled`: Numba compiles the functions of this folder at their first call and caches the code.

Numba's own cache only checks a function's source file. These functions call each other across files, so the cache
folder is named after a hash of all files: stale code is never found, and a read-only installation works. Numba opens
cached files by name and trusts them, so the folder and its content must belong to this user alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from numba import config, njit
from numba.core.caching import FunctionCache

from localllm.quant.codecache import check_tree, default_folder, private_folder, tell_unwritten


class _Cache(FunctionCache):
    """Numba's cache of one function, in which a full disk is not an error."""

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            tell_unwritten(Path(self.cache_path), error)


@cache
def cache_folder() -> Path | None:
    """Return the folder for compiled code, private to the user; None, after a warning, if no folder is usable."""
    base = default_folder("quant")
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    folder = private_folder(base / digest.hexdigest()[:24]) if base is not None else None
    return folder if folder is not None and check_tree(folder) else None


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a function with Numba: IEEE arithmetic exactly as written, no interpreter lock, cached on disk."""
    made, folder = njit(nogil=True, error_model="numpy")(function), cache_folder()
    if folder is not None:
        before = config.CACHE_DIR
        config.CACHE_DIR = str(folder)  # the constructor of Numba's cache reads it
        try:
            kept = _Cache(function)
        finally:
            config.CACHE_DIR = before
        if folder in Path(kept.cache_path).parents:
            made._cache = kept
        else:  # if Numba cannot write to the folder, it would use other, unchecked folders
            tell_unwritten(folder, PermissionError(13, "Permission denied"))
    return made

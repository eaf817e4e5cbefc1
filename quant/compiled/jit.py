"""`compiled`, the decorator of this folder's functions: Numba compiles them at their first call, and keeps the code.

Numba's own cache looks at the file of a function only. These functions are spread over files, so the folder of the
cache is named after a hash of all of them: stale code is never found, and a read-only installation is no obstacle.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from numba import config, njit


@cache
def cache_folder() -> Path | None:
    """Where compiled code is kept, private to the user; None where no such folder can be made and written."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    folder = Path(base) / "localllm" / "quant" / digest.hexdigest()[:24]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return None
    owner = folder.stat().st_uid
    return folder if os.access(folder, os.W_OK) and owner == os.getuid() else None


def compiled(function: Callable[..., Any]) -> Any:
    """The function compiled by Numba: IEEE arithmetic exactly as written, no interpreter lock, cached on disk."""
    folder = cache_folder()
    before = config.CACHE_DIR
    config.CACHE_DIR = str(folder or "")  # read by the decorator, here and now
    try:
        return njit(nogil=True, error_model="numpy", cache=folder is not None)(function)
    finally:
        config.CACHE_DIR = before

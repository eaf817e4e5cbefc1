"""Disk cache of compiled kernels, keyed by a hash of all their inputs.

Kernels that cannot be stored are compiled again next time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from localllm.quant.codecache import CodeCache


class CompiledStore:
    """Stores compiled binaries in a folder; without a folder (None), nothing is stored."""

    def __init__(self, folder: Path | None) -> None:
        self._cache = CodeCache(folder)
        self.made = 0  # number of binaries compiled because they were not in the cache

    def get(self, key: tuple[str, ...], make: Callable[[], bytes]) -> bytes:
        """Return the binary for `key`. If the binary is missing, make and store it."""
        name = hashlib.sha256("\0".join(key).encode()).hexdigest()[:40]
        found = self._cache.read(name)
        if found:
            return found
        binary = make()
        self.made += 1
        self._cache.write(name, binary)
        return binary

"""Compiled kernels on disk, by a hash of everything that decides them; what cannot be kept is compiled again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from localllm.quant.codecache import CodeCache


class Store:
    """Binaries in a folder; None keeps nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._cache = CodeCache(folder)
        self.made = 0  # compiled, not found

    def get(self, key: tuple[str, ...], make: Callable[[], bytes]) -> bytes:
        """What was stored under `key`, or what `make` returns, which then is stored."""
        name = hashlib.sha256("\0".join(key).encode()).hexdigest()[:40]
        found = self._cache.read(name)
        if found:
            return found
        binary = make()
        self.made += 1
        self._cache.write(name, binary)
        return binary

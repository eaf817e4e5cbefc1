"""Compiled kernels on disk, by a hash of everything that decides them; what cannot be kept is compiled again."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def default_folder() -> Path:
    """Where this user's caches are."""
    base = os.environ.get("XDG_CACHE_HOME") or (Path.home() / ".cache")
    return Path(base) / "localllm" / "gpu"


class Store:
    """Binaries in a folder; None keeps nothing."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.made = 0  # compiled, not found

    def get(self, key: tuple[str, ...], make: Callable[[], bytes]) -> bytes:
        """What was stored under `key`, or what `make` returns, which then is stored."""
        name = hashlib.sha256("\0".join(key).encode()).hexdigest()
        path = self.folder / name[:40] if self.folder is not None else None
        if path is not None:
            with suppress(OSError):
                found = path.read_bytes() if path.stat().st_uid == os.getuid() else b""
                if len(found) > 32 and hashlib.sha256(found[32:]).digest() == found[:32]:
                    return found[32:]
        binary = make()
        self.made += 1
        if path is not None:
            with suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                    file.write(hashlib.sha256(binary).digest() + binary)
                os.replace(file.name, path)  # never half written, whoever else writes it
        return binary

"""The bundled models, and how a MODEL argument becomes a file."""

from __future__ import annotations

import os
from pathlib import Path

BOX = {"demo": "demo.gguf", "draft": "draft.gguf"}


def resolve(name: str | os.PathLike[str]) -> Path:
    """Return the file of `name`: a path, or the name of a bundled model."""
    path = Path(name)
    if path.exists() or str(name) not in BOX:
        return path
    from localllm import models

    return Path(models.__file__).parent / "demo" / BOX[str(name)]

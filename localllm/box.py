"""The models that come with the program, and what a MODEL argument means."""

from __future__ import annotations

import os
from pathlib import Path

BOX = {"demo": "demo.gguf", "draft": "draft.gguf"}


def resolve(name: str | os.PathLike[str]) -> Path:
    """The file that `name` means: a path, or the name of a model in the box."""
    path = Path(name)
    if path.exists() or str(name) not in BOX:
        return path
    from localllm import models

    return Path(models.__file__).parent / "demo" / BOX[str(name)]

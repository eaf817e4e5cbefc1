"""Resolves a MODEL argument to a GGUF: a path, a bundled model, or a name in one of the stores."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from localllm.base.errors import LocalLLMError

BOX = {"demo": "demo.gguf", "draft": "draft.gguf"}
_SHOWN = 5  # maximum files of a folder named in a message


class FolderError(LocalLLMError):
    """A folder was given instead of a GGUF file. The message says how to get a GGUF."""


def resolve(name: str | os.PathLike[str], folders: bool = False, others: Collection[str] = ()) -> Path:
    """Return the path for `name`: a path, the name of a bundled model, or a name in a store (`localllm.hub`).

    With `folders`, a folder is returned too. Raises StoreError if nothing matches, FolderError for a folder. `others`
    are further names that an error may suggest.
    """
    path = Path(name)
    if path.exists():
        if path.is_dir() and not folders:
            raise FolderError(_next_step(path))
        return path
    if str(name) in BOX:
        from localllm import models

        return Path(models.__file__).parent / "demo" / BOX[str(name)]
    if not isinstance(name, str) or not name:
        return path
    from localllm.hub import locate

    return locate(name, others=(*BOX, *others))


def is_model_folder(path: Path) -> bool:
    """Return whether a folder contains a Hugging Face checkpoint or GGUF files."""
    return path.is_dir() and (_is_checkpoint(path) or bool(_gguf_files(path)))


def _next_step(folder: Path) -> str:
    if _is_checkpoint(folder):
        return f"{folder} is a Hugging Face folder; `localllm quantize {folder} OUT.gguf Q4_K_M` makes a file that runs"
    names = _gguf_files(folder)
    if not names:
        return f"{folder} is a folder without GGUF files; give a file, or a name that `localllm list` shows"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{folder} is a folder; give one of its files: {', '.join(names[:_SHOWN])}{more}"


def _is_checkpoint(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(name.endswith(".safetensors") for name in _names(folder))


def _gguf_files(folder: Path) -> list[str]:
    return [name for name in _names(folder) if name.endswith(".gguf")]


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []

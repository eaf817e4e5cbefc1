"""LM Studio's store of models, with the layout PUBLISHER/REPO/FILE.gguf."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from localllm.hub.folder import models_of
from localllm.hub.reading import files_below
from localllm.hub.stored_model import StoredModel


def scan(root: Path, store: str) -> Iterator[StoredModel]:
    """Yield the models that LM Studio has downloaded, and files that users added."""
    repos: dict[str, list[tuple[str, Path]]] = {}
    for place in files_below(root):
        parts = place.split("/")
        repo, name = ("/".join(parts[:2]), "/".join(parts[2:])) if len(parts) > 2 else ("", place)
        repos.setdefault(repo, []).append((name, root / place))
    for repo, files in repos.items():
        yield from models_of(root, store, repo, files)

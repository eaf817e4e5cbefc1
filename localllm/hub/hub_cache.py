"""The cache of huggingface_hub: models--USER--REPO/snapshots/COMMIT/FILE links to blobs/HASH; refs/main names a commit.

The cache is read without the library, whose import takes a second and which would follow links that lead elsewhere.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from localllm.base.files.regular import open_regular
from localllm.hub.folder import models_of
from localllm.hub.labels import is_model
from localllm.hub.reading import Unusable, files_below, folders_in, regular
from localllm.hub.reference import ONE_REPO, OWNER_AND_REPO
from localllm.hub.stored_model import StoredModel

PREFIX = "models--"
COMMIT = re.compile(r"[0-9a-f]{40}")


def repo_folder(repo: str) -> str:
    return PREFIX + repo.replace("/", "--")


def scan(root: Path, store: str) -> Iterator[StoredModel]:
    """Yield the models in a hub cache. If a file is in several commits, the newest commit counts."""
    for folder in folders_in(root):
        repo = folder.removeprefix(PREFIX).replace("--", "/")
        if folder.startswith(PREFIX) and (OWNER_AND_REPO.fullmatch(repo) or ONE_REPO.fullmatch(repo)):
            files: dict[str, Path] = {}
            for snapshot in snapshots(root / folder):
                for name in files_below(snapshot):
                    if is_model(name):
                        files.setdefault(name, snapshot / name)
            yield from models_of(root, store, repo, list(files.items()))


def snapshots(repo: Path) -> list[Path]:
    """Return the folders of commits: refs/main first, then the newest."""
    main = main_commit(repo)
    found = [repo / "snapshots" / name for name in folders_in(repo / "snapshots") if COMMIT.fullmatch(name)]

    def rank(path: Path) -> tuple[bool, float]:
        try:
            return path.name != main, -os.stat(path).st_mtime
        except OSError:
            return True, 0.0

    return sorted(found, key=rank)


def main_commit(repo: Path) -> str:
    """Return the commit in refs/main, or ""."""
    path = repo / "refs" / "main"
    try:
        regular(repo, path)
        with open_regular(path) as file:
            commit = file.read(64).decode("ascii", "replace").strip()
    except (Unusable, OSError):
        return ""
    return commit if COMMIT.fullmatch(commit) else ""

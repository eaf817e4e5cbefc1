"""The files that `pull` has downloaded, listed in each repository's folder of the hub cache. Only these files are
removed.

The list is stored in the cache, so it is moved and deleted with the cache. Other programs ignore it. The list
determines which files are deleted, so it is validated like the files of other programs.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from localllm.base.files.atomic import NewFile
from localllm.hub.derived import delete_derived
from localllm.hub.errors import StoreError
from localllm.hub.hub_cache import main_commit, repo_folder, snapshots
from localllm.hub.labels import is_encoders, is_model
from localllm.hub.reading import Unusable, files_below, read_object
from localllm.hub.store_folders import DERIVED, HUB, StoreFolders
from localllm.hub.stored_model import StoredModel

RECORD = ".localllm.json"
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
# Advice in error messages: how to remove models of other programs.
_OTHERS = {"Ollama": "`ollama rm {name}` removes it", "LM Studio": "remove it there"}


def owned(repo: Path) -> dict[str, str]:
    """Return the files of a repository that `pull` downloaded: path within it -> blob name."""
    try:
        files = read_object(repo, repo / RECORD).get("files")
    except Unusable:
        return {}
    given = files.items() if isinstance(files, dict) else ()
    return {path: blob for path, blob in given if isinstance(blob, str) and _BLOB.fullmatch(blob)}


def remember(repo: Path, path: str, blob: str) -> None:
    """Add a file to the list. An older file of the same name in the list is deleted."""
    known = owned(repo)
    if known.get(path, blob) != blob:
        _delete(repo, path, known[path])
        _tidy(repo)
    _write(repo, known | {path: blob})


def is_owned(model: StoredModel, hub: Path) -> bool:
    """Return whether localllm made all files of a model: `pull` downloaded them, or it is a derived model."""
    if model.store == DERIVED:
        return True
    if model.store != HUB or not model.repo:
        return False
    repo = hub / repo_folder(model.repo)
    return set(_names(model, repo)).issubset(owned(repo))


def remove_model(model: StoredModel, hub: Path) -> int:
    """Delete a model that `pull` downloaded, or a derived one, and return the bytes freed; raise StoreError for a model
    of another program."""
    if not is_owned(model, hub):
        raise StoreError(f"{model.name} was not downloaded by `localllm pull`, so it is kept; {_who(model)}")
    if model.store == DERIVED:
        return delete_derived(StoreFolders(hub).derived, model.name)
    repo = hub / repo_folder(model.repo)
    known, freed = owned(repo), 0
    doomed = _names(model, repo)
    if not any(is_model(name) for name in known if name not in doomed):
        doomed += [name for name in known if is_encoders(name)]
    try:
        for name in doomed:
            freed += _delete(repo, name, known[name])
        _write(repo, {name: blob for name, blob in known.items() if name not in doomed})
    except OSError as error:
        raise StoreError(f"{error.filename or repo} cannot be removed: {error.strerror}") from None
    _tidy(repo)
    return freed


def _write(repo: Path, files: dict[str, str]) -> None:
    if not files:
        (repo / RECORD).unlink(missing_ok=True)
        return
    with NewFile(repo / RECORD) as new:
        new.file.write(json.dumps({"version": 1, "files": files}, indent=1).encode())
        new.commit()


def _names(model: StoredModel, repo: Path) -> list[str]:
    """Return the paths of a model's files within its repository."""
    return ["/".join(path.relative_to(repo / "snapshots").parts[1:]) for path in model.paths]


def _who(model: StoredModel) -> str:
    if model.store == HUB:
        return f"`hf cache rm model/{model.repo}` removes its whole repository"
    return _OTHERS.get(model.store, "delete {path} yourself").format(name=model.name, path=model.path)


def _delete(repo: Path, name: str, blob: str) -> int:
    """Remove a file's links in all commits, and its blob if no other link uses it. Return the bytes freed."""
    place, used, freed = repo / "blobs" / blob, False, 0
    for snapshot in snapshots(repo):
        for other in files_below(snapshot):
            path = snapshot / other
            if _leads_to(path) not in (blob, ""):
                continue
            if other == name and _inside(repo, path):
                freed += 0 if path.is_symlink() else path.stat().st_size  # a plain file, on systems without links
                path.unlink()
            else:
                used = used or path.is_symlink()
    if not used and _inside(repo, place) and os.path.lexists(place):
        freed += 0 if place.is_symlink() else place.stat().st_size
        place.unlink()
    return freed


def _inside(repo: Path, path: Path) -> bool:
    """Return whether the folder of `path` is inside the repository, after resolving links."""
    base = os.path.realpath(repo)
    return os.path.commonpath([base, os.path.realpath(path.parent)]) == base


def _leads_to(path: Path) -> str:
    """Return the name of the blob that a link points to, or "" for a plain file."""
    try:
        return os.path.basename(os.readlink(path))
    except OSError:
        return ""


def _tidy(repo: Path) -> None:
    """Remove empty folders, and refs/main if its commit is gone."""
    if (repo / "snapshots").is_symlink():
        return
    for place, _, _ in sorted(os.walk(repo / "snapshots"), reverse=True):
        if place != str(repo / "snapshots"):
            _rmdir(Path(place))
    main = main_commit(repo)
    if main and not (repo / "snapshots" / main).is_dir():
        (repo / "refs" / "main").unlink(missing_ok=True)
    if _rmdir(repo / "blobs"):
        for folder in (repo / "refs", repo / "snapshots", repo):
            _rmdir(folder)


def _rmdir(path: Path) -> bool:
    try:
        path.rmdir()
    except OSError:
        return not path.exists()
    return True

"""The files of localllm on disk, for `localllm doctor`: compiled code, prefixes saved by a server, and pulled models.

`clean` deletes compiled code and prefixes, which are rebuilt when needed. It only deletes files that belong to this
user and whose names localllm gives. It never deletes models; `localllm rm` does.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from localllm.base.errors import LocalLLMError
from localllm.base.files.regular import open_regular
from localllm.hub import StoreFolders, everything
from localllm.hub.owned import is_owned
from localllm.quant.codecache import default_folder
from localllm.saved.prefix_files import SUFFIX
from localllm.saved.prompt_cache import MAGIC


@dataclass(frozen=True, slots=True)
class Cache:
    """A folder of files that localllm created."""

    name: str
    folder: Path
    files: tuple[Path, ...]  # files that `clean` may delete
    bytes: int
    others: int  # number of other files in the folder, which `clean` keeps

    def facts(self) -> dict[str, object]:
        return {
            "name": self.name, "folder": str(self.folder), "files": len(self.files), "bytes": self.bytes,
            "other_files": self.others,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelStorage:
    """The number and size of models on this computer, by the program that fetched them."""

    folder: Path
    pulled: int
    pulled_bytes: int
    others: int
    other_bytes: int

    def facts(self) -> dict[str, object]:
        return {
            "folder": str(self.folder), "pulled": self.pulled, "pulled_bytes": self.pulled_bytes,
            "others": self.others, "other_bytes": self.other_bytes,
        }  # fmt: skip


def _is_prefix(path: Path, inside: tuple[str, ...]) -> bool:
    """Return whether the server wrote this file, judging by its name and first bytes."""
    if len(inside) != 1 or not re.fullmatch(rf"[0-9a-f]{{32}}{re.escape(SUFFIX)}", path.name):
        return False
    try:
        with open_regular(path, own=True) as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _named(name: str, folders: str = "") -> Callable[[Path, tuple[str, ...]], bool]:
    """Return a check for files with this name, directly in the folder or at any depth below folders with the given
    names."""

    def check(path: Path, inside: tuple[str, ...]) -> bool:
        placed = bool(re.fullmatch(folders, inside[0])) if folders and len(inside) > 1 else len(inside) == 1
        return placed and bool(re.fullmatch(name, path.name))

    return check


_DIGEST = "[0-9a-f]{40}"
_CODE = {  # folder: description, and the check for localllm's files
    "kernels": ("compiled code for the CPU", _named(rf"{_DIGEST}\.o")),
    "quant": ("compiled code for quantizing", _named(r".+\.nb[ic]", "[0-9a-f]{24}")),
    "gpu": ("compiled code for graphics cards", _named(_DIGEST)),
}


def find_caches(prefixes: str = "") -> list[Cache]:
    """Return the caches of compiled code, and the folder of a server's prefixes if given."""
    found = []
    for kind, (name, is_ours) in _CODE.items():
        folder = default_folder(kind)
        if folder is not None:
            found.append(_scan(name, folder, is_ours))
    if prefixes:
        folder = Path(prefixes)
        if not folder.is_dir():
            raise LocalLLMError(f"no such folder: {folder}; give the --cache-dir of localllm serve")
        found.append(_scan("prompt prefixes", folder, _is_prefix))
    return found


def find_models() -> ModelStorage:
    """Return the number and bytes of the models in the stores."""
    places = StoreFolders.here()
    models = [each for each in everything(places) if not each.problem and each.derived is None]
    pulled = [each for each in models if is_owned(each, places.hub)]
    total, own = sum(each.bytes for each in models), sum(each.bytes for each in pulled)
    return ModelStorage(places.hub, len(pulled), own, len(models) - len(pulled), total - own)


def clean(caches: list[Cache]) -> tuple[int, int]:
    """Delete the files of the given caches, and then empty folders. Return the number of files and the bytes freed."""
    count = freed = 0
    for cache in caches:
        for path in cache.files:
            try:
                size = path.lstat().st_size
                path.unlink()
            except FileNotFoundError:  # another process deleted it first
                continue
            except OSError as error:
                raise LocalLLMError(f"{path} cannot be removed: {error.strerror}; {count} files were removed") from None
            count, freed = count + 1, freed + size
        emptied = {folder for path in cache.files for folder in path.parents if cache.folder in folder.parents}
        for folder in sorted(emptied, reverse=True):
            with suppress(OSError):  # the folder is not empty
                folder.rmdir()
    return count, freed


def _scan(name: str, folder: Path, is_ours: Callable[[Path, tuple[str, ...]], bool]) -> Cache:
    files, size, others = [], 0, 0
    for path in _files(folder):
        try:
            facts = path.lstat()
        except OSError:  # another process has deleted it
            continue
        mine = not hasattr(os, "geteuid") or facts.st_uid == os.geteuid()
        if stat.S_ISREG(facts.st_mode) and mine and is_ours(path, path.relative_to(folder).parts):
            files.append(path)
            size += facts.st_size
        else:
            others += 1
    return Cache(name, folder, tuple(files), size, others)


def _files(folder: Path) -> Iterator[Path]:
    """Yield all entries below a folder except folders. Links are not followed."""
    for place, folders, names in os.walk(folder):
        links = [each for each in folders if os.path.islink(os.path.join(place, each))]
        yield from (Path(place, each) for each in (*names, *links))

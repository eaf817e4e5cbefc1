"""Saved sequences in named files of one folder, for llama.cpp's slot save and restore.

The file format is defined in `prompt_cache.py`. Names come from clients, so they must be plain file names without a
path.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from localllm.base.errors import LocalLLMError
from localllm.base.files.regular import foreign
from localllm.base.notices import said
from localllm.base.printable import printable
from localllm.engine.paging import CacheSequence
from localllm.loading.loaded_model import LoadedModel
from localllm.saved.prompt_cache import CacheFileError, loaded, read_prompt_cache, save

NAME_BYTES = 200
# No path separator of any system, wildcard or control character; no leading or trailing dot or space.
_NAME = re.compile(
    r'[^\x00-\x20\x7f-\x9f/\\:*?"<>|.](?:[^\x00-\x1f\x7f-\x9f/\\:*?"<>|]*[^\x00-\x20\x7f-\x9f/\\:*?"<>|.])?'
)


class SlotFiles:
    """A folder of saved sequences of one model. Only the engine's thread may access it."""

    def __init__(self, folder: Path, model: LoadedModel) -> None:
        check_folder(folder)
        self._folder, self._model = folder, model

    def save(self, name: str, sequence: CacheSequence) -> int:
        """Write a sequence and return the file size in bytes. Existing files are only replaced if they have this
        format.
        """
        path = self._path(name)
        try:
            return save(path, self._model, sequence, [], overwrite=True, own=True)
        except LocalLLMError as error:
            raise self._without_folder(error) from None

    def load(self, name: str) -> tuple[CacheSequence, int]:
        """Return a new sequence loaded from a file, and the file size in bytes.

        Raises CacheFileError for a file that does not match the model, CacheFull if too few blocks are free.
        """
        path = self._path(name)
        try:
            kept = read_prompt_cache(path, self._model, own=True)
            if kept.problem:
                raise CacheFileError(f"{path}: cannot be restored: {kept.problem}; save it again")
            return loaded(kept, self._model), path.stat().st_size
        except CacheFileError as error:
            raise self._without_folder(error) from None

    def _path(self, name: str) -> Path:
        """Return the path of a file; raise CacheFileError for a name that is not a plain file name."""
        if not _NAME.fullmatch(name) or len(name.encode("utf-8", "replace")) > NAME_BYTES or _surrogate(name):
            raise CacheFileError(
                f"{printable(name, 100)!r} is not a name for a slot's file; give one such as slot1.bin"
            )
        path = self._folder / name
        if path.is_symlink():
            raise CacheFileError(f"{name}: is a link, which is not followed; give another name")
        return path

    def _without_folder(self, error: LocalLLMError) -> CacheFileError:
        """Return an error that does not reveal the server's folders to clients."""
        return CacheFileError(said(error).replace(f"{self._folder}/", ""))


def check_folder(folder: Path) -> None:
    """Raise LocalLLMError unless the folder exists and is writable. Creating the folder would hide a typo."""
    if not folder.exists():
        raise LocalLLMError(f"no such folder: {folder}; create it first, so that slots can be saved there")
    if not folder.is_dir():
        raise LocalLLMError(f"{folder}: not a folder; give a folder for saving slots")
    if foreign(folder.stat()):
        raise LocalLLMError(f"{folder}: belongs to another user, who could read prompts; give another")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise LocalLLMError(f"{folder}: slots cannot be saved there: permission denied; give another folder")


def _surrogate(name: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in name)

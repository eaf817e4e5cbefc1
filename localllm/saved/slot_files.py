"""Named files of sequences in one folder, for llama.cpp's save and restore of slots.

The files are in `prompt_cache.py`'s format. Names come from clients, so they must be plain file names in that folder.
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
from localllm.saved.prompt_cache import CacheFileError, read_prompt_cache, restore, save

NAME_BYTES = 200
# No path separators of any system, wildcards or control characters; no leading or trailing dot or space.
_NAME = re.compile(
    r'[^\x00-\x20\x7f-\x9f/\\:*?"<>|.](?:[^\x00-\x1f\x7f-\x9f/\\:*?"<>|]*[^\x00-\x20\x7f-\x9f/\\:*?"<>|.])?'
)


class SlotFiles:
    """A folder of saved sequences of one model. Only the engine's thread may use it."""

    def __init__(self, folder: Path, model: LoadedModel) -> None:
        check_folder(folder)
        self._folder, self._model = folder, model

    def save(self, name: str, sequence: CacheSequence) -> int:
        """Write a sequence; return the file's size in bytes. It only replaces files of this kind."""
        path = self._path(name)
        try:
            return save(path, self._model, sequence, [], overwrite=True, own=True)
        except LocalLLMError as error:
            raise self._without_folder(error) from None

    def load(self, name: str) -> tuple[CacheSequence, int]:
        """Return a new sequence loaded from a file, and the file's size in bytes.

        Raises CacheFileError for a file that does not fit the model, CacheFull if too few blocks are free.
        """
        path = self._path(name)
        sequence = self._model.engine.add()
        try:
            kept = read_prompt_cache(path, self._model, own=True)
            if kept.problem:
                raise CacheFileError(f"{path}: cannot be restored: {kept.problem}; save it again")
            restore(kept, self._model, sequence)
            return sequence, path.stat().st_size
        except BaseException as error:
            sequence.free()
            if isinstance(error, CacheFileError):
                raise self._without_folder(error) from None
            raise

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
    """Raise LocalLLMError unless slots can be saved in a folder. It is not created, since a typo would go unnoticed."""
    if not folder.exists():
        raise LocalLLMError(f"no such folder: {folder}; create it first, so that slots can be saved there")
    if not folder.is_dir():
        raise LocalLLMError(f"{folder}: not a folder; give one in which slots can be saved")
    if foreign(folder.stat()):
        raise LocalLLMError(f"{folder}: belongs to another user, who could read prompts; give another")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise LocalLLMError(f"{folder}: slots cannot be saved there: permission denied; give another folder")


def _surrogate(name: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in name)

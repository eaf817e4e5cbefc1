"""Prefixes on disk. Evicted sequences, and cached sequences at shutdown, are saved and restored for later prompts.

The files are in `prompt_cache.py`'s format and are validated like other conversation files. File names are hashes of
the tokens. When the folder is full, the least recently used file is deleted first.
"""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from localllm.base.errors import LocalLLMError
from localllm.base.files.regular import foreign
from localllm.engine.media import Placed, whole
from localllm.engine.paging import CacheSequence
from localllm.engine.prefix import same
from localllm.loading.loaded_model import LoadedModel
from localllm.plan import BLOCK
from localllm.saved.prompt_cache import CacheFileError, read_prompt_cache, restore, save
from localllm.saved.saved_media import content_name

SUFFIX = ".prefix"
LEAST = 4 * BLOCK  # minimum tokens of a file; below it, evaluating is as fast as reading
MOST_BYTES = 32 << 30  # default total size of all files
log = logging.getLogger("localllm.saved")


@dataclass(slots=True)
class _File:
    path: Path
    tokens: array[int]
    size: int
    media: Sequence[Placed] = ()  # so that the ids among the tokens stay theirs


class PrefixFiles:
    """A folder of saved prefixes of one model. Only the engine's thread may access it."""

    def __init__(self, folder: Path, model: LoadedModel, most_bytes: int = MOST_BYTES) -> None:
        """Scan the folder for prefixes. Files of other models and damaged files are left untouched."""
        self._folder, self._model, self._most = folder, model, most_bytes
        self._files: dict[str, _File] = {}
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if foreign(folder.stat()):
                raise LocalLLMError(f"{folder}: belongs to another user, who could read prompts; give another")
            found = sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: path.lstat().st_mtime)
        except OSError as error:
            raise LocalLLMError(f"{folder}: cannot be used for prefixes: {error.strerror}") from None
        for path in found:
            try:
                kept = read_prompt_cache(path, model, own=True)
            except CacheFileError as error:
                log.info("%s", error)
                continue
            if not kept.problem:
                self._files[path.stem] = _File(path, array("i", kept.tokens), path.stat().st_size, kept.media)

    def best(self, tokens: Sequence[int]) -> int:
        """Return the number of leading tokens that the best file would restore."""
        return max((self._use(one, tokens) for one in self._files.values()), default=0)

    def load(self, tokens: Sequence[int]) -> CacheSequence | None:
        """Return the sequence of the best file; None if no file matches, or if it is unreadable or does not fit."""
        name = max(self._files, key=lambda name: self._use(self._files[name], tokens), default=None)
        if name is None:
            return None
        one = self._files[name]
        sequence = self._model.engine.add()
        try:
            restore(read_prompt_cache(one.path, self._model, own=True), self._model, sequence)
            os.utime(one.path)
        except (LocalLLMError, OSError) as error:
            log.warning("%s", error)
            sequence.free()
            del self._files[name]
            return None
        self._files[name] = self._files.pop(name)  # move to the most recently used end
        return sequence

    def save(self, sequence: CacheSequence) -> None:
        """Write the whole blocks of a sequence, unless a file already has them."""
        length = _whole_blocks(sequence)
        tokens = sequence.tokens[:length]
        whole_text = sequence.reach(length) == length
        if length < LEAST or not whole_text or not sequence.keeps(length) or self.best(tokens) >= length:
            return
        fork = sequence.fork()
        fork.truncate(length)
        name = content_name(tokens, fork.media)
        path = self._folder / f"{name}{SUFFIX}"
        try:
            self._files[name] = _File(
                path, array("i", tokens), save(path, self._model, fork, [], overwrite=True, own=True), fork.media.copy()
            )
        except (LocalLLMError, OSError) as error:
            log.warning("%s", error)
        finally:
            fork.free()
        self._trim()

    def _use(self, one: _File, tokens: Sequence[int]) -> int:
        """Return the number of tokens that a file restores. Sliding-window and recurrent layers can only be restored at
        its end.
        """
        alike = same(one.tokens.tolist(), tokens) if one.tokens[:1].tolist() == list(tokens[:1]) else 0
        return 0 if self._model.pool.has_windows and alike < len(one.tokens) else alike

    def _trim(self) -> None:
        while sum(one.size for one in self._files.values()) > self._most and len(self._files) > 1:
            name = next(iter(self._files))
            self._files.pop(name).path.unlink(missing_ok=True)


def _whole_blocks(sequence: CacheSequence) -> int:
    """Return the number of tokens in whole blocks that do not end inside a picture whose tokens see each other."""
    length = sequence.length // BLOCK * BLOCK
    while (kept := whole(sequence.media, length)) != length:
        length = kept // BLOCK * BLOCK
    return length

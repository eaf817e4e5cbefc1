"""Files that appear completely or not at all. Each is written under a hidden name in the same folder, then renamed.

Used for caches of compiled code (`quant.codecache`) and outputs of commands (`localllm.base.files.outputs`). A killed
process leaves its hidden file behind. The next process that writes to the folder a day later removes the file.
Exceptions leave no file behind, even if a signal raises them between two instructions.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from time import time
from types import TracebackType
from typing import Self

ABANDONED = 24 * 3600  # seconds since the last write
_HIDDEN = re.compile(r"\.localllm-(\d{1,9})-[0-9a-f]{16}\.tmp")  # the number is the process id


def hidden_path(folder: Path) -> Path:
    """Return a new name for a temporary file, which `sweep` recognizes."""
    return folder / f".localllm-{os.getpid()}-{os.urandom(8).hex()}.tmp"


class NewFile:
    """A hidden file next to `path`. `commit` renames it to `path`; a `with` block without `commit` removes it."""

    def __init__(self, path: Path, mode: int = 0o666) -> None:
        """Create the hidden file. `mode` is subject to the umask. Raises OSError if no file can be created there."""
        sweep(path.parent)
        self.path = path
        self._hidden = hidden_path(path.parent)
        # A signal may raise before the `with` block begins. The file is then removed with this object, or with the
        # process.
        self._remove = weakref.finalize(self, _remove, self._hidden, os.getpid())
        self.file = open(self._hidden, "xb", opener=lambda name, flags: os.open(name, flags, mode))  # noqa: SIM115

    def commit(self, durable: bool = True, replace: bool = True) -> None:
        """Rename the file to `path`. If `durable`, the file survives a power failure.

        Without `replace`, raise FileExistsError if `path` exists, even if another process has just created it.
        """
        assert self._remove.alive, "a file is committed once"
        self.file.flush()
        if durable:
            os.fsync(self.file.fileno())
        self.file.close()
        if replace or not _link(self._hidden, self.path):
            os.replace(self._hidden, self.path)
            self._remove.detach()
        if durable and sys.platform != "win32":  # Windows cannot open a folder; NTFS journals names
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)  # makes the new name durable
            finally:
                os.close(folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with suppress(OSError):  # closing flushes the buffer, which fails again on a full disk
                self.file.close()
        finally:
            self._remove()


def _remove(hidden: Path, process: int) -> None:
    if os.getpid() == process:  # a forked copy of the object does not own the file
        with suppress(OSError):  # Windows cannot delete an open file; a later process does
            hidden.unlink()


def _link(hidden: Path, path: Path) -> bool:
    """Link the file to a new name. Return False if the file system has no links and the name is free."""
    try:
        os.link(hidden, path)
    except FileExistsError:
        raise
    except OSError:
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(path)) from None
        return False
    return True


def sweep(folder: Path) -> None:
    """Remove hidden files in `folder` that killed processes of this user left more than a day ago."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            found = _HIDDEN.fullmatch(entry.name)
            if found and _is_abandoned(entry, int(found[1])):
                with suppress(OSError):
                    os.unlink(entry.path)


def _is_abandoned(entry: os.DirEntry[str], process: int) -> bool:
    facts = entry.stat(follow_symlinks=False)
    if not stat.S_ISREG(facts.st_mode) or time() - facts.st_mtime < ABANDONED:
        return False
    if sys.platform == "win32":  # Windows cannot remove open files, and signal 0 is Ctrl-C there
        return True
    if facts.st_uid != os.geteuid():
        return False
    try:
        os.kill(process, 0)
    except OSError:  # no such process, or a process of another user that reuses the id
        return True
    return False

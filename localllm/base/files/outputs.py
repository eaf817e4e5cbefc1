"""Write output files. All commands use this module. Files are replaced only on request, and only as a whole.

`check_target` fails early, before long work. `new_file` writes to a temporary file next to the target and renames it. A
failure, or a signal that raises (`localllm.cli.terminal.signals`), leaves no new file and keeps the old file.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from localllm.base.errors import LocalLLMError
from localllm.base.files.atomic import NewFile, hidden_path, sweep
from localllm.base.notices import Notice, Setting

_NOT_LINKED: int = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
_NO_WAIT: int = getattr(os, "O_NONBLOCK", 0)  # opening a pipe without a reader fails at once
_EXISTS = Notice("exists; give another name, or ", Setting("force", True))


class OutputError(LocalLLMError):
    """A file was not written. The old file is unchanged."""


class OutputFile:
    """A file being written. Raises OutputError if a write fails."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self.size = 0  # bytes written

    def write(self, data: Any) -> None:
        """Write bytes, or the bytes of an array."""
        with _system_errors(self._path):
            self.size += self._file.write(data)


def check_target(path: Path, overwrite: bool, reading: Iterable[str | os.PathLike[str]] = ()) -> None:
    """Raise OutputError if `path` cannot be written. The reasons: it exists and `overwrite` is False, it is not a
    regular file, its folder is missing, or it is one of the command's inputs in `reading`, under any name or link."""
    if os.fspath(path) == "-":
        raise OutputError("-: this output cannot go to stdout, because a file appears only when complete; name a file")
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise OutputError(f"no such folder: {path.parent}; create it first") from None
        return
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from None
    for each in reading:
        with suppress(OSError):  # an input that is not a file, such as a bundled model
            if path.samefile(each):
                raise OutputError(f"{path}: this file is being read; give the output another name")
    if path.is_dir():
        raise OutputError(f"{path}: is a folder; give the name of a file to write")
    if not overwrite:
        raise OutputError(Notice(f"{path}: ", _EXISTS))
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISLNK(found.st_mode):
        raise OutputError(f"{path}: is a device or a pipe, which cannot be replaced; give the name of a file")


def append_file(path: Path, data: bytes) -> None:
    """Append a record to a private file in one write, safely with concurrent appends; raise OutputError on failure."""
    with _system_errors(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _NOT_LINKED | _NO_WAIT, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "is not a regular file")
            os.write(descriptor, data)
        finally:
            os.close(descriptor)


@contextmanager
def new_file(path: Path, overwrite: bool = False, mode: int = 0o666, keep_mode: bool = True) -> Iterator[OutputFile]:
    """Yield a file that durably replaces `path` if the block ends without an exception. Otherwise the new file is
    removed.

    The permissions come from the replaced file. For a new file, or if `keep_mode` is False, they come from `mode` and
    the umask. Raises OutputError under the conditions of `check_target`, and if a write fails.
    """
    check_target(path, overwrite)
    with _system_errors(path):
        new = NewFile(path, mode)
    with new:
        yield OutputFile(path, new.file)
        check_target(path, overwrite)  # another process may have created the file in the meantime
        with _system_errors(path):
            if keep_mode:
                _keep_mode(path, new.file.fileno())
            try:
                new.commit(replace=overwrite)
            except FileExistsError:
                raise OutputError(Notice(f"{path}: ", _EXISTS)) from None


@contextmanager
def scratch(target: Path) -> Iterator[Path]:
    """Yield a hidden name in the folder of `target` for a temporary file, which is removed when the block ends."""
    sweep(target.parent)
    path = hidden_path(target.parent)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _keep_mode(path: Path, descriptor: int) -> None:
    with suppress(FileNotFoundError):
        found = os.lstat(path)
        if stat.S_ISREG(found.st_mode) and hasattr(os, "fchmod"):  # fchmod is missing on Windows before Python 3.13
            os.fchmod(descriptor, stat.S_IMODE(found.st_mode))


@contextmanager
def _system_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from None

"""Open untrusted paths safely: never block on a pipe, never read a device or a folder.

Opening a pipe blocks until it has a writer, and `/dev/zero` never ends. Every file is therefore opened without blocking
and checked before it is read. Links are followed unless refused. All packages may import this file.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
from pathlib import Path
from typing import NoReturn

_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOCTTY", 0)
_NO_WAIT: int = getattr(os, "O_NONBLOCK", 0)
_NO_LINK: int = getattr(os, "O_NOFOLLOW", 0)
MOST_TEXT = 1 << 30  # maximum bytes of a text
_KINDS = (
    (stat.S_ISDIR, errno.EISDIR, "is not a regular file but a folder"),
    (stat.S_ISFIFO, errno.EINVAL, "is not a regular file but a pipe"),
    (stat.S_ISSOCK, errno.EINVAL, "is not a regular file but a socket"),
    (stat.S_ISLNK, errno.ELOOP, "is a link, which is not followed"),
    (lambda _: True, errno.EINVAL, "is not a regular file but a device"),
)


class NotRegular(OSError):
    """A folder, pipe, socket, device or refused link. `strerror` names the kind."""


def open_regular(path: str | os.PathLike[str], own: bool = False) -> io.FileIO:
    """Open a regular file for reading. For anything else raise OSError, with the reason in `strerror`.

    `own` also refuses links, and files that belong to another user.
    """
    try:
        descriptor = os.open(path, _FLAGS | _NO_WAIT | (_NO_LINK if own else 0))
    except OSError:
        facts = os.stat(path, follow_symlinks=not own)
        if not stat.S_ISREG(facts.st_mode):  # a socket, or a link
            _refuse(path, facts)
        raise
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            _refuse(path, facts)
        if own and foreign(facts):
            raise OSError(errno.EACCES, "belongs to another user", os.fspath(path))
        return io.FileIO(descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: str | os.PathLike[str], most: int, own: bool = False) -> bytes:
    """Return the content of a regular file. Raise OSError as in `open_regular`, and if the file exceeds `most`
    bytes."""
    with open_regular(path, own) as file:
        return _read(file, path, most)


def read_given(path: str | os.PathLike[str], most: int) -> bytes:
    """Return the content of a file that the user named, which may be a pipe (`<(command)`, /dev/stdin) or /dev/null.

    Raises OSError for a folder, a socket, a pipe without a writer, and for more than `most` bytes.
    """
    try:
        return read_regular(path, most)
    except OSError:
        facts = os.stat(path)
        if not hasattr(os, "set_blocking") or not (stat.S_ISFIFO(facts.st_mode) or _harmless(path, facts)):
            raise
    descriptor = os.open(path, _FLAGS | _NO_WAIT)  # reading a pipe without a writer returns the end of file
    os.set_blocking(descriptor, True)
    with io.FileIO(descriptor) as file:
        return _read(file, path, most)


def read_text(path: str | os.PathLike[str], most: int = MOST_TEXT, errors: str = "replace") -> str:
    """Return the text of a file that the user named, with all line breaks as LF. Raise OSError as in `read_given`."""
    return read_given(path, most).decode("utf-8", errors).replace("\r\n", "\n").replace("\r", "\n")


def foreign(facts: os.stat_result) -> bool:
    """Return whether a file or folder belongs to another user. Always False on Windows, which has access lists
    instead."""
    return sys.platform != "win32" and facts.st_uid != os.geteuid()


def others_write(facts: os.stat_result) -> bool:
    """Return whether the mode lets other users write a file or folder. Always False on Windows, which has access
    lists."""
    if sys.platform == "win32":
        return False
    if facts.st_mode & stat.S_IWOTH:
        return True
    return bool(facts.st_mode & stat.S_IWGRP) and not _is_private_group(facts.st_gid)


def exposed(folder: Path) -> bool:
    """Return whether other users can delete this user's files in a folder, which is False if the folder is missing or
    sticky."""
    try:
        facts = os.stat(folder)
    except OSError:
        return False
    return others_write(facts) and not facts.st_mode & stat.S_ISVTX


def inside(path: Path, folder: Path) -> bool:
    """Return whether `path`, after following links, is in `folder`.

    For a snapshot in the Hugging Face cache, the model's `blobs` count as inside, since `snapshots/COMMIT/FILE` links
    to them.
    """
    real, root = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    return real.is_relative_to(root) or any(
        here.parent.name == "snapshots"
        and (here.parent.parent / "blobs").is_dir()
        and real.is_relative_to(here.parent.parent)
        for here in (root, *root.parents)
    )


def _is_private_group(group: int) -> bool:
    """Return whether a group is private: the user's primary group, named like the user and without other members."""
    import grp
    import pwd

    try:
        me, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return (
        me.pw_gid == group
        and found.gr_name == me.pw_name
        and set(found.gr_mem) <= {me.pw_name}
        and all(one.pw_uid == me.pw_uid for one in pwd.getpwall() if one.pw_gid == group)
    )


def _read(file: io.FileIO, path: str | os.PathLike[str], most: int) -> bytes:
    parts: list[bytes] = []
    left = most + 1 if os.fstat(file.fileno()).st_size <= most else 0
    while left and (part := file.read(min(left, 1 << 20))):
        parts.append(part)
        left -= len(part)
    if not left:
        raise OSError(errno.EFBIG, f"is larger than {most >> 20} MB", os.fspath(path))
    return b"".join(parts)


def _harmless(path: str | os.PathLike[str], facts: os.stat_result) -> bool:
    """Return whether a device is harmless: /dev/null, or the terminal on stdin."""
    if not stat.S_ISCHR(facts.st_mode):
        return False
    if facts.st_rdev == os.stat(os.devnull).st_rdev:
        return True
    return os.isatty(0) and facts.st_rdev == os.fstat(0).st_rdev


def _refuse(path: str | os.PathLike[str], facts: os.stat_result) -> NoReturn:
    number, reason = next((number, reason) for test, number, reason in _KINDS if test(facts.st_mode))
    raise NotRegular(number, reason, os.fspath(path))

"""Download one file to a partial file, which a later run can resume, and check it against the hub's checksum at the
end.

After an interruption huggingface_hub 2 starts from zero (its partial files have random names and are deleted), and it
checks sizes, not contents. This module therefore reads the bytes; the library does everything else.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from localllm.base.files.regular import open_regular
from localllm.base.printable import printable
from localllm.base.units import size
from localllm.hub.client import Hub, Interrupted, Listing, Remote
from localllm.hub.errors import StoreError

TRIES = 5  # consecutive attempts without a new byte, after which the download fails
_CHUNK = 1 << 20  # bytes per read when a partial file is hashed again


class FetchHooks(NamedTuple):
    """Callbacks for progress, messages, and the pause before a retry."""

    progress: Callable[[str, int, int], None]  # (file, bytes done, total bytes)
    tell: Callable[[str], None]  # shows a line
    wait: Callable[[float], None] = time.sleep  # sleeps for some seconds
    begin: Callable[[Remote], None] = lambda file: None  # called before a file is downloaded
    spare: int = 0  # bytes of disk space to leave free


class _Partial:
    """A partial file and the checksum of the bytes received so far."""

    def __init__(self, file: BinaryIO, wanted: Remote) -> None:
        self._file, self._wanted = file, wanted
        self.size = 0
        self._sum = self._new_sum()

    def _new_sum(self) -> hashlib._Hash:
        if len(self._wanted.digest) == 64:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self._wanted.size)  # git's object header

    def take_up(self) -> None:
        """Load the bytes that an earlier run received."""
        self._file.seek(0)
        while piece := self._file.read(_CHUNK):
            self._sum.update(piece)
            self.size += len(piece)

    def restart(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        self.size, self._sum = 0, self._new_sum()

    def append(self, at: int, piece: bytes) -> None:
        if at != self.size:
            self.restart()
        if self.size + len(piece) > self._wanted.size:
            raise StoreError(f"the server sends more than the {self._wanted.size} bytes of {self._wanted.path}")
        self._file.write(piece)
        self._sum.update(piece)
        self.size += len(piece)

    def keep(self) -> None:
        """Flush the content to disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def matches(self) -> bool:
        return self.size == self._wanted.size and self._sum.hexdigest() == self._wanted.digest


def fetch(hub: Hub, listing: Listing, wanted: Remote, blobs: Path, watch: FetchHooks) -> None:
    """Download a file to `blobs`, named by its checksum. On failure raise StoreError and keep the received bytes."""
    target, name = blobs / wanted.digest, wanted.path.rpartition("/")[2]
    blobs.mkdir(parents=True, exist_ok=True)
    partial = blobs / f"{wanted.digest}.incomplete"
    with _opened(partial) as file:
        part = _Partial(file, wanted)
        part.take_up()
        if part.size > wanted.size:
            part.restart()
        resumed = part.size
        check_room(blobs, wanted.size - part.size, watch.spare)
        watch.begin(wanted)
        if resumed:
            watch.tell(f"continuing {printable(name)} at {100 * resumed // max(1, wanted.size)} %")
        _read_all(hub, listing, wanted, part, watch)
        good = part.matches()
        if not good and resumed:
            watch.tell(f"the downloaded part of {printable(name)} is damaged; starting over")
            part.restart()
            _read_all(hub, listing, wanted, part, watch)
            good = part.matches()
        part.keep()
    if not good:
        raise _damaged(hub, wanted, partial)
    os.replace(partial, target)


def verify(hub: Hub, wanted: Remote, path: Path) -> None:
    """Delete a file that the library downloaded, and raise StoreError, if it does not match its checksum."""
    with io.BufferedReader(open_regular(path)) as file:
        part = _Partial(file, wanted)
        part.take_up()
    if not part.matches():
        raise _damaged(hub, wanted, path)


def _damaged(hub: Hub, wanted: Remote, path: Path) -> StoreError:
    path.unlink(missing_ok=True)
    return StoreError(
        f"{printable(wanted.path)} from {hub.host} does not match its checksum ({wanted.digest[:12]}...), so it was "
        "deleted; try again, or use another mirror (HF_ENDPOINT)"
    )


def _read_all(hub: Hub, listing: Listing, wanted: Remote, part: _Partial, watch: FetchHooks) -> None:
    """Read until the file is complete, resuming after lost connections."""
    name, failures, farthest = wanted.path.rpartition("/")[2], 0, part.size
    while part.size < wanted.size:
        try:
            for at, piece in hub.read(listing, wanted, part.size):
                part.append(at, piece)
                watch.progress(name, part.size, wanted.size)
            if part.size < wanted.size:
                raise Interrupted("the connection was closed")
        except Interrupted as reason:
            failures = 0 if part.size > farthest else failures + 1
            farthest = max(farthest, part.size)
            place = f"at {100 * part.size // wanted.size} % of {printable(name)}"
            if failures >= TRIES:
                raise StoreError(
                    f"{hub.host}: {reason} {place}, {TRIES} times in a row; run the same command to resume"
                ) from None
            seconds = 2**failures
            watch.tell(f"{reason} {place}; trying again in {seconds} s")
            watch.wait(seconds)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a partial file for reading and writing. Links are refused."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    flags |= getattr(os, "O_NONBLOCK", 0)  # a pipe is refused below
    try:
        descriptor = os.open(path, flags, 0o644)
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}") from None
    with open(descriptor, "r+b") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise StoreError(f"{path} is not a regular file; remove it")
        try:
            yield file
        except OSError as error:
            raise StoreError(f"{path} cannot be written: {error.strerror}; the downloaded part is kept") from None


def check_room(folder: Path, needed: int, spare: int = 0) -> None:
    """Raise StoreError if the disk has no room for `needed` more bytes, with `spare` bytes left free."""
    import shutil

    free = shutil.disk_usage(folder).free
    if needed and needed + spare > free:
        rest = f" ({size(spare)} must stay free)" if spare else ""
        raise StoreError(
            f"{size(needed)} are needed and {size(free)} are free in {folder}{rest}; HF_HUB_CACHE names another folder"
        )

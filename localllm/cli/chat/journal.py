"""Save conversations after every turn, to private files in the state folder, so that they survive a crash.

The pictures and sounds of NAME.json are in the folder NAME.media, named by their hash. The text is written first, so
that no other process takes the folder for an abandoned one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from errno import ELOOP
from pathlib import Path
from time import strftime
from typing import Any

from localllm import __version__
from localllm.base.files.outputs import OutputError, new_file
from localllm.base.files.regular import open_regular, read_regular
from localllm.cli.terminal.console import YELLOW, say
from localllm.loading.media_parts import Located
from localllm.saved.attachments import HASH, MOST_FILE, NOTHING, Attachments, Lost, restored

MOST = 20  # maximum number of conversations kept
_MOST_FILE = 64 << 20  # maximum number of bytes read
_ROLES = ("system", "user", "assistant")

Messages = Sequence[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Talked:
    """A saved conversation."""

    path: Path
    model: str
    messages: list[dict[str, str]]
    rows: Any = None  # of `localllm.saved.attachments`

    def attached(self) -> tuple[list[Located], list[str]]:
        """Return the pictures and sounds of the messages, and the problems of the others."""
        return restored(self.messages, [] if self.rows is None else self.rows, self._content)

    def _content(self, key: str) -> bytes:
        path = _media_of(self.path) / key
        try:
            if path.parent.is_symlink():
                raise Lost("its folder is a link, which is not followed")
            return read_regular(path, MOST_FILE, own=True)
        except FileNotFoundError:
            raise Lost("its content is missing") from None
        except OSError as error:
            raise Lost(f"its content cannot be read: {error.strerror or error}") from None


class Journal:
    """The file of a running chat. The first turn creates it. After `close`, the next turn starts a new file."""

    def __init__(self, folder: Path, model: str, going_on: Talked | None = None) -> None:
        self._folder, self._model = folder, model
        self._path = going_on.path if going_on is not None else None
        self._kept: tuple[Messages, Sequence[Located]] = (going_on.messages if going_on is not None else [], ())
        self._hashes: set[str] = set()  # of the contents in the file's folder
        self._seen = _written(self._path)
        self._failed = self._told = False  # whether the text cannot be written; whether contents could not be

    def began(self, messages: Messages, located: Sequence[Located], keys: set[str]) -> None:
        """Take over the content of the file, so that it is only written after a change. `keys` are its contents."""
        self._kept, self._hashes = (list(messages), list(located)), keys

    def keep(
        self,
        messages: Messages,
        located: Sequence[Located] = (),
        attachments: Callable[[], Attachments] = lambda: NOTHING,
    ) -> None:
        """Write the conversation if it has changed, or delete its file if it has no turns.

        A failure is reported once. If only contents cannot be written, the text is saved, and the next turn tries them
        again. A content that could not be read is not copied if the conversation moves to a new file: its row moves,
        and its content, if it is there after all, stays with the old file.
        """
        if self._failed or (messages, located) == self._kept:
            return
        changed = _written(self._path) != self._seen  # whether another chat has written the file
        if not any(message["role"] == "user" for message in messages):
            if self._path is not None and not changed:
                _remove(self._path)
            self.close()
            return
        if self._path is None or changed:
            self._path = self._folder / f"{strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{os.urandom(2).hex()}.json"
            self._hashes = set()
        found = attachments()
        record = {"program": __version__, "model": self._model, "messages": list(messages)}
        if found.rows:
            record["attachments"] = list(found.rows)
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            with new_file(self._path, overwrite=True, mode=0o600) as file:
                file.write(json.dumps(record).encode())
            self._seen = _written(self._path)
        except (OSError, OutputError) as error:
            self._failed = True
            say(f"note: the conversation cannot be saved: {error}", YELLOW)
            return
        try:
            self._sweep()
            self._keep_contents(_media_of(self._path), found)
        except (OSError, OutputError) as error:
            if not self._told:
                self._told = True
                say(f"note: the pictures and sounds of the conversation cannot be saved: {error}", YELLOW)
        self._kept = list(messages), list(located)

    def _keep_contents(self, folder: Path, found: Attachments) -> None:
        """Write new contents, and remove those that the conversation had and no longer needs."""
        if folder.is_symlink():
            raise OSError(ELOOP, f"{folder} is a link, which is not followed")
        for key in self._hashes - found.keys:
            (folder / key).unlink(missing_ok=True)
        self._hashes = found.keys
        if not found.keys:
            with suppress(OSError):
                folder.rmdir()  # unless it has contents that no row names
        if found.contents:
            folder.mkdir(mode=0o700, exist_ok=True)
        for key, content in found.contents.items():
            if _size(folder / key) != len(content):
                with new_file(folder / key, overwrite=True, mode=0o600, keep_mode=False) as file:
                    file.write(content)

    def close(self) -> None:
        """End this file. The next turn starts a new conversation."""
        self._path, self._kept, self._hashes = None, ([], ()), set()

    def _sweep(self) -> None:
        for path in _newest(self._folder)[MOST:]:
            with suppress(OSError):
                _remove(path)
        for folder in self._folder.glob("*.media"):
            with suppress(OSError):
                if not folder.with_suffix(".json").exists():
                    _empty(folder)


def _size(path: Path) -> int:
    try:
        return path.stat(follow_symlinks=False).st_size
    except OSError:
        return -1


def _media_of(path: Path) -> Path:
    """Return the folder with the contents of a conversation."""
    return path.with_suffix(".media")


def _remove(path: Path) -> None:
    """Delete a conversation with its contents."""
    path.unlink(missing_ok=True)
    with suppress(OSError):
        _empty(_media_of(path))


def _empty(folder: Path) -> None:
    """Delete a folder of contents, and nothing else that may be in it."""
    if not folder.is_symlink() and folder.is_dir():
        for each in folder.iterdir():
            if HASH.fullmatch(each.name) or each.name.startswith(".localllm-"):  # also of a killed process
                each.unlink()
        folder.rmdir()


def _written(path: Path | None) -> int:
    """Return the modification time of a file in nanoseconds, or 0 if it does not exist."""
    try:
        return path.stat().st_mtime_ns if path is not None else 0
    except OSError:
        return 0


def last(folder: Path) -> Talked | None:
    """Return the most recent conversation, or None if nothing is saved. Damaged files are skipped."""
    return next(_talked(folder), None)


def _talked(folder: Path) -> Iterator[Talked]:
    for path in _newest(folder):
        try:
            with open_regular(path, own=True) as file:
                record = json.loads(file.read(_MOST_FILE))
        except (OSError, ValueError, RecursionError):
            continue
        found = _checked(path, record)
        if found is not None:
            yield found


def _checked(path: Path, record: object) -> Talked | None:
    if not isinstance(record, dict) or not isinstance(record.get("model"), str):
        return None
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages:
        return None
    for message in messages:
        if not isinstance(message, dict) or set(message) != {"role", "content"} or message["role"] not in _ROLES:
            return None
        if not isinstance(message["content"], str):
            return None
    return Talked(path, record["model"], messages, record.get("attachments"))


def _newest(folder: Path) -> list[Path]:
    """Return the conversation files, most recent first."""
    found = []
    with suppress(OSError):
        for entry in os.scandir(folder):
            if entry.name.endswith(".json") and entry.is_file(follow_symlinks=False):
                found.append((entry.stat().st_mtime_ns, entry.path))
    return [Path(path) for _, path in sorted(found, reverse=True)]

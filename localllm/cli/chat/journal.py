"""Save conversations after every turn, to private files in the state folder, so that they survive a crash."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import strftime

from localllm import __version__
from localllm.base.files.outputs import OutputError, new_file
from localllm.base.files.regular import open_regular
from localllm.cli.terminal.console import YELLOW, say

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


class Journal:
    """The file of a running chat. The first turn creates it. After `close`, the next turn starts a new file."""

    def __init__(self, folder: Path, model: str, going_on: Talked | None = None) -> None:
        self._folder, self._model = folder, model
        self._path = going_on.path if going_on is not None else None
        self._kept: Messages = going_on.messages if going_on is not None else []
        self._seen = _written(self._path)
        self._failed = False

    def keep(self, messages: Messages) -> None:
        """Write the conversation if it has changed, or delete its file if it has no turns. A failure is reported
        once."""
        if self._failed or messages == self._kept:
            return
        changed = _written(self._path) != self._seen  # whether another chat has written the file
        if not any(message["role"] == "user" for message in messages):
            if self._path is not None and not changed:
                self._path.unlink(missing_ok=True)
            self.close()
            return
        if self._path is None or changed:
            self._path = self._folder / f"{strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{os.urandom(2).hex()}.json"
        record = {"program": __version__, "model": self._model, "messages": list(messages)}
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            with new_file(self._path, overwrite=True, mode=0o600) as file:
                file.write(json.dumps(record).encode())
            self._seen = _written(self._path)
            self._sweep()
        except (OSError, OutputError) as error:
            self._failed = True
            say(f"note: the conversation cannot be saved: {error}", YELLOW)
        self._kept = list(messages)

    def close(self) -> None:
        """End this file. The next turn starts a new conversation."""
        self._path, self._kept = None, []

    def _sweep(self) -> None:
        for path in _newest(self._folder)[MOST:]:
            with suppress(OSError):
                path.unlink()


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
    return Talked(path, record["model"], messages)


def _newest(folder: Path) -> list[Path]:
    """Return the conversation files, most recent first."""
    found = []
    with suppress(OSError):
        for entry in os.scandir(folder):
            if entry.name.endswith(".json") and entry.is_file(follow_symlinks=False):
                found.append((entry.stat().st_mtime_ns, entry.path))
    return [Path(path) for _, path in sorted(found, reverse=True)]

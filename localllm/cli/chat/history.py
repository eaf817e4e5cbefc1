"""The user's messages in earlier chats, for the line editor. A private file has a JSON string on every line."""

from __future__ import annotations

import json
from pathlib import Path

from localllm.base.files.outputs import OutputError, append_file, new_file
from localllm.base.files.regular import open_regular
from localllm.cli.terminal.console import YELLOW, say

MOST = 1000  # maximum number of messages kept
_MOST_TEXT = 20_000  # characters of one message; longer messages are not stored
_MOST_FILE = 4 << 20  # maximum number of bytes read


class HistoryFile:
    """Messages in a file, oldest first. A write error is reported once."""

    def __init__(self, path: Path) -> None:
        self._path, self._failed = path, False

    def messages(self) -> list[str]:
        """Return the newest messages, skipping invalid lines."""
        try:
            with open_regular(self._path, own=True) as file:
                size = file.seek(0, 2)
                file.seek(max(size - _MOST_FILE, 0))
                lines = file.read(_MOST_FILE).split(b"\n")
        except OSError:
            return []
        found = [text for line in lines if (text := _message(line))]
        if len(found) > 2 * MOST:
            self._shorten(found[-MOST:])
        return found[-MOST:]

    def add(self, text: str) -> None:
        """Append a message."""
        if not text.strip() or len(text) > _MOST_TEXT or self._failed:
            return
        try:
            append_file(self._path, _line(text))
        except OutputError as error:
            self._failed = True
            say(f"note: the message history cannot be saved: {error}", YELLOW)

    def _shorten(self, messages: list[str]) -> None:
        try:
            with new_file(self._path, overwrite=True, mode=0o600) as file:
                file.write(b"".join(map(_line, messages)))
        except OutputError:
            return  # the next call tries again


def _line(text: str) -> bytes:
    return json.dumps(text).encode() + b"\n"


def _message(line: bytes) -> str:
    try:
        text = json.loads(line)
    except (ValueError, RecursionError):
        return ""
    return text if isinstance(text, str) else ""

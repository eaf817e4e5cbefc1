"""Pictures and sounds of saved conversations: their places in the messages, and their content by hash.

The messages have names in brackets in these places, so earlier versions of localllm read them as well. Rows and
contents come from untrusted files: what does not fit is left out, and its name stays in the text.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from localllm.base.errors import LocalLLMError
from localllm.base.notices import Notice, said
from localllm.base.printable import printable
from localllm.loading.media_parts import KINDS, Absent, Located, Medium

Progress = Callable[[str, int, int], None]  # arguments: phase, number done, total
MOST_BYTES = 256 << 20  # maximum size of all contents of a conversation
MOST_FILE = 64 << 20  # maximum size of one
MOST_ROWS = 4096
_MOST_FRAMES = 2
_MOST_FAILED = 4  # failures after which further pictures and sounds of a file are not decoded
_SHOWN = 3  # maximum number of reasons in a note
HASH = re.compile(r"[0-9a-f]{64}")


class Attachments(NamedTuple):
    """The pictures and sounds of a conversation."""

    rows: Sequence[Mapping[str, Any]] = ()  # message, start, kind, name, files: the hashes of the contents
    contents: Mapping[str, bytes] = {}  # by SHA-256
    problems: Sequence[str] = ()  # why some are left out

    @property
    def keys(self) -> set[str]:
        """The hashes in the rows, also of contents that are absent."""
        return {key for row in self.rows for key in row["files"]}


NOTHING = Attachments()


class Lost(LocalLLMError):
    """A content is missing or damaged."""


def described(located: Sequence[Located], rate: int) -> Attachments:
    """Return pictures and sounds for a file. The oldest are left out beyond `MOST_BYTES`.

    Arrays of sounds have `rate` samples per second.
    """
    rows, contents, problems, total = list[dict[str, Any]](), dict[str, bytes](), [], 0
    for each in reversed(located):
        name, source = printable(each.medium.what, 100), each.medium.source
        row = {"message": each.message, "start": each.start, "kind": each.medium.kind, "name": each.medium.what}
        if len(rows) == MOST_ROWS:  # a file with more loses all
            problems.append(f"{name}: more than {MOST_ROWS} pictures and sounds cannot be saved")
            continue
        if isinstance(source, Absent):  # perhaps it can be read the next time
            rows.append({**row, "files": [*source.files]})
            continue
        try:
            files = each.medium.files(rate)
        except LocalLLMError as error:
            problems.append(said(error))
            continue
        hashes = [hashlib.sha256(data).hexdigest() for data in files]
        found = dict(zip(hashes, files, strict=True))
        size = sum(len(data) for key, data in found.items() if key not in contents)
        if total + size > MOST_BYTES or max(map(len, files)) > MOST_FILE:
            problems.append(f"{name}: too large to be saved")
            continue
        total += size
        contents |= found
        rows.append({**row, "files": hashes})
    return Attachments(rows[::-1], contents, problems[::-1])


def restored(
    messages: Sequence[Mapping[str, str]], rows: Any, read: Callable[[str], bytes]
) -> tuple[list[Located], list[str]]:
    """Return the pictures and sounds of a file whose places are good, and the problems of the others.

    `read` returns the content with a hash, or raises Lost.
    """
    if not isinstance(rows, list) or len(rows) > MOST_ROWS:
        return [], ["the list of pictures and sounds is damaged"]
    found, problems, contents, total = list[Located](), [], dict[str, bytes](), 0
    place = (0, 0)
    for row in rows:
        each = _row(messages, row, place)
        if each is None:
            problems.append("a row of the list of pictures and sounds is damaged")
            continue
        place = each.message, each.start + len(each.text)
        try:
            for key in row["files"]:
                if key not in contents:
                    contents[key] = _read(key, read, MOST_BYTES - total)
                    total += len(contents[key])
            frames = [contents[key] for key in row["files"]]
            source: Any = frames[0] if len(frames) == 1 else frames
        except Lost as error:
            source = Absent(tuple(row["files"]), said(error))
        found.append(Located(each.message, each.start, Medium(each.medium.kind, source, each.medium.name)))
    return found, problems


class ContextCheck:
    """Decodes the pictures and sounds of a file, the newest first, and counts their tokens.

    It refuses further ones, without decoding them, once they fill the context or several have failed. If one
    has more tokens than the context, it counts as failed, and leaves the room to the others. So a hostile file takes no
    more time than the pictures of one full context and a few that fail. That may be minutes: `progress` shows how many
    are decoded, and Ctrl-C stops it.
    """

    def __init__(
        self, tokens: Callable[[Medium], int], context: int, count: int, progress: Progress | None = None
    ) -> None:
        """`count` is the number of pictures and sounds to check."""
        self._tokens, self._context, self._room = tokens, context, context
        self._failed: list[str] = []
        self._count, self._done, self._progress = count, 0, progress

    def __call__(self, medium: Medium) -> None:
        what = printable(medium.what, 100)
        if self._progress is not None:
            self._progress("decoding pictures and sounds", self._done, self._count)
        self._done += 1
        if len(self._failed) == _MOST_FAILED:
            raise LocalLLMError(f"{what}: not decoded, because {_MOST_FAILED} others failed; {self._failed[0]}")
        full = f"{what}: newer pictures and sounds fill the context of {self._context} tokens"
        if self._room <= 0:
            raise LocalLLMError(full)
        try:
            tokens = self._tokens(medium)
        except LocalLLMError as error:
            self._failed.append(said(error))
            raise
        if tokens >= self._context:
            self._failed.append(f"{what}: has {tokens} tokens, and the context has {self._context}")
            raise LocalLLMError(self._failed[-1])
        self._room -= tokens
        if self._room <= 0:
            raise LocalLLMError(full)


def unread(located: Sequence[Located]) -> list[str]:
    """Return why the contents of pictures and sounds cannot be copied to another file."""
    media = [each.medium for each in located]
    return [f"{printable(each.what, 100)}: {each.source.reason}" for each in media if isinstance(each.source, Absent)]


def left_out(problems: Sequence[str], how: str = "kept as a name only") -> Notice:
    """Return one line about pictures and sounds that the model does not get, or that a file does not have."""
    what = "one picture or sound is" if len(problems) == 1 else f"{len(problems)} pictures and sounds are"
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    shown = [part for problem in problems[:_SHOWN] for part in ("; ", problem)]
    return Notice(f"{what} {how}: ", *shown[1:], more)


def _row(messages: Sequence[Mapping[str, str]], row: Any, place: tuple[int, int]) -> Located | None:
    """Return the place of a row, with a medium without content; None if it does not fit the messages."""
    if not isinstance(row, dict):
        return None
    message, start, kind, name, files = (row.get(key) for key in ("message", "start", "kind", "name", "files"))
    if type(message) is not int or type(start) is not int or kind not in KINDS or not isinstance(name, str) or not name:
        return None
    if not isinstance(files, list) or not 0 < len(files) <= _MOST_FRAMES:
        return None
    if not all(isinstance(key, str) and HASH.fullmatch(key) for key in files):
        return None
    if start < 0 or (message, start) < place or not message < len(messages):
        return None
    each = Located(message, start, Medium(kind, None, name))
    return each if messages[message]["content"].startswith(each.text, start) else None


def _read(key: str, read: Callable[[str], bytes], room: int) -> bytes:
    data = read(key)
    if hashlib.sha256(data).hexdigest() != key:
        raise Lost("its content is damaged")
    if len(data) > min(room, MOST_FILE):
        raise Lost("too large")
    return data

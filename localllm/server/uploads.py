"""Pictures and sounds in requests: data URLs, base64 and, if the operator allows them, files and URLs.

The API packages make an `Upload` of each; `Uploads` replaces it by the bytes of the file before the prompt is made.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote
from weakref import WeakValueDictionary

from localllm.base.files.regular import read_regular
from localllm.base.notices import Notice, Setting, said
from localllm.base.printable import printable
from localllm.loading.media_parts import placed_media
from localllm.media import MediaError
from localllm.server.accounts import ACCOUNT
from localllm.server.bridge import in_daemon
from localllm.server.errors import BadRequest
from localllm.server.media_urls import fetch
from localllm.server.turn import REQUEST, Completion, Json, Turn

AT_ONCE = 8  # maximum number of files that are fetched at the same time
AT_ONCE_EACH = 2  # and of one account, so that slow URLs of one client do not delay the others
_PIECE = 1 << 18  # characters of base64 that are decoded at once
_BLANK = b" \t\r\n\v\f"
MOST = 256  # maximum number of pictures and sounds in a request


@dataclass(frozen=True, slots=True, eq=False)
class Upload:
    """A picture or a sound: a data URL, base64, an http(s) URL, or a file URL."""

    kind: Literal["image", "audio"]
    given: str

    @property
    def part(self) -> Json:
        """The part of a message that holds it."""
        return {"type": self.kind, self.kind: self}


@dataclass(frozen=True, slots=True)
class UploadRules:
    """Where pictures and sounds may come from, besides the request itself."""

    urls: bool = False  # http and https, at public addresses
    folder: Path | None = None  # file URLs, relative to this folder
    bytes: int = 32 << 20  # maximum size of the files of a request together
    seconds: float = 10.0  # to fetch a file


class Uploads:
    """Gets the bytes of the pictures and sounds of requests, in threads."""

    def __init__(self, rules: UploadRules | None = None) -> None:
        self._rules = rules or UploadRules()
        self._fetching = asyncio.Semaphore(AT_ONCE)
        self._accounts: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def of_turn(self, turn: Turn) -> Turn:
        """Return a turn with the bytes of its pictures and sounds. Raises BadRequest for an unusable file."""
        return await replaced(turn, Upload, self._of_parts)

    async def of_completion(self, completion: Completion) -> Completion:
        """Return a completion with the bytes of its pictures and sounds."""
        if not completion.media:
            return completion
        uploads = list(completion.media)
        names = [f"file {number} of {REQUEST}" for number in range(1, len(uploads) + 1)]  # its content is the kind
        return replace(completion, media=tuple(await self._all(uploads, names)))

    async def _of_parts(self, parts: Sequence[Json]) -> list[bytes]:
        uploads = [part[part["type"]] for part in parts]
        named = placed_media(uploads, REQUEST, [part["type"] for part in parts])
        return await self._all(uploads, [each.place for each in named])

    async def _all(self, uploads: Sequence[Upload], names: Sequence[str]) -> list[bytes]:
        if len(uploads) > MOST:
            raise BadRequest(f"the request has {len(uploads)} pictures and sounds; the limit is {MOST}", "messages")
        found, left = list[bytes](), self._rules.bytes
        for upload, name in zip(uploads, names, strict=True):
            if left <= 0:
                raise BadRequest(f"the files of the request have more than {self._rules.bytes} bytes", "messages")
            try:
                found.append(await self._bytes(upload.given, left))
            except BadRequest as error:
                raise BadRequest(Notice(f"{name}: ", said(error)), error.param) from None
            left -= len(found[-1])
        return found

    async def _bytes(self, given: str, most: int) -> bytes:
        """Return the content of a file, which a URL may not make larger than `most` bytes."""
        scheme = given[:8].partition(":")[0].lower() if ":" in given[:8] else ""
        if scheme in ("http", "https"):
            if not self._rules.urls:
                problem = "this server fetches no URLs; send the file itself as a data URL, or start it with "
                raise BadRequest(Notice(problem, Setting("allow_media_urls")), "url")
            own = self._accounts.setdefault(ACCOUNT.get(), asyncio.Semaphore(AT_ONCE_EACH))
            async with own, self._fetching:
                try:  # not to_thread, whose few threads decode the data URLs of others
                    return await in_daemon(partial(fetch, given, most, self._rules.seconds), lambda unwanted: None)
                except MediaError as error:
                    raise BadRequest(str(error), "url") from None
        if scheme == "file":
            return await asyncio.to_thread(self._file, given[5:], most)
        return await asyncio.to_thread(decoded, given)

    def _file(self, path: str, most: int) -> bytes:
        """Return the content of a file in the operator's folder. All problems look alike, so that no one can probe."""
        folder = self._rules.folder
        if folder is None:
            problem = "this server reads no files; send the file itself as a data URL, or start it with "
            raise BadRequest(Notice(problem, Setting("media_path")), "url")
        try:
            root = folder.resolve(strict=True)
            found = (root / unquote(path).lstrip("/")).resolve(strict=True)
            if not found.is_relative_to(root):
                raise ValueError
            return read_regular(found, most)
        except (OSError, ValueError, RuntimeError):
            raise BadRequest("no such file in the server's media folder; give its path relative to it", "url") from None


async def replaced(turn: Turn, wanted: type, change: Callable[[list[Json]], Awaitable[Sequence[Any]]]) -> Turn:
    """Return a turn in which `change` has replaced the pictures and sounds of type `wanted`. It gets their parts."""
    found = [part for message in turn.messages for part in _parts(message) if isinstance(_medium(part), wanted)]
    if not found:
        return turn
    made = {id(part): {**part, part["type"]: data} for part, data in zip(found, await change(found), strict=True)}
    messages = [
        {**message, "content": [made.get(id(part), part) for part in message["content"]]}
        if _parts(message)
        else message
        for message in turn.messages
    ]
    return replace(turn, messages=messages)


def decoded(given: str) -> bytes:
    """Return the bytes of a data URL or of base64; raise BadRequest for anything else."""
    whole = given
    if given[:5].lower() == "data:":
        head, comma, body = given.partition(",")
        if not comma or not head.lower().rstrip().endswith(";base64"):
            raise BadRequest("expected a data URL such as data:image/png;base64,...", "url")
        given = body
    try:
        found = _unpacked(given)
    except (ValueError, binascii.Error):  # a UnicodeEncodeError is a ValueError
        if given is not whole:
            raise BadRequest("the base64 text of the data URL is damaged; send all of it", "url") from None
        shown = printable(given[:30], None)
        raise BadRequest(f"expected base64 or a data URL, got {shown!r}", "url") from None
    if not found:
        raise BadRequest("is empty; send the content of a file", "url")
    return found


def _unpacked(text: str) -> bytes:
    """Return the bytes of base64, which may have blanks; raise ValueError if it is damaged.

    Piece by piece, because a large text at once would stop the other threads for a quarter of a second.
    """
    found, held, padded = bytearray(), b"", False
    for at in range(0, len(text), _PIECE):
        held += text[at : at + _PIECE].encode("ascii").translate(None, _BLANK)
        if held and padded:
            raise ValueError("more after the padding")
        whole = held[: len(held) // 4 * 4]
        found += base64.b64decode(whole, validate=True)
        held, padded = held[len(whole) :], padded or whole.endswith(b"=")
    if held:
        raise ValueError("incomplete")
    return bytes(found)


def _parts(message: Mapping[str, Any]) -> Sequence[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else ()


def _medium(part: Any) -> Any:
    return part.get(part.get("type")) if isinstance(part, dict) else None

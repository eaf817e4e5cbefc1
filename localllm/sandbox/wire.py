"""Messages between `Confined` and its child process, in both directions: a number, a length, and JSON of that length.

An entry "bytes" of the JSON object gives the length of raw data that follow it, such as pixels. The receiver finds the
data under `BLOB`.

The number is random and new for each request, and the reply must carry it. A reply is untrusted: its size, the number
of its values and their depth are checked before it is parsed, in time and memory proportional to its bytes.
"""

from __future__ import annotations

import json
import struct
from typing import Any, BinaryIO

NUMBER = 16  # bytes
HEAD = struct.Struct(f"<{NUMBER}sQ")  # the number of the request, and the length in bytes
BLOB = "blob"  # key of the raw data in requests and answers
_OUTSIDE = bytes(set(range(256)) - set(b"[]{},"))  # removed by `_check_cost`


class BadReply(Exception):
    """The child sent something other than the reply to the request."""


class ReplyTooLarge(Exception):
    """The reply is larger than allowed."""


def with_blob(message: dict[str, Any]) -> tuple[bytes, bytes]:
    """Return the JSON of a message, and the raw data in its request or answer."""
    for name in ("request", "answer"):
        if isinstance(inner := message.get(name), dict) and BLOB in inner:
            blob = inner[BLOB]
            plain = {key: value for key, value in inner.items() if key != BLOB}
            return json.dumps(message | {name: plain, "bytes": len(blob)}).encode(), blob
    return json.dumps(message).encode(), b""


def read_reply(stream: BinaryIO, number: bytes, most: int, values: int, depth: int) -> dict[str, Any] | None:
    """Return the JSON object of the reply with this number, or None at the end of the stream.

    Raises ReplyTooLarge above `most` bytes or `values` JSON values, and BadReply for anything except the reply.
    """
    head = stream.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    carried, length = HEAD.unpack(head)
    if carried != number:
        raise BadReply("its process sends an unexpected message")
    if length > most:
        raise ReplyTooLarge(f"its reply exceeds {most >> 20} MB")
    text = stream.read(length)
    if len(text) < length:
        return None
    _check_cost(text, values, depth)
    try:
        reply = json.loads(text)
    except (ValueError, RecursionError):  # not UTF-8, not JSON, or a number with too many digits
        raise BadReply("its process sends invalid JSON") from None
    if not isinstance(reply, dict):
        raise BadReply("its process sends an invalid reply")
    if "bytes" not in reply:
        return reply
    if type(size := reply.pop("bytes")) is not int or size < 0 or not isinstance(reply.get("answer"), dict):
        raise BadReply("its process sends an invalid reply")
    if size > most - length:
        raise ReplyTooLarge(f"its reply exceeds {most >> 20} MB")
    if (blob := _read_exactly(stream, size)) is None:
        return None
    reply["answer"][BLOB] = blob
    return reply


def _read_exactly(stream: BinaryIO, size: int) -> bytearray | None:
    """Return `size` bytes without a second copy, or None if the stream ends before."""
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        if not (count := stream.readinto(view[done:])):  # type: ignore[attr-defined]
            return None
        done += count
    return data


def _check_cost(text: bytes, values: int, depth: int) -> None:
    """Limit the number of values and their depth. Brackets and commas in strings are ignored."""
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"")  # without escaped quotes
    parts = plain.split(b'"', 4 * values + 1)  # a value has at most two strings, its name and itself
    marks = b"".join(parts[::2]).translate(None, _OUTSIDE)
    if len(parts) > 4 * values + 1 or len(marks) > 3 * values:
        raise ReplyTooLarge(f"its reply has more than {values} values")
    level = 0
    for mark in marks.translate(None, b","):
        level += 1 if mark in b"[{" else -1
        if level > depth:
            raise ReplyTooLarge(f"its reply is nested more than {depth} levels deep")


def read_request(stream: BinaryIO) -> tuple[bytes, dict[str, Any]] | None:
    """Return the number and the JSON object of the next request, or None at the end of the stream."""
    head = stream.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    number, length = HEAD.unpack(head)
    message: dict[str, Any] = json.loads(stream.read(length))
    if "bytes" in message:
        message["request"][BLOB] = _read_exactly(stream, message["bytes"])
    return number, message

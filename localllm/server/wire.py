"""Encode JSON to bytes: as a response body, a server-sent event, or a line."""

from __future__ import annotations

import json
from typing import Any

import msgspec

PING = b": keep-alive\n\n"  # a comment, which clients of event streams skip


def dumps(value: Any) -> bytes:
    """Return JSON on one line. Lone surrogates are replaced; NaN and infinities become null."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
        return json.dumps(finite, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def frame(data: Any, event: str = "") -> bytes:
    """Return a server-sent event, with its name if it has one."""
    head = f"event: {event}\n".encode() if event else b""
    return head + b"data: " + dumps(data) + b"\n\n"


def typed_frame(data: Any) -> bytes:
    """Return a server-sent event that has its `type` as its name."""
    return frame(data, data["type"])


def line(data: Any) -> bytes:
    """Return a line of a JSON lines stream."""
    return dumps(data) + b"\n"

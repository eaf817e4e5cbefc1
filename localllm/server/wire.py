"""Bytes of JSON: what is sent as a body, as an event of a stream, and as a line."""

from __future__ import annotations

import json
import math
from typing import Any

PING = b": keep-alive\n\n"  # a comment: clients of event streams skip it


def dumps(value: Any) -> bytes:
    """JSON on one line. Lone surrogates (halves of characters) are replaced; NaN and infinities are null."""
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def _finite(value: Any) -> Any:
    match value:
        case dict():
            return {name: _finite(item) for name, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case float():
            return value if math.isfinite(value) else None
    return value


def frame(data: Any, event: str = "") -> bytes:
    """An event of a stream (SSE), with its name if it has one."""
    head = f"event: {event}\n".encode() if event else b""
    return head + b"data: " + dumps(data) + b"\n\n"


def line(data: Any) -> bytes:
    """A line of a stream of JSON lines."""
    return dumps(data) + b"\n"

"""Encode JSON to bytes: as a response body, a server-sent event, or a line."""

from __future__ import annotations

import json
import math
from typing import Any

PING = b": keep-alive\n\n"  # a comment, which clients of event streams skip


def dumps(value: Any) -> bytes:
    """Return JSON on one line. Lone surrogates are replaced; NaN and infinities become null."""
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
    """Return a server-sent event, with its name if it has one."""
    head = f"event: {event}\n".encode() if event else b""
    return head + b"data: " + dumps(data) + b"\n\n"


def line(data: Any) -> bytes:
    """Return a line of a JSON lines stream."""
    return dumps(data) + b"\n"

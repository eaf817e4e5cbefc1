"""The task of a compromised child process: it sends the bytes in its request, bypassing the worker code."""

from __future__ import annotations

import base64
import os
from typing import Any

from localllm.sandbox.wire import NUMBER
from tests.localllm.sandbox.attacks import _number, _write


def prepare() -> None:
    """Nothing to prepare."""


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Write the raw messages in `request["send"]` and exit. Without them, or after several, return normally."""
    if "send" not in request:
        return {"number": request["number"]}
    for part in request["send"]:
        numbered, data = part and base64.b64decode(part)[0], base64.b64decode(part)[1:]
        _write((_number() + data[NUMBER:]) if numbered and len(data) >= NUMBER else data)
    if len(request["send"]) > 1:
        return {"sent": len(request["send"])}
    os._exit(0)

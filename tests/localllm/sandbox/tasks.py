"""A confined task that performs a requested action, for tests of the child process."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

from localllm.sandbox import BLOB


def prepare() -> None:
    """Do nothing: the task needs no preparation."""


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Perform `request["do"]` with the argument `request["n"]`."""
    n = request.get("n", 0)
    match request["do"]:
        case "echo":
            return {"n": n}
        case "pid":
            return {"pid": os.getpid()}
        case "spin":
            while True:
                pass
        case "sleep":
            time.sleep(n)
        case "fill":
            return {"n": len(bytearray(n))}
        case "say":
            return {"text": "x" * n}
        case "die":
            os.kill(os.getpid(), n)
        case "leave":
            os._exit(n)
        case "reverse":
            return {"n": n, BLOB: bytes(request[BLOB])[::-1]}
        case "print":
            print("noise")
        case "open":
            return {"problem": _problem(lambda: Path(__file__).read_bytes())}
        case "write":
            return {"problem": _problem(lambda: os.write(os.memfd_create("x"), b"x"))}
        case "connect":
            return {"problem": _problem(socket.socket)}
        case "raise":
            raise ValueError("a bug")
    return {}


def _problem(do: Any) -> str:
    try:
        do()
    except OSError as error:
        return type(error).__name__
    return ""

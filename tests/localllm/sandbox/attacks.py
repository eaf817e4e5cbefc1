"""A confined task that simulates exploited template code: it tries an attack, or sends a hostile reply."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from localllm.sandbox.wire import HEAD

resource: Any
try:
    import resource
except ImportError:  # the module does not exist on Windows
    resource = None

_PARENT = os.getppid()  # read at import, because the sandbox refuses the call later


def prepare() -> None:
    """Do nothing: the task needs no preparation."""


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Try the requested attack in the requested folder, or send the requested hostile reply."""
    if (reply := request.get("reply")) is not None:
        _send(reply)
    try:
        return {"done": repr((ATTACKS | HARMLESS)[request["attack"]](Path(request["folder"])))}
    except (OSError, RuntimeError, ValueError) as error:
        return {"refused": repr(error)}


def _call(name: str, *arguments: Any) -> int:
    """Call a C library function directly, without Python's checks."""
    library = ctypes.CDLL(None, use_errno=True)
    if (result := getattr(library, name)(*arguments)) < 0:
        raise OSError(ctypes.get_errno(), name)
    return int(result)


def _run() -> None:
    os.execv("/bin/true", ["true"])


def _code() -> int:
    return mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC).write(b"\xc3")


def _fill(_: Path) -> int:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return len(bytearray(8 << 30))


ATTACKS: dict[str, Callable[[Path], Any]] = {
    "read": lambda folder: (folder / "victim").read_bytes(),
    "write": lambda folder: os.open(folder / "new", os.O_CREAT | os.O_WRONLY),
    "truncate": lambda folder: os.truncate(folder / "victim", 0),
    "rename": lambda folder: os.rename(folder / "victim", folder / "gone"),
    "remove": lambda folder: os.unlink(folder / "victim"),
    "link": lambda folder: os.symlink("/etc/passwd", folder / "link"),
    "make a folder": lambda folder: os.mkdir(folder / "made"),
    "change a mode": lambda folder: os.chmod(folder / "victim", 0o777),
    "list": lambda folder: os.listdir(folder),
    "look": lambda folder: os.stat(folder / "victim").st_size,
    "fork": lambda _: os.fork(),
    "run a program": lambda _: _run(),
    "signal the parent": lambda _: os.kill(_PARENT, 0),
    "signal by the C library": lambda _: _call("tgkill", _PARENT, _PARENT, 0),
    "open a socket": lambda _: socket.socket(),
    "open a local socket": lambda _: socket.socketpair(),
    "trace the parent": lambda _: _call("ptrace", 16, _PARENT, None, None),
    "raise the limit of files": lambda _: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
    "raise the limit of memory": _fill,
    "run its own code": lambda _: _code(),
    "gain rights": lambda _: os.setuid(0) or os.chroot("/"),
}
HARMLESS: dict[str, Callable[[Path], Any]] = {"nothing": lambda _: None, "environment": lambda _: dict(os.environ)}


def _number() -> bytes:
    """Return the current request's id, found in the worker's frame."""
    frame = sys._getframe()
    while "number" not in frame.f_locals:
        assert frame.f_back is not None
        frame = frame.f_back
    return bytes(frame.f_locals["number"])


def _send(reply: str) -> None:
    """Write a reply directly to the pipe. All replies except "unnumbered" have the correct request id."""
    number, texts = _number(), {
        "junk": b"junk!",
        "deep": b"[" * 3_000_000,
        "deep object": b'{"answer":' * 500 + b"1" + b"}" * 500,
        "list": b"[]",
        "text": b'"answer"',
        "empty object": b"{}",
        "an answer that is a list": b'{"answer": []}',
        "digits": b'{"answer": ' + b"1" * 5000 + b"}",
        "not UTF-8": b'"\xff\xfe"',
        "raw data without an answer": b'{"bytes": 5}',
        "negative raw data": b'{"answer": {}, "bytes": -5}',
        "raw data of a text": b'{"answer": {}, "bytes": "5"}',
        "raw data of true": b'{"answer": {}, "bytes": true}',
        "huge raw data": b'{"answer": {}, "bytes": 9223372036854775807}',
        "missing raw data": b'{"answer": {}, "bytes": 1000}',
        "many lists": b"[" + b"[]," * 1_000_000 + b"[]]",
        "many texts": b"[" + b'"",' * 1_000_000 + b'""]',
        "many quotes": b'"' + b'\\"' * 1_000_000,
    }  # fmt: skip
    match reply:
        case "huge":
            _write(HEAD.pack(number, 2**63))
        case "short":
            _write(HEAD.pack(number, 100) + b"{}")
        case "extra":  # a second message, which would be read as the reply to the next call
            data = b'{"answer": {"forged": true}}'
            _write(HEAD.pack(number, 16) + b'{"answer": {}}  ' + HEAD.pack(number, len(data)) + data)
            return
        case "unnumbered":
            _write(HEAD.pack(bytes(16), 14) + b'{"answer": {}}')
        case "trickle":
            _write(b"\0")
            time.sleep(60)
        case "closed":
            os.close(1)
            time.sleep(60)
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case _:
            _write(HEAD.pack(number, len(texts[reply])) + texts[reply])
    os._exit(0)


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data[:65536]) :]

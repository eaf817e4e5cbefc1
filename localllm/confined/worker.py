"""The child's side of `Confined`: load one task, drop all unneeded rights, and answer requests until the input ends."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from io import FileIO
from types import ModuleType
from typing import Any, BinaryIO

from localllm.confined.process import LENGTH, ResourceLimits

try:
    import resource as _resource
except ImportError:  # Windows: only the parent limits the time
    resource: ModuleType | None = None
else:
    resource = _resource

Answer = Callable[[dict[str, Any]], dict[str, Any]]
_USUAL_SIZE = 64 << 20  # initial address space of a child in bytes, if the system does not report it
_PAGE = resource.getpagesize() if resource else 4096


def main(start: Mapping[str, Any]) -> None:
    """Serve `start["task"]` over stdin and stdout."""
    limits = ResourceLimits(**start["limits"])
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # reserved for answers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    task = import_module(start["task"])
    task.prepare()
    answer: Answer = task.answer
    fence = _Fence(limits)
    while (request := _read(requests)) is not None:
        with fence:
            data = _answered(answer, request, limits)
        answers.write(LENGTH.pack(len(data)) + data)
        answers.flush()


def _read(stream: BinaryIO) -> dict[str, Any] | None:
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    request: dict[str, Any] = json.loads(stream.read(LENGTH.unpack(head)[0]))
    return request


def _answered(answer: Answer, request: dict[str, Any], limits: ResourceLimits) -> bytes:
    try:
        data = json.dumps(answer(request)).encode()
        problem = f"it makes more than {limits.answer >> 20} MB" if len(data) > limits.answer else ""
    except MemoryError:
        problem = f"it needs more than {limits.memory >> 20} MB of memory"
    return json.dumps({"limit": problem}).encode() if problem else data


class _Fence:
    """Limits time and memory while entered. Creating it forbids new files, sockets, processes and core dumps."""

    def __init__(self, limits: ResourceLimits) -> None:
        self._limits = limits
        self._sizes: FileIO | None = None
        with suppress(OSError):
            self._sizes = FileIO("/proc/self/statm")
        for name in ("RLIMIT_NOFILE", "RLIMIT_FSIZE", "RLIMIT_NPROC", "RLIMIT_CORE"):
            if resource and hasattr(resource, name):
                resource.setrlimit(getattr(resource, name), (0, 0))

    def __enter__(self) -> None:
        self._time(self._limits.seconds)
        self._memory(self._mapped() + self._limits.memory)

    def __exit__(self, *_: object) -> None:
        self._time(0)
        self._memory(-1)

    def _time(self, seconds: float) -> None:
        """Limit processor time from now on; SIGPROF, which nobody handles, then ends the process."""
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_PROF, seconds)

    def _memory(self, size: int) -> None:
        """Limit the address space of this process in bytes; -1: no limit of ours."""
        if resource:
            most = resource.getrlimit(resource.RLIMIT_AS)[1]
            if size == -1 or -1 < most < size:
                size = most
            with suppress(OSError, ValueError):  # a system without this limit
                resource.setrlimit(resource.RLIMIT_AS, (size, most))

    def _mapped(self) -> int:
        """Return the address space in use now, in bytes."""
        if self._sizes is None:
            return _USUAL_SIZE
        self._sizes.seek(0)
        return int(self._sizes.read(64).split()[0]) * _PAGE

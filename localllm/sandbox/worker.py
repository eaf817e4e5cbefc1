"""The child side of `Confined`: load one task, drop all unneeded rights, and answer requests until the input ends."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from io import FileIO
from types import ModuleType
from typing import Any

from localllm.sandbox.process import ResourceLimits
from localllm.sandbox.rights import drop_rights, filter_calls
from localllm.sandbox.wire import HEAD, read_request, with_blob

try:
    import resource as _resource
except ImportError:  # on Windows only the parent limits the time
    resource: ModuleType | None = None
else:
    resource = _resource

Answer = Callable[[dict[str, Any]], dict[str, Any]]
_USUAL_SIZE = 64 << 20  # initial address space of a child in bytes, if the system does not report it
_CEILING = 4  # address space that no call exceeds, in multiples of the memory limit
_PAGE = resource.getpagesize() if resource else 4096


def main(start: Mapping[str, Any]) -> None:
    """Serve `start["task"]` over stdin and stdout."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # stdout is reserved for answers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    task = import_module(start["task"])
    task.prepare()
    answer: Answer = task.answer
    fence = _Fence(ResourceLimits(**start["limits"]))
    while (message := read_request(requests)) is not None:
        number, asked = message
        limits = ResourceLimits(**asked["limits"])
        if asked["request"] is None:
            data, blob = json.dumps({"answer": {"rights": fence.rights}}).encode(), b""
        else:
            with fence.limited(limits):
                data, blob = _answered(answer, asked.pop("request"), limits)
        answers.write(HEAD.pack(number, len(data)) + data)
        answers.write(blob)
        del blob
        answers.flush()


def _answered(answer: Answer, request: dict[str, Any], limits: ResourceLimits) -> tuple[bytes, bytes]:
    """Return the JSON of the answer, and its raw data."""
    try:
        data, blob = with_blob({"answer": answer(request)})
    except MemoryError:
        return b'{"limit": "memory"}', b""
    return (data, blob) if len(data) + len(blob) <= limits.answer else (b'{"limit": "answer"}', b"")


class _Fence:
    """Limits the time and memory of calls. Creating it irrevocably forbids files, sockets, processes and core dumps."""

    def __init__(self, limits: ResourceLimits) -> None:
        self._sizes: FileIO | None = None
        with suppress(OSError):
            self._sizes = FileIO("/proc/self/statm")
        for name in ("RLIMIT_FSIZE", "RLIMIT_NPROC", "RLIMIT_CORE"):
            if resource and hasattr(resource, name):
                resource.setrlimit(getattr(resource, name), (0, 0))
        self._most = self._mapped() + _CEILING * limits.memory
        if resource:
            with suppress(OSError, ValueError):  # a system without this limit, or with a lower limit
                resource.setrlimit(resource.RLIMIT_AS, (self._most, self._most))
        self.rights = drop_rights()  # before files are forbidden, because this opens one
        if resource and hasattr(resource, "RLIMIT_NOFILE"):
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
        self.rights += filter_calls()  # forbids setting other limits

    @contextmanager
    def limited(self, limits: ResourceLimits) -> Iterator[None]:
        self._time(limits.seconds)
        self._memory(self._mapped() + limits.memory)
        try:
            yield
        finally:
            self._time(0)
            self._memory(self._most)

    def _time(self, seconds: float) -> None:
        """Limit the CPU time from now on. SIGPROF then ends the process."""
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_PROF, seconds)

    def _memory(self, size: int) -> None:
        """Limit the address space of this process in bytes."""
        if resource:
            most = resource.getrlimit(resource.RLIMIT_AS)[1]
            with suppress(OSError, ValueError):  # a system without this limit
                resource.setrlimit(resource.RLIMIT_AS, (size if most == -1 else min(size, most), most))

    def _mapped(self) -> int:
        """Return the address space now in use, in bytes."""
        if self._sizes is None:
            return _USUAL_SIZE
        self._sizes.seek(0)
        return int(self._sizes.read(64).split()[0]) * _PAGE

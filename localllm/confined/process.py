"""`Confined`: run a task in a child process, with limits on time, memory and the size of its answer.

We first tried to meter inside this process. That requires the cost of everything in Python, and anything missed (a
tuple nested 400,000 deep and then hashed) kills the program. The operating system misses nothing. The child is spawned,
not forked, because this process has threads. It starts before its first use and stays, so a call costs two messages
through pipes: about 0.1 ms.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from localllm.errors import LocalLLMError

LENGTH = struct.Struct("<Q")  # before each message: the number of bytes of JSON that follow
_ENDING = 5.0  # seconds to wait for a dead child to exit


class ConfinedError(LocalLLMError):
    """The child could not finish a task."""


class ConfinedLimit(ConfinedError):
    """The task needs more time, memory or output than allowed."""


class ConfinedCrash(ConfinedError):
    """The task killed its process."""


@dataclass(frozen=True, slots=True)
class ResourceLimits:
    """Limits of one call: `seconds` of processor time, `wall` seconds on the clock, `memory` and `answer` in bytes."""

    seconds: float = 5.0
    wall: float = 30.0
    memory: int = 384 << 20
    answer: int = 64 << 20


class Confined:
    """A child process that runs one task: `call` sends it a request and returns its answer, both JSON objects.

    Threads may share it; their calls take turns. The child ends with `close`, and whenever this process ends.
    """

    def __init__(self, task: str, limits: ResourceLimits | None = None) -> None:
        """`task` is a module of localllm with the functions `prepare()` and `answer(request) -> answer`."""
        self._task, self._limits = task, limits or ResourceLimits()
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the child without waiting, so that it is ready when needed."""
        with self._lock:
            self._running()

    def call(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the task's answer. ConfinedLimit or ConfinedCrash if there is none; the next call gets a new child."""
        data = json.dumps(request).encode()
        with self._lock:
            child = self._running()
            watch = threading.Timer(self._limits.wall, child.kill)
            watch.daemon = True
            watch.start()
            try:
                answer = self._exchange(child, data)
            except BaseException:  # KeyboardInterrupt too: a late answer must not reach a later call
                self._end()
                raise
            finally:
                watch.cancel()
        return answer

    def close(self) -> None:
        with self._lock:
            self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is not None:
            self._end()
        if self._child is None:
            # -S skips the search for installed packages; the child receives their paths.
            home = str(Path(__file__).resolve().parent.parent.parent)
            start = {"path": [*sys.path, home], "task": self._task, "limits": asdict(self._limits)}
            code = (
                "import sys,json;s=json.loads(sys.argv[1]);sys.path[:]=s['path'];from localllm.confined import worker;"
            )
            try:
                self._child = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", code + "worker.main(s)", json.dumps(start)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # only this process receives Ctrl-C from the terminal
                )
            except (OSError, ValueError) as error:
                raise ConfinedError(
                    f"{self._task}: no child process can be started ({error}); free memory, or allow more processes"
                ) from None
        return self._child

    def _exchange(self, child: subprocess.Popen[bytes], data: bytes) -> dict[str, Any]:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(LENGTH.pack(len(data)) + data)
            child.stdin.flush()
            head = child.stdout.read(LENGTH.size)
            length = LENGTH.unpack(head)[0] if len(head) == LENGTH.size else 0
            if length > self._limits.answer:
                raise ConfinedLimit(f"it makes more than {self._limits.answer >> 20} MB")
            text = child.stdout.read(length)
        except OSError:
            text = b""
        if not text:
            raise self._explained(child)
        answer: dict[str, Any] = json.loads(text)
        if (limit := answer.get("limit")) is not None:
            raise ConfinedLimit(str(limit))
        return answer

    def _explained(self, child: subprocess.Popen[bytes]) -> ConfinedError:
        """Return why the child ended."""
        try:
            code = child.wait(timeout=_ENDING)
        except subprocess.TimeoutExpired:
            code = 0
        if -code == getattr(signal, "SIGKILL", None):
            return ConfinedLimit(f"it takes more than {self._limits.wall:g} s on the clock")
        if -code == getattr(signal, "SIGPROF", None):
            return ConfinedLimit(f"it takes more than {self._limits.seconds:g} s: an endless loop, or text without end")
        if code < 0:
            return ConfinedCrash(f"it crashes its process (signal {-code})")
        return ConfinedCrash(f"its process ends without an answer (exit code {code})")

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with suppress(OSError):  # the unsent rest cannot be written
                    pipe.close()
        child.wait()

    def __enter__(self) -> Confined:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_child", None) is not None and os is not None:
            self._end()

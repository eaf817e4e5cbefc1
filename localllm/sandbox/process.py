"""`Confined` runs a task in a child process, with limits on time, memory and the size of its answer.

Metering inside this process was tried first. It would need the cost of every Python operation, and a single oversight
(such as hashing a tuple nested 400,000 deep) kills the program. The operating system's limits cover everything. The
child process is spawned, not forked, because this process has threads. It starts before its first use and stays, so a
call costs two messages through pipes: about 0.1 ms.

The environment of the child is empty. On Linux the child drops its rights before the first request (`rights`). Its
replies are untrusted too: each reply carries the random number of its request, and its size is limited before it is
read (`wire`).
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from localllm.base.errors import LocalLLMError
from localllm.sandbox.wire import HEAD, NUMBER, BadReply, ReplyTooLarge, read_reply, with_blob

_ENDING = 5.0  # seconds to wait for a dead child to exit
_LOOK = 0.05  # seconds between checks of `cancel`
# The environment variables that the child keeps: the library path of the loader, and Windows system folders. They
# contain no secrets.
_KEPT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FRAMEWORK_PATH", "SYSTEMROOT")


class ConfinedError(LocalLLMError):
    """The child process could not finish a task."""


class ConfinedLimit(ConfinedError):
    """The task needs more time, memory or output than allowed."""


class ConfinedSlow(ConfinedLimit):
    """The task needs more CPU time than allowed."""


class ConfinedLate(ConfinedLimit):
    """The task exceeded the wall-clock limit, or another process killed it. A retry may succeed."""


class ConfinedCrash(ConfinedError):
    """The task killed its process, or the process sent an invalid reply."""


class ConfinedStopped(ConfinedError):
    """The caller no longer wants the answer: `cancel` was set, or the child was closed."""


@dataclass(frozen=True, slots=True)
class ResourceLimits:
    """Limits of one call: `seconds` of CPU time, `wall` seconds of wall-clock time, `memory` and `answer` in bytes.

    `values` and `depth` limit the cost of reading an answer: the number of JSON values, and their nesting.
    """

    seconds: float = 5.0
    wall: float = 30.0
    memory: int = 384 << 20
    answer: int = 64 << 20
    values: int = 2 << 20
    depth: int = 64


class Confined:
    """A child process that runs one task. `call` sends it a request and returns the answer; both are JSON objects. An
    entry `BLOB` of them is raw data, which is not copied into the JSON.

    Thread-safe; calls run one at a time. The child ends with `close`, and whenever this process ends.
    """

    def __init__(self, task: str, limits: ResourceLimits | None = None) -> None:
        """Prepare a child process. `task` is a module of localllm with the functions `prepare()` and `answer(request)
        -> answer`."""
        self._task, self._limits = task, limits or ResourceLimits()
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._stopped: subprocess.Popen[bytes] | None = None  # the child that was ended on request

    def start(self) -> None:
        """Start the child without waiting, so that it is ready when needed."""
        with self._lock:
            self._running()

    def call(
        self, request: dict[str, Any], limits: ResourceLimits | None = None, cancel: threading.Event | None = None
    ) -> dict[str, Any]:
        """Return the answer of the task, or raise a ConfinedError. After an error, the next call starts a new child.

        `limits` replaces the limits of the child for this call, but memory stays below four times the limit of the
        child. Setting `cancel` from another thread ends the call with ConfinedStopped.
        """
        return self._call({"request": request}, limits or self._limits, cancel)

    def rights(self) -> list[str]:
        """Return the confinement in addition to the limits: "no capabilities", "landlock N", "seccomp"."""
        rights = self._call({"request": None}, self._limits, None).get("rights")
        if not isinstance(rights, list):
            raise ConfinedCrash("its process sends an invalid reply")
        return [str(right) for right in rights]

    def close(self) -> None:
        """End the child, and a running call in another thread."""
        if (child := self._child) is not None:
            self._stopped = child
            child.kill()
        with self._lock:
            self._end()

    def _call(self, message: dict[str, Any], limits: ResourceLimits, cancel: threading.Event | None) -> dict[str, Any]:
        number = secrets.token_bytes(NUMBER)  # a child cannot guess the next number
        data, blob = with_blob(message | {"limits": asdict(limits)})
        with self._lock:
            child = self._running()
            try:
                with self._watched(child, limits.wall, cancel):
                    return self._exchange(child, number, data, blob, limits)
            except BaseException:  # KeyboardInterrupt too: a late answer must not reach a later call
                self._end()
                raise

    @contextmanager
    def _watched(self, child: subprocess.Popen[bytes], wall: float, cancel: threading.Event | None) -> Iterator[None]:
        """Kill the child on timeout, or when the caller cancels."""
        done = threading.Event()

        def watch(deadline: float) -> None:
            while (left := deadline - time.monotonic()) > 0 and not done.wait(
                left if cancel is None else min(left, _LOOK)
            ):
                if cancel is not None and cancel.is_set():
                    self._stopped = child
                    break
            if not done.is_set():
                child.kill()

        watcher = threading.Thread(target=watch, args=(time.monotonic() + wall,), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is not None:
            self._end()
        if self._child is None:
            # -S skips the search for installed packages; the child receives their paths.
            home = str(Path(__file__).resolve().parent.parent.parent)
            start = {"path": [*sys.path, home], "task": self._task, "limits": asdict(self._limits)}
            code = (
                "import sys,json;s=json.loads(sys.argv[1]);sys.path[:]=s['path'];from localllm.sandbox import worker;"
            )
            try:
                self._child = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-X", "utf8", "-c", code + "worker.main(s)", json.dumps(start)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env={name: os.environ[name] for name in _KEPT if name in os.environ},
                    start_new_session=True,  # only this process receives Ctrl-C from the terminal
                )
            except (OSError, ValueError) as error:
                raise ConfinedError(
                    f"{self._task}: no child process can be started ({error}); free memory, or allow more processes"
                ) from None
        return self._child

    def _exchange(
        self, child: subprocess.Popen[bytes], number: bytes, data: bytes, blob: bytes, limits: ResourceLimits
    ) -> dict[str, Any]:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(HEAD.pack(number, len(data)) + data)
            child.stdin.write(blob)
            child.stdin.flush()
            reply = read_reply(cast(BinaryIO, child.stdout), number, limits.answer, limits.values, limits.depth)
        except OSError:
            reply = None
        except ReplyTooLarge as error:
            raise ConfinedLimit(str(error)) from None
        except BadReply as error:
            raise ConfinedCrash(str(error)) from None
        if reply is None:
            raise self._explained(child, limits)
        match reply:
            case {"answer": dict(answer)}:
                return answer
            case {"limit": "memory"}:
                raise ConfinedLimit(f"it needs more than {limits.memory >> 20} MB of memory")
            case {"limit": "answer"}:
                raise ConfinedLimit(f"its reply exceeds {limits.answer >> 20} MB")
        raise ConfinedCrash("its process sends an invalid reply")

    def _explained(self, child: subprocess.Popen[bytes], limits: ResourceLimits) -> ConfinedError:
        """Return the reason why the child ended."""
        try:
            code = child.wait(timeout=_ENDING)
        except subprocess.TimeoutExpired:
            code = 0
        if self._stopped is child:
            return ConfinedStopped("it was stopped")
        if -code == getattr(signal, "SIGKILL", None):
            return ConfinedLate(f"its process was killed, or takes more than {limits.wall:g} s on the clock")
        if -code == getattr(signal, "SIGPROF", None):
            return ConfinedSlow(f"it takes more than {limits.seconds:g} s")
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
                with suppress(OSError):  # the unsent remainder cannot be written
                    pipe.close()
        child.wait()

    def __enter__(self) -> Confined:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_child", None) is not None and os is not None:
            self._end()

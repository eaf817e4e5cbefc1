"""Start the program by a fork of a process that has imported it. `support.py` uses it, and `tests/documents`.

Tests start the program hundreds of times, and imports take two thirds of a start. Everything else is as in a start of
its own: process, arguments, environment, folder, streams, signals, exit. `support.PROGRAM` starts Python, for tests of
the imports themselves.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
IMPORTED = ("run", "chat", "config", "show", "explain", "serve")  # commands that tests start often
READ_BY_IMPORTS = ("PYTHON", "LC_", "LANG", "NUMBA_", "OPENBLAS_", "OMP_")  # beginnings of variables
_MOST = 1 << 17  # bytes of a request
_NUMBER = struct.Struct("i")

Streams = tuple[int, int, int]  # file descriptors of stdin, stdout and stderr


def can_fork(environ: Mapping[str, str]) -> bool:
    """Return whether no import reads these variables, and the system has the calls that this module uses."""
    return hasattr(os, "pidfd_open") and not any(name.startswith(READ_BY_IMPORTS) for name in environ)


class Started:
    """A running program, with the part of `subprocess.Popen` that tests use. It is killed if this object's process
    ends.
    """

    def __init__(
        self, words: list[str], streams: Streams, environ: Mapping[str, str], folder: Path = REPOSITORY,
        terminal: bool = False, connection: socket.socket | None = None,
    ) -> None:  # fmt: skip
        """With `terminal`, `streams` are the terminal of a new session."""
        self.returncode: int | None = None
        request = json.dumps([words, dict(environ), str(folder), terminal]).encode()
        assert len(request) < _MOST
        self._numbers, its = os.pipe()  # the process id, and the exit code once it ends
        socket.send_fds(connection or template().connection, [request], [*streams, its])
        os.close(its)
        self.pid = self._number()

    def poll(self) -> int | None:
        """Return the exit code, or None while the program runs."""
        if self.returncode is None and select.select([self._numbers], [], [], 0)[0]:
            self.returncode = self._number()
            os.close(self._numbers)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not select.select([self._numbers], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("localllm", timeout or 0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _number(self) -> int:
        return int(_NUMBER.unpack(os.read(self._numbers, _NUMBER.size))[0])


class Template:
    """The process that forks. It ends when the last process with the connection does."""

    def __init__(self) -> None:
        self.connection, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = f"import sys; from tests.localllm.started import serve; sys.exit(serve({its.fileno()})())"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=REPOSITORY, pass_fds=[its.fileno()], start_new_session=True
        )
        its.close()


template = cache(Template)


def main(descriptor: str, *words: str) -> int:
    """Start the program in the place of this process, which has inherited a template's connection."""
    connection = socket.socket(fileno=int(descriptor))
    started = Started(list(words), (0, 1, 2), os.environ, Path.cwd(), connection=connection)
    connection.close()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: started.send_signal(number))
    code = started.wait()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def serve(descriptor: int) -> Callable[[], int]:
    """Fork for each request. Return only in the new processes, which run what is returned."""
    from localllm.cli.main import main

    for command in IMPORTED:
        importlib.import_module(f"localllm.cli.commands.{command}")
    importlib.import_module("localllm.backends.cpu.backend")
    gc.freeze()
    for number in (signal.SIGTERM, signal.SIGHUP):  # pytest may have been started with ignored signals
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    connection = socket.socket(fileno=descriptor)
    while True:
        request, descriptors, _, _ = socket.recv_fds(connection, _MOST, 4)
        if not request:
            os._exit(0)
        *streams, told = descriptors
        if os.fork() == 0:
            if (program := os.fork()) == 0:
                _become(*json.loads(request), streams)
                return main
            connection.close()
            for each in streams:
                os.close(each)
            _watch(program, told)
        for each in descriptors:
            os.close(each)
        _bury()


def _watch(program: int, told: int) -> None:
    """Send the program's process id and exit code. Kill the program when no process can read them."""
    os.write(told, _NUMBER.pack(program))
    ended, poll = os.pidfd_open(program), select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(told, 0)  # errors only
    if all(descriptor != ended for descriptor, _ in poll.poll()):
        os.kill(program, signal.SIGKILL)
    _, status = os.waitpid(program, 0)
    with suppress(BrokenPipeError):
        os.write(told, _NUMBER.pack(os.waitstatus_to_exitcode(status)))
    os._exit(0)


def _bury() -> None:
    """Release the ended processes."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _become(words: list[str], environ: dict[str, str], folder: str, terminal: bool, streams: list[int]) -> None:
    """Take the place of a process that has just started Python."""
    if terminal:
        os.setsid()
        fcntl.ioctl(streams[0], termios.TIOCSCTTY, 0)  # needed for Ctrl-C to reach the program
    for number, given in enumerate(streams):
        os.dup2(given, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv[1:] = words
    sys.stdin = sys.__stdin__ = _stream(0, "rb", sys.stdin)
    sys.stdout = sys.__stdout__ = _stream(1, "wb", sys.stdout)
    sys.stderr = sys.__stderr__ = _stream(2, "wb", sys.stderr)


def _stream(number: int, mode: str, like: io.TextIOWrapper) -> io.TextIOWrapper:
    """Open a standard stream as Python does when it starts."""
    lines = number == 2 or os.isatty(number)
    binary = open(number, mode, buffering=0 if like.write_through else -1, closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(
        binary, like.encoding, like.errors, newline="\n", line_buffering=lines, write_through=like.write_through
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

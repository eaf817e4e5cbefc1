"""Run the command line as on macOS or Windows: without functions that these systems lack, and with their names.

    python -m tests.platforms.stand_in darwin|win32 COMMANDS

COMMANDS is a list of argument lists in JSON. Prints the result of each command in JSON: [code, stdout, stderr].

Modules of the standard library and of other packages choose their platform on import, so they are imported first and
stay unchanged. localllm is imported afterwards. Kernels still run, because this processor and its loader are real. On
"Windows", kernel32 is this system's C library under other names.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import json
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any

BEFORE = (
    *("concurrent.futures", "ctypes.util", "getpass", "http.client", "logging", "multiprocessing", "pathlib", "shutil"),
    *("socket", "subprocess", "tempfile", "urllib.request", "uuid", "webbrowser"),
    *(
        "numpy",
        "llvmlite.binding",
        "numba",
        "gguf",
        "huggingface_hub",
        "jinja2.sandbox",
        "llguidance",
        "prometheus_client",
    ),
    *("rich.console", "rich.progress", "starlette.applications", "tokenizers", "typer", "uvicorn"),
    *("platformdirs.macos", "platformdirs.windows", "uvicorn.protocols.http.h11_impl", "uvicorn.lifespan.on"),
)
LACKING: dict[str, dict[str, tuple[str, ...]]] = {
    "darwin": {
        "os": ("sched_getaffinity", "sched_setaffinity", "posix_fadvise", "memfd_create", "preadv", "sendfile"),
        "mmap": ("MADV_HUGEPAGE", "MAP_POPULATE", "MADV_DONTFORK"),
    },
    "win32": {
        "os": (
            *("sched_getaffinity", "sched_setaffinity", "sched_yield", "posix_fadvise", "memfd_create", "preadv"),
            *("pread", "pwrite", "fchmod", "chown", "lchown", "geteuid", "getuid", "getegid", "getgid", "fork"),
            *("setsid", "getloadavg", "sysconf", "statvfs", "mkfifo", "uname", "O_NOFOLLOW", "O_NONBLOCK"),
            *("O_DIRECTORY", "killpg", "nice", "getpgid", "tcgetpgrp", "openpty"),
        ),
        "signal": ("SIGHUP", "SIGKILL", "SIGPROF", "SIGALRM", "SIGUSR1", "SIGTSTP", "SIGWINCH", "SIGPIPE", "SIGQUIT",
                   "setitimer", "ITIMER_PROF", "pthread_sigmask", "pthread_kill", "sigwait", "siginterrupt"),
        "mmap": ("MAP_PRIVATE", "MAP_ANONYMOUS", "MAP_SHARED", "MADV_HUGEPAGE", "MAP_POPULATE", "PROT_READ",
                 "PROT_WRITE"),
    },
}  # fmt: skip
NO_MODULES = {
    "darwin": (),
    "win32": ("fcntl", "grp", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"),
}
MACHINE = {"darwin": "x86_64", "win32": "AMD64"}  # platform.machine() on that system


def become(system: str) -> None:
    """Make this process look like `system` ("darwin" or "win32") to modules that are imported from now on."""
    for name in BEFORE:
        importlib.import_module(name)
    asyncio.run(asyncio.sleep(0))
    modules = {"os": os, "signal": signal, "mmap": mmap}
    for module, names in LACKING[system].items():
        for name in names:
            if hasattr(modules[module], name):
                delattr(modules[module], name)
    for name in NO_MODULES[system]:
        sys.modules[name] = None  # type: ignore[assignment]  # importing it raises ImportError
    import platform

    platform.machine = lambda: MACHINE[system]
    sys.platform = system
    opened = ctypes.CDLL

    def library(name: str | None = None, *rest: Any, **more: Any) -> Any:
        if system == "win32":
            assert name is not None, "Windows has no library of the whole process"
            if name == "kernel32":
                found = opened(None)
                found.SwitchToThread = found.sched_yield
                return found
        return opened(name, *rest, **more)

    def kill(process: subprocess.Popen[bytes]) -> None:
        process.send_signal(9)  # Windows has no SIGKILL and ends the process by another system call

    subprocess.Popen.kill = kill  # type: ignore[method-assign]
    ctypes.CDLL = library  # type: ignore[assignment,misc]
    importlib.reload(importlib.import_module("platformdirs"))
    windows: Any = importlib.import_module("platformdirs.windows")
    windows.get_win_folder = windows.get_win_folder_from_env_vars  # the fallback without ctypes and registry


def done(words: Sequence[str]) -> tuple[int, str, str]:
    """Run one command line in this process. Return its exit code and output."""
    from localllm.cli.main import main

    before, sys.stdin = sys.stdin, StringIO()
    try:
        with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
            code = main(words)
    finally:
        sys.stdin = before
    return code, out.getvalue(), err.getvalue()


if __name__ == "__main__":
    become(sys.argv[1])
    print(json.dumps([done(words) for words in json.loads(sys.argv[2])]))

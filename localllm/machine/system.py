"""The calls to the operating system behind the facts of this package. Without an answer they return "" or None."""

from __future__ import annotations

import ctypes
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

_SECONDS = 5.0


def read_text(path: str | Path) -> str:
    """Return the text of a file that the kernel writes, such as /proc/cpuinfo."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def sysctl(name: str) -> str:
    """Return a value of the macOS or BSD kernel."""
    return output("/usr/sbin/sysctl", "-n", name)


def output(*command: str) -> str:
    """Return what a program prints, without the last newline."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def registry(key: str, name: str) -> str:
    """Return a text of the Windows registry below HKEY_LOCAL_MACHINE."""
    try:
        winreg: Any = import_module("winreg")
        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, key) as opened:
            return str(winreg.QueryValueEx(opened, name)[0])
    except (ImportError, OSError):
        return ""


def windows_library(name: str) -> Any:
    """Return a library of Windows for calls through ctypes; None elsewhere."""
    libraries = getattr(ctypes, "windll", None)
    return getattr(libraries, name, None)

"""The operating system calls behind this package's facts. The functions return "" or None on failure."""

from __future__ import annotations

import ctypes
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

_SECONDS = 5.0


def read_system_text(path: str | Path) -> str:
    """Return the text of a kernel file such as /proc/cpuinfo."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def sysctl(name: str) -> str:
    """Return a kernel value on macOS or BSD."""
    return output("/usr/sbin/sysctl", "-n", name)


def output(*command: str) -> str:
    """Return the output of a program, without the last newline."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def registry(key: str, name: str) -> str:
    """Return a string from the Windows registry below HKEY_LOCAL_MACHINE."""
    try:
        winreg: Any = import_module("winreg")
        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, key) as opened:
            return str(winreg.QueryValueEx(opened, name)[0])
    except (ImportError, OSError):
        return ""


def windows_library(name: str) -> Any:
    """Return a Windows library loaded with ctypes, or None on other systems."""
    libraries = getattr(ctypes, "windll", None)
    return getattr(libraries, name, None)

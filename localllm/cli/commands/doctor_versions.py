"""The versions of localllm, Python, the system and the packages, for `localllm doctor`. No package is imported."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from pathlib import Path

from localllm.cli.version import version

PACKAGES = (
    "numpy", "numba", "llvmlite", "gguf", "tokenizers", "jinja2", "llguidance", "huggingface_hub", "starlette",
    "uvicorn", "typer", "rich", "prompt_toolkit", "pyopencl", "pycuda", "nvidia-cuda-nvrtc",
)  # fmt: skip
_HOME = os.path.expanduser("~")


def versions() -> dict[str, str]:
    """Return the versions to report, with "" for a package that is not installed."""
    return {
        "localllm": f"{version()} in {without_home(Path(__file__).resolve().parents[3])}",
        "python": f"{platform.python_implementation()} {platform.python_version()}, {without_home(sys.executable)}",
        "system": _system(),
        "terminal": _terminal(),
        **installed_packages(PACKAGES),
    }


def installed_packages(names: Sequence[str]) -> dict[str, str]:
    """Return the version of each package, or "" if it is not installed."""
    return {name: _installed(name) for name in names}


def without_home(path: str | Path) -> str:
    """Return a path without the home folder, because users publish the report."""
    text = str(path)
    inside = text == _HOME or text.startswith(_HOME.rstrip(os.sep) + os.sep)
    return "~" + text[len(_HOME.rstrip(os.sep)) :] if inside and os.sep != _HOME else text


def _system() -> str:
    if sys.platform == "linux":
        try:
            return f"{platform.freedesktop_os_release()['PRETTY_NAME']}, {platform.platform()}"
        except (OSError, KeyError):
            pass
    return platform.platform()


def _terminal() -> str:
    columns = os.get_terminal_size(2).columns if os.isatty(2) else 0
    parts = (os.environ.get("TERM", ""), f"{columns} columns" if columns else "no terminal", sys.stdout.encoding or "")
    return ", ".join(part for part in parts if part)


def _installed(name: str) -> str:
    try:
        return installed(name)
    except PackageNotFoundError:
        return ""

"""The version that `localllm --version` prints. In a git checkout it includes the commit, for bug reports."""

from __future__ import annotations

from pathlib import Path

from localllm import __version__

_CHECKOUT = Path(__file__).resolve().parents[2]  # site-packages if installed, not a checkout
_SECONDS = 10.0


def version(folder: Path = _CHECKOUT) -> str:
    """Return `0.3.0` or, in a checkout, `0.3.0 (abc1234)`, with `, modified` if a tracked file has changed."""
    if not (folder / ".git").exists():
        return __version__
    import subprocess

    command = ["git", "-C", str(folder), "describe", "--always", "--abbrev=7", "--exclude=*", "--dirty=, modified"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):  # no git, or git refuses to read the folder
        return __version__
    return f"{__version__} ({done.stdout.strip()})"

"""The private folder that keeps chat data between sessions, in the system's standard location for application state."""

from __future__ import annotations

import os
from errno import EACCES
from pathlib import Path

from localllm.base.files.regular import foreign
from localllm.cli.terminal.console import YELLOW, say


def state_folder() -> Path | None:
    """Return the state folder, created if needed and accessible to its owner only. If that fails, print a note and
    return None."""
    from platformdirs import user_state_path

    folder = user_state_path("localllm", appauthor=False)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if foreign(folder.stat()):
            raise PermissionError(EACCES, "belongs to another user", os.fspath(folder))
        if folder.stat().st_mode & 0o077:
            os.chmod(folder, 0o700)
    except OSError as error:
        say(f"note: this chat cannot be saved: {folder}: {error.strerror or error}", YELLOW)
        return None
    return folder

"""The folder for what a chat keeps between sessions: private, in the place that the system has for state."""

from __future__ import annotations

import os
from errno import EACCES
from pathlib import Path

from localllm.cli.terminal.console import YELLOW, say
from localllm.regular import foreign


def state_folder() -> Path | None:
    """Return the folder, made if needed and open to its owner alone; None, after a note, if it cannot be made."""
    from platformdirs import user_state_path

    folder = user_state_path("localllm", appauthor=False)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if foreign(folder.stat()):
            raise PermissionError(EACCES, "belongs to another user", os.fspath(folder))
        if folder.stat().st_mode & 0o077:
            os.chmod(folder, 0o700)
    except OSError as error:
        say(f"note: nothing is kept of this chat: {folder}: {error.strerror or error}", YELLOW)
        return None
    return folder

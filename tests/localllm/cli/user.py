"""A simulated user with a configuration file, for tests of options."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from localllm.cli.app import UsageError, read_command_line
from localllm.cli.configuration import filled
from localllm.cli.table import COMMANDS


class User:
    """A simulated user with a configuration file and environment variables."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.path, self.patch = folder / "config.toml", patch
        patch.setenv("LOCALLLM_CONFIG", str(self.path))

    def has(self, text: str = "", **variables: str) -> User:
        self.path.write_text(text, encoding="utf-8")
        for name in [name for name in os.environ if name.startswith("LOCALLLM_") and name != "LOCALLLM_CONFIG"]:
            self.patch.delenv(name)
        for name, value in variables.items():
            self.patch.setenv(f"LOCALLLM_{name}", value)
        return self

    def runs(self, *words: str) -> dict[str, Any]:
        """Return the options that a command receives, by name. Sampling options are included only if given."""
        line = read_command_line(COMMANDS, words)
        assert line is not None
        options = COMMANDS[line.name].options(filled(COMMANDS, line))
        groups = [group if isinstance(group, dict) else group.values() for group in options]
        return {name: value for group in groups for name, value in group.items()}

    def is_refused(self, *words: str) -> str:
        with pytest.raises(UsageError) as error:
            self.runs(*words)
        assert "\n" not in str(error.value)
        return str(error.value).replace(str(self.path), "FILE")

"""Run localllm commands in the test process."""

from __future__ import annotations

import io
import sys

import pytest

from localllm.cli.main import main


class Shell:
    """Runs localllm commands in the test process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> None:
        self.capsys, self.patch = capsys, patch

    def __call__(self, *words: object, stdin: str = "") -> tuple[int, str, str]:
        """Run a command; return its exit code, stdout and stderr."""
        self.patch.setattr(sys, "stdin", io.StringIO(stdin))
        code = main([str(word) for word in words])
        return code, *self.capsys.readouterr()

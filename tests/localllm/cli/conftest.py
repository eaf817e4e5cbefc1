"""Fixture: a simulated user with a configuration file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.localllm.cli.user import User


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> User:
    return User(tmp_path, monkeypatch).has()

"""Shared helpers of the test suite: where the reference data is, and the skip when it is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED_DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"


def reference(*parts: str) -> Path:
    """Path of a file or folder of the reference data; skips the calling test where there is none."""
    path = SHARED_DATA.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"reference data not present: {path}")
    return path


@pytest.fixture(scope="session")
def shared_data() -> Path:
    return reference()

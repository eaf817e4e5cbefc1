"""A pytest plugin that runs only every N-th test of a slow file: `-p tests.platforms.every --every FILE=N`."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every", action="append", default=[], metavar="FILE=N", help="run each N-th test of a file")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for asked in config.getoption("--every"):
        name, _, number = asked.partition("=")
        found = [item for item in items if item.path == config.rootpath / name]
        if not found or not number.isdigit():
            raise pytest.UsageError(f"--every {asked}: expected a file of these tests, =, and a number")
        left_out = set(found) - set(found[:: int(number)])
        config.hook.pytest_deselected(items=sorted(left_out, key=lambda item: item.nodeid))
        items[:] = [item for item in items if item not in left_out]

"""The distribution of the suite over processes: groups stay together and begin first, and the rest is balanced."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.localllm.support import REPOSITORY

CONFTEST = """
import os, time
import pytest
from tests.conftest import pytest_collection_modifyitems, pytest_xdist_make_scheduler

@pytest.fixture(autouse=True)
def told(request):
    with open("order", "a") as file:
        file.write(f"{os.environ['PYTEST_XDIST_WORKER']} {request.path.stem} {time.monotonic()}\\n")
"""
FILES = {  # tests, seconds of each, and the mark
    "test_early": (20, 0.0, ""),
    "test_first": (12, 0.04, 'pytestmark = pytest.mark.xdist_group("one")'),
    "test_second": (12, 0.04, 'pytestmark = pytest.mark.xdist_group("one")'),
    "test_third": (6, 0.02, 'pytestmark = pytest.mark.xdist_group("two")'),
    "test_late": (30, 0.0, ""),
}


@pytest.mark.parametrize("processes", [2, 4])  # of 80 tests: the longest group is less than a process's part, or more
def test_groups_stay_together_and_begin_first(processes: int, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").touch()
    for name, (count, seconds, mark) in FILES.items():
        test = f"@pytest.mark.parametrize('n', range({count}))\ndef test(n):\n    time.sleep({seconds})\n"
        (tmp_path / f"{name}.py").write_text(f"import time\nimport pytest\n{mark}\n{test}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(processes)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(REPOSITORY)
    ran = subprocess.run(
        [*command, "--dist", "worksteal"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert "80 passed" in ran.stdout, ran.stdout + ran.stderr
    told = [line.split() for line in (tmp_path / "order").read_text().splitlines()]
    workers, run = defaultdict(set), defaultdict(list)
    for worker, file, _ in sorted(told, key=lambda row: float(row[2])):
        group = re.sub("first|second", "one", file)
        workers[group].add(worker)
        run[worker].append(group)
    assert len(workers["test_one"]) == len(workers["test_third"]) == 1
    [longest] = workers["test_one"]
    assert run[longest][:24] == ["test_one"] * 24
    assert all(len(groups) > 1 for groups in run.values())
    assert run[longest].count("test_early") + run[longest].count("test_late") < 10  # others take them

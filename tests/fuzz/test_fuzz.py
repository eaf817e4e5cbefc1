"""A few fixed cases of every fuzzer, and the runner itself, which must detect every kind of failure."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import ClassVar

import numpy as np
import pytest

from localllm.base.errors import LocalLLMError
from tests.fuzz import fence
from tests.fuzz.__main__ import KINDS
from tests.fuzz.case import Case
from tests.fuzz.image import decode
from tests.fuzz.models import bases
from tests.fuzz.runner import Finding, Report, Runner
from tests.localllm.support import REPOSITORY

CASES = {
    "gguf": 60, "split": 2000, "safetensors": 200, "draft": 60, "cache": 1000, "imatrix": 3000, "kld": 4000,
    "template": 100, "writers": 100, "special": 100, "reply": 60, "http": 200,
    "media": 500,
}  # fmt: skip


@pytest.mark.parametrize("kind", [*KINDS, "http"])
def test_a_small_part(kind: str, tmp_path: Path) -> None:
    """With seed 1, every case of every kind succeeds or ends with a one-line localllm error."""
    command = [sys.executable, "-m", "tests.fuzz", kind, "--cases", str(CASES[kind]), "--keep", str(tmp_path)]
    command += ["--patience", "60", "--shared"]  # other tests run at the same time, and compile the same kernels
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{CASES[kind]} cases" in ran.stdout


def _fail(what: BaseException) -> str:
    raise what


def _deep() -> str:
    return str(np.ones(400 << 20, np.uint8).sum())


DEEDS = {
    "success": lambda: "fine",
    "one line": lambda: _fail(LocalLLMError("model.gguf: is empty; download it again")),
    "system": lambda: _fail(FileNotFoundError(2, "No such file or directory", "model.gguf")),
    "traceback": lambda: _fail(KeyError("x")),
    "interrupt": lambda: _fail(KeyboardInterrupt()),
    "two lines": lambda: _fail(OSError("one\ntwo")),
    "escape": lambda: _fail(OSError("\x1b[2J")),
    "silence": lambda: _fail(LocalLLMError("")),
    "signal": lambda: str(os.kill(os.getpid(), signal.SIGSEGV)),
    "exit": lambda: os._exit(3),
    "hang": lambda: str(time.sleep(60)),
    "memory": _deep,
}
SEEN = {
    "traceback": "KeyError",
    "interrupt": "KeyboardInterrupt",
    "two lines": "control characters",
    "escape": "control characters",
    "silence": "without a message",
    "signal": "signal SIGSEGV",
    "exit": "exit code 3",
    "hang": "hang",
    "memory": "MiB of memory",
}


SEED = 68  # its first 24 cases include every entry of DEEDS, and exactly one hang


class _Deeds:
    """A fuzzer whose cases each fail in one way, or succeed."""

    together: ClassVar[int] = 8
    seconds: ClassVar[float] = 2.0

    def __init__(self, home: Path) -> None: ...

    def make(self, random: Random, folder: Path) -> Case:
        name = list(DEEDS)[random.randrange(len(DEEDS))]
        (folder / "file").write_text(name)
        return Case((name,), DEEDS[name])


def _run(kind: _Deeds, folder: Path, cases: int) -> tuple[Report, list[Finding]]:
    told: list[Finding] = []
    return Runner("deeds", kind, SEED, folder, memory=128 << 20).run(0, cases, float("inf"), told.append), told


def test_the_runner_sees_and_attributes_everything(tmp_path: Path) -> None:
    report, told = _run(_Deeds(tmp_path), tmp_path, 24)
    assert (report.cases, report.findings) == (24, told)
    assert {found.changes[0] for found in told} == set(SEEN)
    for found in told:
        assert SEEN[found.changes[0]] in found.what
    right = sum(count for what, count in report.tally.items() if what.startswith(("fine", "refused: ")))
    assert right == 24 - len(told)


def test_a_case_is_its_number(tmp_path: Path) -> None:
    """The files of a failure can be recreated from kind, seed and number."""
    kind = _Deeds(tmp_path)
    _, told = _run(kind, tmp_path, 10)
    assert told
    for found in told:
        Runner("deeds", kind, SEED, tmp_path).keep(found.number, tmp_path / "kept")
        assert (tmp_path / "kept" / "file").read_text() == found.changes[0]


class _Later(_Deeds):
    """Case 5 dies only if case 3 ran in the same child."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self._made: list[str] = []

    def make(self, random: Random, folder: Path) -> Case:
        self._made.append("")
        started = len(self._made)
        return Case((), lambda: DEEDS["signal"]() if started == 3 else "fine")


def test_a_death_that_needs_other_cases_is_told_with_them(tmp_path: Path) -> None:
    report, told = _run(_Later(tmp_path), tmp_path, 5)
    assert report.cases == 5
    assert told[0].number == 2
    assert told[0].what == "signal SIGSEGV, only after the cases from 0 on"


@pytest.mark.parametrize("size", [1, 64, 100, 4096, 5000])
@pytest.mark.parametrize("beyond", [0, 64])
def test_a_fence_ends_at_its_line(size: int, beyond: int) -> None:
    child = os.fork()
    if not child:
        faulthandler.disable()
        lines = -(-size // 64) * 64
        fence.at(fence.fenced(size), lines + beyond)[lines + beyond - 1] = 1
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) == (beyond > 0)


def test_every_module_that_takes_memory_is_fenced() -> None:
    folder = REPOSITORY / "backends" / "cpu"
    taking = [path.stem for path in folder.glob("*.py") if "Arena" in path.read_text() and path.stem != "memory"]
    assert sorted(module.__name__.rpartition(".")[2] for module in fence.MODULES) == sorted(taking)


def test_images_are_read_and_written_whole(tmp_path: Path) -> None:
    for image in bases(tmp_path).values():
        data = image.encode()
        assert decode(data) == image
        assert image.copy().encode() == data

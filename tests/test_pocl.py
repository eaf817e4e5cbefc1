"""Tests are skipped only where PoCL cannot compile even an empty kernel: no fault of this project skips one."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests import conftest, pocl

UNKNOWN = "clBuildProgram failed: BUILD_PROGRAM_FAILURE\nerror: unknown target CPU 'generic'"


class Report:
    """The part of a test's report that the hook reads and changes."""

    failed, capstderr, longrepr = True, "", None

    def __init__(self, text: str) -> None:
        self.longreprtext, self.outcome = text, "failed"


class Item:
    path = __file__


@pytest.mark.parametrize(
    ("text", "compiles", "outcome"),
    [
        (UNKNOWN, False, "skipped"),
        (UNKNOWN, True, "failed"),
        ("its compiler refuses a kernel: error: expected ';'", False, "failed"),
        ("clBuildProgram failed: BUILD_PROGRAM_FAILURE", False, "failed"),
        ("assert 1 == 2", False, "failed"),
    ],
)
def test_only_what_fails_for_the_processor_is_skipped(
    monkeypatch: pytest.MonkeyPatch, text: str, compiles: bool, outcome: str
) -> None:
    monkeypatch.setattr(pocl, "compiles", lambda: compiles)
    hook: Any = conftest.pytest_runtest_makereport
    steps = hook(Item(), None)
    next(steps)
    with pytest.raises(StopIteration) as ended:
        steps.send(Report(text))
    assert ended.value.value.outcome == outcome


@pytest.mark.parametrize(
    ("program", "compiles"),
    [
        ("", True),
        ("raise RuntimeError('clBuildProgram failed')", True),
        ("import no_such_module", True),
        (f"raise RuntimeError({UNKNOWN!r})", False),
    ],
)
def test_the_compiler_is_at_fault_only_by_its_own_words(
    monkeypatch: pytest.MonkeyPatch, program: str, compiles: bool
) -> None:
    monkeypatch.setattr(pocl, "_PROGRAM", program)
    assert pocl.compiles.__wrapped__() == compiles


def test_tests_and_what_they_test_cannot_change_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = pocl.compiles.__wrapped__()
    monkeypatch.setitem(sys.modules, "pyopencl", None)
    monkeypatch.setenv("OCL_ICD_VENDORS", "/nowhere")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    assert pocl.compiles.__wrapped__() == truth

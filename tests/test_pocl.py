"""A test is skipped only if PoCL cannot compile even an empty kernel. A bug of this project never causes a skip."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest, pocl

UNKNOWN = "clBuildProgram failed: BUILD_PROGRAM_FAILURE\nerror: unknown target CPU 'generic'"


# The reports are named, so that the searched words do not appear in the report of a failing test.
REPORTS = {
    "the processor": (UNKNOWN, "", ""),
    "the processor, in a program": ("assert 1 == 0", "", UNKNOWN),
    "a mistake in a kernel": ("its compiler refuses a kernel: error: expected ';'", "", ""),
    "another failure": ("clBuildProgram failed: BUILD_PROGRAM_FAILURE", "", ""),
    "a test about such words": ("assert 1 == 2", UNKNOWN, ""),
}


class Report:
    """The part of a pytest report that the hook reads and changes."""

    failed = True

    def __init__(self, message: str, source: str, stderr: str) -> None:
        self.longrepr: Any = SimpleNamespace(reprcrash=SimpleNamespace(message=message))
        self.longreprtext, self.capstderr, self.outcome = f"{source}\n{message}", stderr, "failed"


class Item:
    path = __file__


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("name", REPORTS)
def test_only_what_fails_for_the_processor_is_skipped(
    monkeypatch: pytest.MonkeyPatch, name: str, compiles: bool
) -> None:
    hook: Any = conftest.pytest_runtest_makereport
    with monkeypatch.context() as patched:  # the patch must end before the report of this test itself
        patched.setattr(pocl, "compiles", lambda: compiles)
        steps = hook(Item(), None)
        next(steps)
        with pytest.raises(StopIteration) as ended:
            steps.send(Report(*REPORTS[name]))
    skipped = name.startswith("the processor") and not compiles
    assert ended.value.value.outcome == ("skipped" if skipped else "failed")


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

"""Set up the whole suite. Provide the reference data, and a simulated full disk.

Tests, and the programs they start, ignore the user's configuration and saved chats.
"""

from __future__ import annotations

import atexit
import gc
import os
import re
import resource
import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests import pocl

for _name in [name for name in os.environ if name.startswith("LOCALLLM_")]:
    del os.environ[_name]
os.environ["LOCALLLM_CONFIG"] = os.devnull  # the user's configuration must not affect tests
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="localllm-state-")  # tests must not touch the user's saved chats
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

# The user's terminal must not affect tests either: a dumb terminal has at most 80 columns, and these variables switch
# colors on or off.
os.environ["TERM"] = "xterm"
for _name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "COLORTERM", "CLICOLOR", "CLICOLOR_FORCE"):
    os.environ.pop(_name, None)
if not os.path.isdir(os.path.expanduser("~")):  # otherwise kernels are not cached, and a warning appears
    os.environ["HOME"] = tempfile.mkdtemp(prefix="localllm-home-")
    atexit.register(shutil.rmtree, os.environ["HOME"], ignore_errors=True)

# NumPy multiplies only small matrices here. OpenBLAS threads spin while they wait. With two threads per process and
# every core busy (two pytest-xdist workers on two cores), tests take four times the CPU time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when NumPy is imported, which happens later

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts background jobs with SIGINT ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests start hundreds of programs that import the package. If bytecode cannot be written next to the sources,
# as in some containers, they share another bytecode folder, which pytest-xdist workers inherit.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", "") and "PYTHONPYCACHEPREFIX" not in os.environ:
    os.environ["PYTHONPYCACHEPREFIX"] = tempfile.mkdtemp(prefix="localllm-bytecode-")
    atexit.register(shutil.rmtree, os.environ["PYTHONPYCACHEPREFIX"], ignore_errors=True)

# Twelve thousand tests are a million long-lived objects, and one garbage collection over them takes 0.7 s. The
# collector is off while pytest collects tests, and later runs skip these objects.
gc.disable()


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs and the system's OpenCL drivers from the tests and from the programs they start.

    PoCL stays available, because it is installed as a Python package. With `-m gpu` nothing is hidden.
    """
    if re.search(r"(?<!not )\bgpu\b", config.option.markexpr) or find_spec("pocl_binary_distribution") is None:
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["OCL_ICD_VENDORS"] = nothing = tempfile.mkdtemp(prefix="localllm-no-drivers-")
    atexit.register(shutil.rmtree, nothing, ignore_errors=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let one process of pytest-xdist run all tests of a group."""
    if config.getvalue("dist") != "worksteal":
        return None
    from tests.groups import GroupedStealing

    return GroupedStealing(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let the processes of pytest-xdist begin with the groups."""
    if hasattr(config, "workerinput"):
        from tests.groups import order

        items.sort(key=lambda item: order(item.path))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip a failed test if PoCL cannot compile even an empty kernel for this processor."""
    report = yield
    if report.failed and pocl.UNKNOWN in _said(report) and not pocl.compiles():
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, f"Skipped: {pocl.REASON}")
    return report


def _said(report: pytest.TestReport) -> str:
    """Return the error message and the captured stderr, without the source code, which may contain the searched
    words.
    """
    crash = getattr(report.longrepr, "reprcrash", None)
    return f"{crash.message if crash else ''}\n{report.capstderr}"


def pytest_collection_finish() -> None:
    gc.enable()
    gc.collect()
    gc.freeze()


SHARED_DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"


def reference(*parts: str) -> Path:
    """Return the path of a file or folder of the reference data; skip the calling test if it is missing."""
    path = SHARED_DATA.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"reference data not present: {path}")
    return path


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """Simulate a full disk with a limit on file size: in this process, a write beyond `room` bytes fails."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    return reference()

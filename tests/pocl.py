"""Whether PoCL can compile for this processor: the LLVM in its package knows none made after 2022, such as Zen 5."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

import pytest

REASON = "PoCL's compiler does not know this processor"
UNKNOWN = "unknown target CPU"  # what it says then
_ENVIRONMENT = dict(os.environ)  # before any test changes it

# The smallest kernel, without anything of this project.
_PROGRAM = """
import pyopencl as cl

for platform in cl.get_platforms():
    for device in platform.get_devices():
        if "PoCL" in device.version:
            cl.Program(cl.Context([device]), "__kernel void nothing() {}").build()
"""


@cache
def compiles() -> bool:
    """Return False if PoCL takes the processor for an unknown one, which no fault of this project can cause.

    A separate process asks, so that no test, and no code under test, can change the answer.
    """
    asked = [sys.executable, "-I", "-c", _PROGRAM]
    done = subprocess.run(asked, env=_ENVIRONMENT, capture_output=True, text=True, check=False)
    return not (done.returncode and UNKNOWN in done.stderr)


def needed() -> None:
    """Skip the calling test where PoCL compiles nothing."""
    if not compiles():
        pytest.skip(REASON)

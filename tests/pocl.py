"""Check whether PoCL can compile for this processor. Its bundled LLVM knows no CPU released after 2022, such as
Zen 5.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

import pytest

REASON = "PoCL's compiler does not know this processor"
UNKNOWN = "unknown target CPU"  # PoCL's error message for an unknown processor
_ENVIRONMENT = dict(os.environ)  # the environment before any test changes it

# The smallest kernel, unrelated to this project.
_PROGRAM = """
import pyopencl as cl

for platform in cl.get_platforms():
    for device in platform.get_devices():
        if "PoCL" in device.version:
            cl.Program(cl.Context([device]), "__kernel void nothing() {}").build()
"""


@cache
def compiles() -> bool:
    """Return False if PoCL does not know the processor, which cannot be a bug of this project.

    The check runs in a separate process, so no test and no code under test can change its result.
    """
    asked = [sys.executable, "-I", "-c", _PROGRAM]
    done = subprocess.run(asked, env=_ENVIRONMENT, capture_output=True, text=True, check=False)
    return not (done.returncode and UNKNOWN in done.stderr)


def needed() -> None:
    """Skip the calling test if PoCL cannot compile for this processor."""
    if not compiles():
        pytest.skip(REASON)

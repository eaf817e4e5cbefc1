"""Whether PoCL can compile for this processor: the LLVM in its package knows none made after 2022, such as Zen 5."""

from __future__ import annotations

from functools import cache

import pytest

REASON = "PoCL's compiler does not know this processor"


@cache
def compiles() -> bool:
    """Return False if every program fails because PoCL takes the processor for an unknown one."""
    import pyopencl as cl

    found = [each for platform in cl.get_platforms() for each in platform.get_devices() if "PoCL" in each.version]
    try:
        for device in found:
            cl.Program(cl.Context([device]), "__kernel void nothing() {}").build()
    except cl.Error as error:
        return "unknown target CPU" not in str(error)
    return True


def needed() -> None:
    """Skip the calling test where PoCL compiles nothing."""
    if not compiles():
        pytest.skip(REASON)

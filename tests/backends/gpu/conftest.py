"""The devices of these tests: PoCL, which runs OpenCL on the CPU, always; a real card with `pytest -m gpu`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from backends.base import Backend
from backends.opencl.backend import OpenClBackend, devices


def pocl() -> OpenClBackend:
    """PoCL is a test dependency: it is there, or these tests fail."""
    found = [number for number, device in enumerate(devices()) if "pocl" in device.version.lower()]
    assert found, "PoCL is missing: pip install 'pyopencl[pocl]'"
    return OpenClBackend(found[0], cache=None)


def card() -> OpenClBackend:
    backend = OpenClBackend(cache=None)
    assert backend.device.facts.compute == "GPU", "OpenCL finds no graphics card"
    return backend


@pytest.fixture(scope="session", params=["pocl", pytest.param("card", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest) -> Iterator[Backend]:
    backend = {"pocl": pocl, "card": card}[request.param]()
    yield backend
    backend.close()

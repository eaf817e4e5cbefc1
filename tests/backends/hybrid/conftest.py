"""Provide a GPU and the CPU for tests of both together. PoCL, which runs OpenCL on the CPU, replaces the GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from localllm.backends.base import Backend
from localllm.backends.cpu.backend import CpuBackend
from tests.backends.gpu.conftest import pocl


@pytest.fixture(scope="session")
def pair() -> Iterator[tuple[Backend, Backend]]:
    """Provide the backends of the GPU and of the host."""
    card, host = pocl(), CpuBackend(2)
    yield card, host
    card.close()
    host.close()

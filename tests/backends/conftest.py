"""Backends that tests share: opening one starts threads, and binding compiles kernels that are not cached."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from localllm.backends.cpu.backend import CpuBackend


@pytest.fixture(scope="session")
def cpu() -> Iterator[CpuBackend]:
    """Two threads, this machine's best instruction set, and kernels from the user's cache as in the program."""
    backend = CpuBackend(threads=2)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def backends() -> Iterator[list[CpuBackend]]:
    """Backends with one, two and three threads: more than a small machine has processors."""
    made = [CpuBackend(threads) for threads in (1, 2, 3)]
    yield made
    for backend in made:
        backend.close()

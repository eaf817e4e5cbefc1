"""Provide backends that tests share, because opening a backend starts threads and may compile kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from localllm.backends.cpu.backend import CpuBackend


@pytest.fixture(scope="session")
def cpu() -> Iterator[CpuBackend]:
    """Provide a CPU backend with two threads, this machine's best instruction set, and the user's kernel cache."""
    backend = CpuBackend(threads=2)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def backends() -> Iterator[list[CpuBackend]]:
    """Provide backends with one, two and three threads, which is more threads than a small machine has cores."""
    made = [CpuBackend(threads) for threads in (1, 2, 3)]
    yield made
    for backend in made:
        backend.close()

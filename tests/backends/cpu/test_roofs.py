"""The measured peak compute and bandwidth of the processor are plausible, and the benchmark kernels really execute
every operation.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from localllm.backends.cpu.backend import CpuBackend
from localllm.backends.cpu.kernels import peak
from localllm.backends.cpu.kernels.executor import Entry
from localllm.backends.cpu.memory import address
from localllm.backends.cpu.roofs import product_rates, read_rates


@pytest.fixture(params=[1, 2])
def cpu(request: pytest.FixtureRequest) -> Iterator[CpuBackend]:
    backend = CpuBackend(request.param)
    yield backend
    backend.close()


def test_every_thread_does_every_product(cpu: CpuBackend) -> None:
    """With weights of 2 and activations of 3, each iteration adds 4 x 6 to each lane of each sum. The sums
    start at 0, 1, ..., so a skipped operation shows.
    """
    threads, turns = cpu.pool.threads, 5
    data = np.full(peak.OPERANDS, 2, np.uint8)
    data[64:] = 3
    sink = np.zeros((threads, peak.SINK // 4), np.int32)
    cpu.library.load([peak.byte_products()])
    arguments = peak.PeakArguments(data=address(data), turns=turns, sink=address(sink)).pack()
    code = cpu.library.address("byte_products")
    entry = Entry.whole(code, address(arguments))[None]
    cpu.pool.run(entry, np.zeros((1, 8), np.int64))
    assert (sink == sum(chain + 24 * turns for chain in range(peak.CHAINS))).all()
    assert peak.OPERATIONS == 2 * 64 * peak.CHAINS


def test_the_time_grows_with_the_turns(cpu: CpuBackend) -> None:
    rates = product_rates(cpu.library, cpu.pool, 1 << 12, 5)
    assert len(rates) == 5
    assert 1e8 < max(rates) < 1e15


def test_reading_needs_something_to_read(cpu: CpuBackend) -> None:
    data = np.ones(8 << 20, np.uint8)
    rates = read_rates(cpu.library, cpu.pool, address(data), data.nbytes, 3)
    assert len(rates) == 3
    assert 1e8 < max(rates) < 1e13
    assert read_rates(cpu.library, cpu.pool, address(data), 1000, 3) == []

"""Logits are bitwise identical after KV cache blocks are copied to another executable, with any number of
threads. Invalid content is refused.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from localllm.backends.base import Backend, BackendError, Executable
from localllm.backends.cpu.backend import CpuBackend
from localllm.backends.reference import ReferenceBackend
from localllm.plan import BLOCK
from tests.backends.support import Shape, bind, plan, tokens
from tests.models.support import Driver

COUNT, KEPT = 150, 2 * BLOCK
MODEL = Shape("qwen3", heads=12, kv_heads=4, head_dim=24, layers=2)  # values are padded to whole SIMD vectors
OPEN: dict[str, Callable[[int], Backend]] = {"cpu": CpuBackend, "reference": lambda threads: ReferenceBackend()}


@pytest.mark.parametrize("name", OPEN)
def test_blocks_that_moved_to_another_executable_give_the_same_bits(name: str) -> None:
    model, mine = plan("Q8_0", MODEL), tokens(COUNT)
    backends = [OPEN[name](threads) for threads in (1, 3)]
    there, here = (bind(backend, model, rows=COUNT, blocks=6) for backend in backends)
    truth = Driver(there).step([(0, mine)])[KEPT:]
    assert there.cache_layout == here.cache_layout
    assert there.block_bytes == here.block_bytes
    contents = [there.read_blocks(layer, np.array([0, 1])) for layer in range(2)]
    assert [content.shape for content in contents] == [(2, size) for size in there.block_bytes]
    places = np.array([4, 1])
    for layer, content in enumerate(contents):
        here.write_blocks(layer, places, content)
    driver = Driver(here)
    driver.tables, driver.lengths = np.array([[4, 1, 3]], np.int32), [KEPT]
    assert (driver.step([(0, mine[KEPT:])]) == truth).all()
    assert (contents[0] != contents[1]).any()  # the layers have different content
    for backend in backends:
        backend.close()


def test_the_cache_is_what_the_memory_plan_says(cpu: CpuBackend) -> None:
    for backend in (cpu, ReferenceBackend()):
        bound: Executable = bind(backend, plan("Q8_0", MODEL), blocks=6)
        assert sum(bound.block_bytes) * 6 == bound.memory.cache


@pytest.mark.parametrize("name", OPEN)
def test_what_is_no_content_changes_nothing(name: str) -> None:
    backend = OPEN[name](1)
    executable = bind(backend, plan("F32", MODEL), rows=COUNT)
    Driver(executable).step([(0, tokens(COUNT))])
    numbers = np.array([0, 1])
    before = executable.read_blocks(1, numbers)
    spoilt = before.copy()
    spoilt[1, :4] = 0xFF, 0x7F, 0xFF, 0x7F  # NaN in every float format
    for content, message in (
        (spoilt, "not finite"),
        (before[:, :-1], f"2 blocks of {before.shape[1]} bytes are expected"),
        (before[:1], "2 blocks of"),
        (before.astype(np.uint16), "2 blocks of"),
    ):
        with pytest.raises(BackendError, match=message):
            executable.write_blocks(1, numbers, content)
    for wrong in (np.array([0, 8]), np.array([-1, 0]), np.array([[0, 1]]), np.array([0.0, 1.0])):
        with pytest.raises(BackendError, match="block numbers below 8"):
            executable.write_blocks(1, wrong, before)
        with pytest.raises(BackendError, match="block numbers below 8"):
            executable.read_blocks(1, wrong)
        with pytest.raises(BackendError, match="block numbers below 8"):
            executable.copy_blocks(wrong, numbers)
    assert (executable.read_blocks(1, numbers) == before).all()
    backend.close()

"""Attention over a sliding window and pooled positions on the CPU: close to the reference, and with
reproducible bits.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from localllm.backends.base import F16_CACHE, BackendError, CacheTypes, Executable, Limits
from localllm.backends.cache import CACHE_TYPES
from localllm.backends.cpu.backend import CpuBackend
from localllm.backends.reference import ReferenceBackend
from localllm.plan import BLOCK, CacheLayer, Plan
from tests.backends.attending import attend, attention_slack
from tests.backends.cases import VOCABULARY
from tests.backends.selecting import POOLING, Pooling, attend_pools, rows_of
from tests.backends.support import bind, check_company, record
from tests.backends.test_selection import STEPS, batches
from tests.models.support import Driver, MemoryWeight

# Positions: the last position completes a pool of 4, the only entry of a third partition with a window of 33.
LONG = 1920
# The window and the selected pools together exceed a partition.
MANY = replace(POOLING[0], heads=replace(POOLING[0].heads, window=40), count=220)
MORE = [(POOLING[0], CacheTypes(name, name)) for name in CACHE_TYPES if name != "f16"]


def plan_of(p: Pooling) -> Plan:
    return record(MemoryWeight.of("table", rows_of(p, VOCABULARY)), attend_pools(p))


@pytest.mark.parametrize(("p", "cache"), [*((p, F16_CACHE) for p in POOLING), *MORE], ids=str)
def test_attention_is_that_of_the_reference(cpu: CpuBackend, p: Pooling, cache: CacheTypes) -> None:
    plan, values = plan_of(p), rows_of(p, VOCABULARY)[:, : sum(p.heads.widths)]
    ours, theirs = (Driver(bind(b, plan, rows=128, cache=cache), sequences=2) for b in (cpu, ReferenceBackend()))
    slack = attention_slack(values, p.heads, p.listed(127), CACHE_TYPES[cache.values].blocks)
    for batch in batches(STEPS):
        np.testing.assert_allclose(ours.step(batch), theirs.step(batch), rtol=0, atol=slack)
    for driver in (ours, theirs):
        driver.executable.copy_blocks(driver.tables[0, :2], driver.tables[1, :2])
        driver.lengths = [driver.lengths[0], 2 * BLOCK - 5]
    (batch,) = batches([[(1, 30), (0, 2)]])
    np.testing.assert_allclose(ours.step(batch), theirs.step(batch), rtol=0, atol=slack)


@pytest.mark.parametrize("p", [POOLING[0], POOLING[3]], ids=str)
def test_a_row_that_sees_no_pool_has_the_bits_of_a_window(cpu: CpuBackend, p: Pooling) -> None:
    """No pool is complete at these positions and the window covers all of them, so the result equals
    sliding-window attention.
    """
    wide = replace(p, heads=replace(p.heads, window=p.every))
    tokens = np.random.RandomState(2).randint(0, VOCABULARY, p.every - 1)
    plain = record(MemoryWeight.of("table", rows_of(p, VOCABULARY)), attend(wide.heads))
    found = [Driver(bind(cpu, plan, rows=128)).step([(0, tokens)]) for plan in (plan_of(wide), plain)]
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("name", ["f16", "q8_0", "q5_1"])
@pytest.mark.parametrize("p", [MANY, *POOLING[2:5], *POOLING[6:]], ids=str)
def test_threads_chunks_and_mates_change_nothing(backends: list[CpuBackend], p: Pooling, name: str) -> None:
    """Threads, chunk sizes and other sequences do not change the bits. A long prompt runs at once, then its last tokens
    run again in batches whose work is shared between threads.
    """
    plan, cache = plan_of(p), CacheTypes(name, name)
    tokens = np.random.RandomState(1).randint(0, VOCABULARY, LONG)
    truth = check_company(backends, plan, cache, tokens)
    assert len(np.unique(truth[:, 0])) > LONG // 2


@pytest.mark.parametrize("p", [POOLING[0], POOLING[4], POOLING[6]], ids=str)
def test_blocks_are_read_and_written(cpu: CpuBackend, p: Pooling) -> None:
    """An executable continues from KV cache blocks that another executable stored. It refuses values that are not
    finite.
    """
    plan, tokens = plan_of(p), np.random.RandomState(1).randint(0, VOCABULARY, 180)
    for cache in (F16_CACHE, CacheTypes("q8_0", "q5_1")):
        for backend in (cpu, ReferenceBackend()):
            first, second = (Driver(bind(backend, plan, rows=200, cache=cache)) for _ in range(2))
            truth = first.step([(0, tokens[:130])]), first.step([(0, tokens[130:])])
            source: Executable = first.executable
            for layer in range(len(plan.layers)):
                content = source.read_blocks(layer, first.tables[0, :3])
                assert content.any()
                second.executable.write_blocks(layer, second.tables[0, :3], content)
                with pytest.raises(BackendError, match="not finite"):
                    second.executable.write_blocks(layer, second.tables[0, :3], np.full_like(content, 0xFF))
            second.lengths[0] = 130
            np.testing.assert_array_equal(second.step([(0, tokens[130:])]), truth[1])


def test_a_layer_of_pools_takes_a_share_of_the_memory(cpu: CpuBackend) -> None:
    """The memory includes the indexer's keys. A decode step reads the window, the selected pools, and the indexer keys
    of all pools.
    """
    p = POOLING[0]  # 4 positions per pool, 5 selected pools; keys and values of 24 and 16 elements of 2 bytes
    memory = cpu.bind(plan_of(p), Limits(8, 8, 10, 10 * BLOCK), F16_CACHE).memory
    of_row, of_key = 2 * (32 + 16), 2 * 20  # keys and values are padded to whole SIMD vectors
    assert memory.read_after(400) - memory.weights_per_token == 9 * of_row + 20 * of_row // 4 + 400 * of_key // 4
    blocks = [of_row * BLOCK, of_row * BLOCK // 4, of_key * BLOCK // 4]
    assert memory.cache == 10 * sum(blocks)
    everything = cpu.bind(plan_of(POOLING[4]), Limits(8, 8, 10, 10 * BLOCK), F16_CACHE).memory
    assert everything.read_after(400) - everything.weights_per_token == 40 * 128 + 400 * (128 // 100)
    shared = cpu.bind(plan_of(POOLING[6]), Limits(8, 8, 10, 10 * BLOCK), F16_CACHE).memory
    assert shared.cache == 10 * BLOCK * (2 * 96 + 2 * 96 // 4 + of_key // 4)  # values are stored as a part of the keys
    far = plan_of(POOLING[4]).layers[1]
    assert isinstance(far, CacheLayer)
    assert (far.every, far.selected, far.window) == (100, 0, 0)

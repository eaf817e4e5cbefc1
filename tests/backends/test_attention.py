"""Attention on the CPU backend against the reference backend, for every head shape and KV cache type."""

from __future__ import annotations

import numpy as np
import pytest

from localllm.backends.base import F16_CACHE, Backend, CacheTypes
from localllm.backends.cache import CACHE_TYPES
from localllm.backends.cpu.backend import CpuBackend
from localllm.backends.reference import ReferenceBackend
from localllm.plan import BLOCK
from tests.backends.attending import (
    BOTH_WAYS,
    CACHES,
    HEADS,
    MANY,
    WIDE,
    Heads,
    attend,
    attend_twice,
    attend_wanted,
    attention_slack,
)  # fmt: skip
from tests.backends.cases import VOCABULARY
from tests.backends.support import bind, feed, record
from tests.models.support import Driver, MemoryWeight


@pytest.mark.parametrize(("h", "cache"), [*((h, F16_CACHE) for h in HEADS + WIDE + MANY + BOTH_WAYS), *CACHES], ids=str)
def test_attention(cpu: CpuBackend, h: Heads, cache: CacheTypes) -> None:
    """Two sequences share batches, split at any token, over several blocks. Then one continues from a copy of the
    other's blocks.
    """
    values = np.random.RandomState(h.head_dim).standard_normal((VOCABULARY, sum(h.widths))).astype(np.float32)
    plan = record(MemoryWeight.of("table", values), attend(h))
    ours, theirs = (Driver(bind(b, plan, rows=128, cache=cache), sequences=2) for b in (cpu, ReferenceBackend()))
    slack = attention_slack(values, h, 3 * BLOCK, CACHE_TYPES[cache.values].blocks)
    tokens = np.random.RandomState(1).randint(0, VOCABULARY, 400)
    steps = [[(0, 1)], [(0, 5), (1, 3)], [(1, 1), (0, 1)], [(0, 70), (1, 40)], [(0, 1), (1, 1)], [(1, 17), (0, 50)]]

    def step(parts: list[tuple[int, int]], start: int) -> None:
        batch = [(s, tokens[start + 7 * s : start + 7 * s + count]) for s, count in parts]
        np.testing.assert_allclose(ours.step(batch), theirs.step(batch), rtol=0, atol=slack)

    for start, parts in enumerate(steps):
        step(parts, 31 * start)
    for driver in (ours, theirs):
        driver.executable.copy_blocks(driver.tables[0, :2], driver.tables[1, :2])
        driver.lengths = [driver.lengths[0], 2 * BLOCK - 5]
    step([(1, 30), (0, 2)], 300)


@pytest.mark.parametrize("name", [name for name, type_ in CACHE_TYPES.items() if type_.rotated])
def test_what_the_rotation_makes_too_large_is_clamped(cpu: CpuBackend, name: str) -> None:
    """The rotation turns a head of equal elements into a single nonzero element. It is larger by the square root of
    their number, and exceeds the range of the scale.
    """
    h, largest = Heads(1, 1, 512), CACHE_TYPES[name].largest
    values = np.zeros((VOCABULARY, sum(h.widths)), np.float32)
    values[:, h.widths[0] :] = -largest  # keys and values; zero queries give all positions the same weight
    plan, cache = record(MemoryWeight.of("table", values), attend(h)), CacheTypes(name, name)
    for backend in (cpu, ReferenceBackend()):
        found = feed(bind(backend, plan, cache=cache), np.arange(3))
        np.testing.assert_allclose(found, -largest / 512**0.5, rtol=0.05)


@pytest.mark.parametrize("h", [Heads(4, 2, 16), Heads(4, 2, 16, window=9)], ids=str)
def test_a_layer_may_read_the_cache_of_another(cpu: CpuBackend, h: Heads) -> None:
    """The error of the first attention changes the queries of the second, so the bound is ten times the bound
    for a single attention.
    """
    values = np.random.RandomState(6).standard_normal((VOCABULARY, 128)).astype(np.float32)
    plan = record(MemoryWeight.of("table", values), attend_twice(h))
    assert len(plan.layers) == 1
    tokens = np.random.RandomState(1).randint(0, VOCABULARY, 100)
    ours, theirs = (feed(bind(b, plan, rows=100), tokens, [30, 1]) for b in (cpu, ReferenceBackend()))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=10 * attention_slack(values, h, 2 * BLOCK))


WANTED = (  # of 60 tokens of one sequence and 20 of another: all, none, few, out of order, repeated
    list(range(80)), [], [79], [3, 17, 59, 60, 61], [70, 2, 40, 1], [33] * 30, [*range(79, 40, -1)],
)  # fmt: skip


def wanted_rows(backend: Backend, h: Heads, early: bool, cache: CacheTypes = F16_CACHE) -> list[np.ndarray]:
    """Return the results of `attend_wanted` for each entry of WANTED, after a block of other positions."""
    width = (h.heads + 2 * h.kv_heads) * h.head_dim
    values = np.random.RandomState(6).standard_normal((VOCABULARY, width)).astype(np.float32)
    tokens, found = np.random.RandomState(1).randint(0, VOCABULARY, 180), []
    plan = record(MemoryWeight.of("table", values), attend_wanted(h, early))
    for wanted in WANTED:
        driver = Driver(bind(backend, plan, rows=100, cache=cache), sequences=2)
        driver.step([(0, tokens[:70]), (1, tokens[70:100])], logit_rows=[])
        found.append(driver.step([(0, tokens[100:160]), (1, tokens[160:])], logit_rows=wanted))
        driver.executable.close()
    return found


@pytest.mark.parametrize("cache", [F16_CACHE, CacheTypes("q8_0", "q8_0")], ids=str)
@pytest.mark.parametrize("h", [Heads(4, 2, 16), Heads(4, 1, 32, window=9)], ids=str)
def test_rows_that_are_wanted_keep_their_positions(cpu: CpuBackend, h: Heads, cache: CacheTypes) -> None:
    """The results have the same bits whether tokens are selected before rotation and attention or after."""
    for early, late in zip(wanted_rows(cpu, h, True, cache), wanted_rows(cpu, h, False, cache), strict=True):
        np.testing.assert_array_equal(early, late)


@pytest.mark.parametrize("cache", [F16_CACHE, CacheTypes("q8_0", "q8_0")], ids=str)
@pytest.mark.parametrize("heads", [37, 263])
def test_a_head_among_many_has_the_bits_that_it_has_alone(cpu: CpuBackend, heads: int, cache: CacheTypes) -> None:
    """Kernels unroll few query heads per KV head and loop over many. Both versions give a head the same bits."""
    h = Heads(heads, 1, 8)
    values = np.random.RandomState(8).standard_normal((VOCABULARY, (heads + 2) * 8)).astype(np.float32)

    def run(h: Heads, columns: np.ndarray) -> np.ndarray:
        plan = record(MemoryWeight.of("table", np.ascontiguousarray(values[:, columns])), attend(h))
        driver = Driver(bind(cpu, plan, rows=128, cache=cache))
        return np.concatenate([driver.step([(0, np.arange(count) % VOCABULARY)]) for count in (1, 90, 1)])

    together = run(h, np.arange(values.shape[1]))
    for head in (0, 1, heads // 2, heads - 1):
        own = np.r_[head * 8 : head * 8 + 8, heads * 8 : heads * 8 + 16]
        np.testing.assert_array_equal(run(Heads(1, 1, 8), own), together[:, head * 8 : head * 8 + 8])


@pytest.mark.parametrize("name", [name for name, type_ in CACHE_TYPES.items() if type_.blocks])
def test_a_sink_coarsens_no_other_weight(cpu: CpuBackend, name: str) -> None:
    """One position, an attention sink, takes nearly all weight and has a value near zero, like the first token of a
    text.

    The other weights are rounded relative to their own sum, so the result is as exact as without the sink.
    """
    values = np.random.RandomState(0).standard_normal((8, 96)).astype(np.float32)
    values[:, :64] = 0.0
    values[:, 0] = 1.0  # queries
    values[0, 32], values[0, 64:] = 7.0 * 32**0.5, 1e-6  # the sink's weight is 1100 times any other
    plan = record(MemoryWeight.of("table", values), attend(Heads(1, 1, 32)))
    tokens = np.concatenate([[0], np.random.RandomState(1).randint(1, 8, 40)])
    ours, theirs = (feed(bind(b, plan, cache=CacheTypes("f16", name)), tokens)[40] for b in (cpu, ReferenceBackend()))
    assert np.abs(theirs).max() < 0.05
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-4 * np.abs(theirs).max())


def test_large_keys_and_values_stay_in_the_range_of_halves(cpu: CpuBackend) -> None:
    """float16 ends at 65504. Larger values are clamped and not stored as infinity, so the result stays finite."""
    values = np.zeros((4, 24), np.float32)
    values[:, 16:] = np.array([1e6, -1e6, 65504, 3.0])[:, None]
    executable = bind(cpu, record(MemoryWeight.of("table", values), attend(Heads(1, 1, 8))))
    rows = feed(executable, np.arange(4))
    np.testing.assert_allclose(rows[:, 0], [65504, 0, 65504 / 3, 65507 / 4], rtol=1e-6)

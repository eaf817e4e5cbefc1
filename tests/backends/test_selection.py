"""Sparse attention over positions that an indexer selects, on the CPU: close to the reference, with
reproducible bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from localllm.backends.base import F16_CACHE, BackendError, CacheTypes, Executable
from localllm.backends.cache import CACHE_TYPES
from localllm.backends.cpu.backend import CpuBackend
from localllm.backends.reference import ReferenceBackend
from localllm.plan import BLOCK
from tests.backends.attending import Heads, attend, attention_slack
from tests.backends.cases import VOCABULARY
from tests.backends.selecting import SELECTING, Selecting, attend_selected, rows_of, select
from tests.backends.support import Build, bind, check_company, record
from tests.models.support import Driver, MemoryWeight

STEPS = [[(0, 1)], [(0, 5), (1, 3)], [(1, 1), (0, 1)], [(0, 70), (1, 40)], [(0, 1), (1, 1)], [(1, 17), (0, 50)]]
MORE = [(SELECTING[0], CacheTypes(name, name)) for name in CACHE_TYPES if name != "f16"]


def drivers(s: Selecting, build: Build, cache: CacheTypes, *backends: object) -> list[Driver]:
    plan = record(MemoryWeight.of("table", rows_of(s, VOCABULARY)), build)
    return [Driver(bind(b, plan, rows=128, cache=cache), sequences=2) for b in backends]  # type: ignore[arg-type]


def batches(steps: list[list[tuple[int, int]]]) -> Iterator[list[tuple[int, np.ndarray]]]:
    tokens = np.random.RandomState(1).randint(0, VOCABULARY, 400)
    for start, parts in enumerate(steps):
        yield [(s, tokens[31 * start + 7 * s : 31 * start + 7 * s + count]) for s, count in parts]


@pytest.mark.parametrize(("s", "cache"), [*((s, F16_CACHE) for s in SELECTING), *MORE], ids=str)
def test_the_selection_is_that_of_the_reference(cpu: CpuBackend, s: Selecting, cache: CacheTypes) -> None:
    """Both backends select the same positions. Among equal scores of a repeated token, the first position wins."""
    ours, theirs = drivers(s, select(s), cache, cpu, ReferenceBackend())
    seen: list[float] = []
    for batch in batches(STEPS):
        found = theirs.step(batch)
        np.testing.assert_array_equal(ours.step(batch), found)
        seen += [float(count) for count in found.reshape(len(found), s.groups, -1)[:, :, 0].reshape(-1)]
    assert max(seen) <= s.most < 126


FAR = [  # contexts of several blocks of positions, and tokens whose scores are computed together
    Selecting(Heads(4, 2, 16), 2, 16, 2, 128, 1, weighted=False),
    Selecting(Heads(2, 1, 20), 1, 7, 2, 64, 0, weighted=False),
    Selecting(Heads(3, 3, 16), 3, 16, 1, 192, 0, weighted=False),
    Selecting(Heads(4, 1, 24), 33, 20, 90),
    Selecting(Heads(4, 1, 24), 9, 20, 100),
]


@pytest.mark.parametrize("cache", [F16_CACHE, CacheTypes("q8_0", "q8_0")], ids=str)
@pytest.mark.parametrize("s", FAR, ids=str)
def test_far_positions_are_selected_as_by_the_reference(cpu: CpuBackend, s: Selecting, cache: CacheTypes) -> None:
    plan = record(MemoryWeight.of("table", rows_of(s, 500)), select(s))
    ours, theirs = (Driver(bind(b, plan, rows=300, blocks=18, cache=cache), 2) for b in (cpu, ReferenceBackend()))
    tokens = np.random.RandomState(3).randint(0, 500, 1000)
    at, seen = 0, set()
    for parts in ([(0, 215)], [(1, 131), (0, 97)], [(0, 1), (1, 1)], [(1, 38)], [(0, 70), (1, 45)], [(1, 7), (0, 3)]):
        batch = []
        for sequence, count in parts:
            batch.append((sequence, tokens[at : at + count]))
            at += count
        found = theirs.step(batch)
        np.testing.assert_array_equal(ours.step(batch), found)
        seen |= {tuple(row) for row in found}
    assert len(seen) > 100, "rows select the same positions"


@pytest.mark.parametrize("cache", [F16_CACHE, CacheTypes("q8_0", "q5_1")], ids=str)
@pytest.mark.parametrize("s", FAR[:3], ids=str)
def test_attention_reads_whole_blocks_where_they_are(cpu: CpuBackend, s: Selecting, cache: CacheTypes) -> None:
    """Blocks of positions that are cache blocks are read in place. The batches and block tables are the same
    as in the previous test.
    """
    plan = record(MemoryWeight.of("table", rows_of(s, 500)), attend_selected(s))
    ours, theirs = (Driver(bind(b, plan, rows=300, blocks=18, cache=cache), 2) for b in (cpu, ReferenceBackend()))
    values = rows_of(s, 500)[:, : sum(s.heads.widths)]
    slack = attention_slack(values, s.heads, s.most, CACHE_TYPES[cache.values].blocks)
    for batch in batches([[(0, 215)], [(1, 131), (0, 97)], [(0, 1), (1, 1)], [(1, 38)], [(0, 70), (1, 45)], [(0, 3)]]):
        np.testing.assert_allclose(ours.step(batch), theirs.step(batch), rtol=0, atol=slack)


@pytest.mark.parametrize("name", CACHE_TYPES)
def test_values_that_begin_the_keys_are_stored_once(cpu: CpuBackend, name: str) -> None:
    """Values that are a prefix of the keys need no memory and give the same bits as separate values. Cache types that
    rotate heads by their width still store both.
    """
    s, cache = replace(SELECTING[3], heads=Heads(5, 1, 576, value_dim=512)), CacheTypes(name, name)
    bound = []
    for values in ("copied", "prefix"):
        plan = record(MemoryWeight.of("table", rows_of(s, VOCABULARY)), attend_selected(s, values))
        bound.append(bind(cpu, plan, rows=128, cache=cache))
    apart, once = (Driver(executable, sequences=2) for executable in bound)
    for batch in batches(STEPS):
        np.testing.assert_array_equal(once.step(batch), apart.step(batch))
    sizes = [executable.block_bytes[1] for executable in bound]
    assert sizes[1] == sizes[0] if CACHE_TYPES[name].rotated else 17 * sizes[1] == 9 * sizes[0]
    assert (bound[0].cache_layout == bound[1].cache_layout) == CACHE_TYPES[name].rotated


@pytest.mark.parametrize(("s", "cache"), [*((s, F16_CACHE) for s in SELECTING), *MORE], ids=str)
def test_attention_reads_what_is_selected(cpu: CpuBackend, s: Selecting, cache: CacheTypes) -> None:
    ours, theirs = drivers(s, attend_selected(s), cache, cpu, ReferenceBackend())
    values = rows_of(s, VOCABULARY)[:, : sum(s.heads.widths)]
    slack = attention_slack(values, s.heads, s.most, CACHE_TYPES[cache.values].blocks)
    for batch in batches(STEPS):
        np.testing.assert_allclose(ours.step(batch), theirs.step(batch), rtol=0, atol=slack)
    for driver in (ours, theirs):
        driver.executable.copy_blocks(driver.tables[0, :2], driver.tables[1, :2])
        driver.lengths = [driver.lengths[0], 2 * BLOCK - 5]
    (batch,) = batches([[(1, 30), (0, 2)]])
    np.testing.assert_allclose(ours.step(batch), theirs.step(batch), rtol=0, atol=slack)


@pytest.mark.parametrize(
    ("s", "name"), [*((SELECTING[0], name) for name in CACHE_TYPES), (SELECTING[3], "f16"), (SELECTING[4], "q8_0"),
                    *((s, "f16") for s in SELECTING[9:])],
    ids=str,
)  # fmt: skip
def test_who_selects_everything_has_the_bits_of_who_selects_nothing(cpu: CpuBackend, s: Selecting, name: str) -> None:
    """A selection of all positions gives the bits of full attention, over several partitions, in prefill and decode.
    The cache layout (rows or panels) does not change the bits.
    """
    everything, cache = replace(s, count=-(-640 // s.block)), CacheTypes(name, name)
    plan = record(MemoryWeight.of("table", rows_of(s, VOCABULARY)), attend(s.heads))
    plain = Driver(bind(cpu, plan, rows=128, blocks=10, cache=cache))
    chosen = record(MemoryWeight.of("table", rows_of(s, VOCABULARY)), attend_selected(everything))
    every = Driver(bind(cpu, chosen, rows=128, blocks=10, cache=cache))
    tokens = np.random.RandomState(2).randint(0, VOCABULARY, 400)
    for start, stop in ((0, 1), (1, 100), (100, 120), (120, 240), (240, 241), (241, 360), (360, 361)):
        batch = [(0, tokens[start:stop])]
        np.testing.assert_array_equal(every.step(batch), plain.step(batch))


LONG = 1400  # positions: two tasks of the indexer


@pytest.mark.parametrize("name", ["f16", "q8_0", "q5_1"])
@pytest.mark.parametrize(
    "s",
    [
        replace(SELECTING[0], count=300),
        SELECTING[4],
        SELECTING[7],
        replace(SELECTING[9], count=300),
        SELECTING[10],
        FAR[0],
    ],
    ids=str,
)
def test_threads_chunks_and_mates_change_nothing(backends: list[CpuBackend], s: Selecting, name: str) -> None:
    """Threads, chunk sizes and other sequences do not change the bits. A long prompt runs at once, then its last tokens
    run again in batches whose work is shared between threads.
    """
    plan, cache = record(MemoryWeight.of("table", rows_of(s, VOCABULARY)), attend_selected(s)), CacheTypes(name, name)
    tokens = np.random.RandomState(1).randint(0, VOCABULARY, LONG)
    truth = check_company(backends, plan, cache, tokens)
    assert len(np.unique(truth[:, 0])) > LONG // 2


def test_blocks_are_read_and_written(cpu: CpuBackend) -> None:
    """An executable continues from KV cache blocks that another executable stored. It refuses values that are not
    finite.
    """
    s = SELECTING[2]
    for cache in (F16_CACHE, CacheTypes("q8_0", "q5_1")):
        (first, second) = drivers(s, attend_selected(s), cache, cpu, cpu)
        tokens = np.random.RandomState(1).randint(0, VOCABULARY, 150)
        truth = first.step([(0, tokens[:100])]), first.step([(0, tokens[100:])])
        source: Executable = first.executable
        for layer in range(2):
            content = source.read_blocks(layer, first.tables[0, :2])
            assert content.any()
            second.executable.write_blocks(layer, second.tables[0, :2], content)
            with pytest.raises(BackendError, match="not finite"):
                second.executable.write_blocks(layer, second.tables[0, :2], np.full_like(content, 0xFF))
        second.lengths[0] = 100
        np.testing.assert_array_equal(second.step([(0, tokens[100:])]), truth[1])

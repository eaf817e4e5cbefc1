"""KV cache types on a device: the device stores the bytes that `backends.cache` defines.

Attention is bitwise identical regardless of batch composition, and blocks can be read and restored.
"""

from __future__ import annotations

import numpy as np
import pytest

from localllm.backends.base import Backend, BackendError, CacheTypes
from localllm.backends.cache import CACHE_TYPES, store
from localllm.backends.gpu.cachetypes import CACHE, GROUP, CacheRow
from localllm.plan import BLOCK, Plan
from tests.backends.attending import Heads, attend
from tests.backends.cases import VOCABULARY
from tests.backends.support import bind, record
from tests.models.support import Driver, MemoryWeight


def rows_of(row: CacheRow, content: np.ndarray, head: int, keys: bool) -> np.ndarray:
    """Return blocks, uint8 (n, bytes of one head), as heads in the bytes of their format: (n, BLOCK, head bytes)."""
    words, groups = row.words(head), row.size(head) // GROUP
    body, scales = np.split(content.reshape(len(content), -1), [4 * BLOCK * words], axis=1)
    body = body.reshape(-1, words, BLOCK, 4).transpose(0, 2, 1, 3) if keys else body.reshape(-1, BLOCK, words, 4)
    if not row.type.blocks:
        return body.reshape(-1, BLOCK, 4 * words)[:, :, : row.type.head_bytes(head)]
    body = body.reshape(-1, BLOCK, groups, 4 * words // groups)
    if not row.scaled:
        return body.reshape(-1, BLOCK, 4 * words)
    scales = scales.reshape(-1, groups, BLOCK, 2).swapaxes(1, 2) if keys else scales.reshape(-1, BLOCK, groups, 2)
    return np.concatenate([scales, body], axis=3).reshape(len(content), BLOCK, -1)


def plan_of(h: Heads, values: np.ndarray) -> Plan:
    return record(MemoryWeight.of("table", values), attend(h))


@pytest.mark.parametrize("name", CACHE_TYPES)
@pytest.mark.parametrize("head", [20, 64, 96])
def test_stored_bytes_are_the_defined_ones(gpu: Backend, name: str, head: int) -> None:
    """The stored keys and values have every magnitude, including NaN and values beyond the range of the cache type."""
    h = Heads(2, 2, head)
    random = np.random.RandomState(head)
    values = random.standard_normal((VOCABULARY, 6 * head)) * 10.0 ** random.randint(-3, 3, (VOCABULARY, 1))
    values = values.astype(np.float32)
    values[3], values[4, ::2] = 0.0, 1e-30
    values[5, 4 * head + 1], values[6, 2 * head + 2] = 3e38, -1e6
    executable = bind(gpu, plan_of(h, values), cache=CacheTypes(name, name))
    Driver(executable).step([(0, np.arange(VOCABULARY))])
    row, content = CACHE[name], executable.read_blocks(0, np.array([0]))
    parts = np.split(content[0], 2)
    for part, at, keys in zip(parts, (2, 4), (True, False), strict=True):
        found = rows_of(row, part.reshape(2, -1), head, keys)[:, :VOCABULARY]  # (kv heads, tokens, bytes)
        heads = values[:, at * head : (at + 2) * head].reshape(-1, 2, head)
        np.testing.assert_array_equal(found.swapaxes(0, 1), store(heads, CACHE_TYPES[name]))


@pytest.mark.parametrize("name", CACHE_TYPES)
def test_blocks_move_and_what_is_no_number_does_not(gpu: Backend, name: str) -> None:
    h = Heads(4, 2, 40)
    values = np.random.RandomState(3).standard_normal((VOCABULARY, 320)).astype(np.float32)
    plan, cache = plan_of(h, values), CacheTypes(name, name)
    first, second = (Driver(bind(gpu, plan, cache=cache)) for _ in range(2))
    first.step([(0, np.arange(30))])
    numbers = first.tables[0, :1]
    content = first.executable.read_blocks(0, numbers)
    assert content.shape[1] == first.executable.block_bytes[0]
    assert first.executable.memory.cache == content.shape[1] * first.executable.limits.blocks
    second.executable.write_blocks(0, numbers, content)
    second.lengths = [30]
    np.testing.assert_array_equal(first.step([(0, [7])]), second.step([(0, [7])]))
    if CACHE[name].infinite:
        for at in (0, content.shape[1] // 2):  # keys, then values: set all bits of the first scales or elements
            size = content.shape[1] // 4
            spoilt = content.copy()
            scales = 4 * BLOCK * CACHE[name].words(40) if CACHE[name].scaled else 0
            spoilt[0, at + scales : at + scales + 4] = 0xFF
            assert scales < size
            with pytest.raises(BackendError, match="not finite"):
                second.executable.write_blocks(0, numbers, spoilt)


IN_COMPANY = CacheTypes("q8_0", "q4_0"), CacheTypes("q5_1", "fp8"), CacheTypes("f32", "f32")


@pytest.mark.parametrize("cache", IN_COMPANY, ids=str)
def test_decoding_a_quantized_cache_gives_the_same_bits_in_any_company(gpu: Backend, cache: CacheTypes) -> None:
    """The bits of a decoded token do not depend on the other sequences in the batch. The sequence is longer than a
    partition, with and without sliding-window attention.
    """
    for h in (Heads(6, 2, 32), Heads(4, 2, 32, window=90)):
        values = np.random.RandomState(3).standard_normal((VOCABULARY, 32 * (h.heads + 4))).astype(np.float32)
        tokens = np.random.RandomState(2).randint(0, VOCABULARY, 400)
        results = []
        for company in ([], [(1, 3)], [(1, 40), (2, 1)]):
            driver = Driver(bind(gpu, plan_of(h, values), 300, 15, cache), sequences=3)
            driver.step([(0, tokens[:254])])
            rows = []
            for at in range(4):
                parts = [(s, tokens[at * n : at * n + n]) for s, n in company]
                rows.append(driver.step([*parts, (0, tokens[254 + at : 255 + at])])[-1])
            results.append(np.array(rows))
        for other in results[1:]:
            np.testing.assert_array_equal(other, results[0])

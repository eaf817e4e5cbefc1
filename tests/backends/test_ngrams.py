"""Embeddings of n-grams: their hashes worked out text by text, and ids of a damaged cache."""

from __future__ import annotations

import numpy as np
import pytest

from localllm.backends.base import Backend
from localllm.backends.cpu.backend import CpuBackend
from localllm.backends.reference import ReferenceBackend
from localllm.plan import Plan, Recorder
from tests.backends.support import bind, feed
from tests.models.support import Driver, MemoryWeight

END, MULTIPLIERS, SIZES, FIRSTS = 2, (1_000_003, 7 << 50, 31), (5, 7, 11, 13), (1, 6, 13, 24)
TABLE = np.arange(40.0 * 3, dtype=np.float32).reshape(40, 3)


def plan() -> Plan:
    r = Recorder()
    return r.finish(r.embed_ngrams(MemoryWeight.of("table", TABLE), MULTIPLIERS, SIZES, FIRSTS, END))


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest, cpu: CpuBackend) -> Backend:
    return cpu if request.param == "cpu" else ReferenceBackend()


def by_hand(tokens: list[int]) -> np.ndarray:
    """A text ends with END; what comes before its beginning is END again."""
    texts: list[list[int]] = [[]]
    rows = []
    for token in tokens:
        one, two, three = ([END, END, *texts[-1], token])[-3:][::-1]
        pair = one * MULTIPLIERS[0] ^ two * MULTIPLIERS[1]
        triple = pair ^ three * MULTIPLIERS[2]
        hashes = (pair, pair, triple, triple)
        found = [TABLE[first + each % size] for each, size, first in zip(hashes, SIZES, FIRSTS, strict=True)]
        rows.append(np.concatenate(found))
        texts[-1].append(token)
        if token == END:
            texts.append([])
    return np.array(rows)


@pytest.mark.parametrize("sizes", [[], [1] * 150, [3, 61, 64]])
def test_n_grams_reach_back_to_the_beginning_of_a_text(backend: Backend, sizes: list[int]) -> None:
    tokens = np.random.RandomState(1).randint(0, 12, 150)
    np.testing.assert_array_equal(feed(bind(backend, plan(), rows=150), tokens, sizes), by_hand(tokens.tolist()))


@pytest.mark.parametrize("number", [-5.0, 1e30, 0.5])
def test_ids_of_a_damaged_cache_lead_to_rows_of_the_table(backend: Backend, number: float) -> None:
    bound = bind(backend, plan(), rows=70)
    driver = Driver(bound)
    driver.step([(0, np.zeros(64, np.int32))])
    content = np.full(bound.block_bytes[0] // 4, number, np.float32).view(np.uint8)[None]
    bound.write_blocks(0, np.array([0]), content)
    assert np.isin(driver.step([(0, np.array([1]))]), TABLE).all()

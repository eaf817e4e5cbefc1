"""N-gram embeddings: hashes never span two texts, and a step reads only the table rows it needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from localllm import quant
from localllm.backends.base import Backend, BackendError, Executable
from localllm.backends.cpu.backend import CpuBackend
from localllm.backends.reference import ReferenceBackend
from localllm.plan import Batch, Plan, Recorder
from tests.backends.gpu.conftest import pocl
from tests.backends.support import bind, feed
from tests.models.support import Driver, MemoryWeight

END, MULTIPLIERS, SIZES, FIRSTS = 2, (1_000_003, 7 << 50, 31), (5, 7, 11, 13), (1, 6, 13, 24)
TABLE = np.arange(40.0 * 3, dtype=np.float32).reshape(40, 3)


@dataclass(frozen=True)
class Counted(MemoryWeight):
    """A tensor that records which rows are read."""

    read_rows: list[int] = field(default_factory=list)

    def read(self, start: int, stop: int) -> np.ndarray:
        self.read_rows.extend(range(start, stop))
        return super().read(start, stop)


def counted() -> Counted:
    return Counted("table", "F32", TABLE.shape, quant.quantize(TABLE, "F32"))


def plan(table: MemoryWeight | None = None, scaled: bool = False) -> Plan:
    """Return a plan of n-gram embeddings.

    With `scaled`, they are added to 6 times the token ids, whose buffers are freed first.
    """
    r = Recorder()
    if not scaled:
        return r.finish(r.embed_ngrams(table or counted(), MULTIPLIERS, SIZES, FIRSTS, END))
    width = len(SIZES) * TABLE.shape[1]
    x = r.embed(MemoryWeight.of("embedding", np.outer(np.arange(12), np.ones(width))))
    x = r.add(r.scale(x, 5.0), x)
    return r.finish(r.add(x, r.embed_ngrams(table or counted(), MULTIPLIERS, SIZES, FIRSTS, END)))


@pytest.fixture(scope="module", params=["reference", "cpu", "gpu"])
def backend(request: pytest.FixtureRequest, cpu: CpuBackend) -> Iterator[Backend]:
    opened = cpu if request.param == "cpu" else ReferenceBackend() if request.param == "reference" else pocl()
    yield opened
    if request.param == "gpu":
        opened.close()


def rows_by_hand(tokens: list[int]) -> np.ndarray:
    """Return the expected rows of the table. END separates texts, and also fills the positions before a text."""
    texts: list[list[int]] = [[]]
    rows = []
    for token in tokens:
        one, two, three = ([END, END, *texts[-1], token])[-3:][::-1]
        pair = one * MULTIPLIERS[0] ^ two * MULTIPLIERS[1]
        triple = pair ^ three * MULTIPLIERS[2]
        hashes = (pair, pair, triple, triple)
        rows.append([first + each % size for each, size, first in zip(hashes, SIZES, FIRSTS, strict=True)])
        texts[-1].append(token)
        if token == END:
            texts.append([])
    return np.array(rows)


def by_hand(tokens: list[int]) -> np.ndarray:
    return TABLE[rows_by_hand(tokens)].reshape(len(tokens), -1)


@pytest.mark.parametrize("sizes", [[], [1] * 150, [3, 61, 64]])
def test_n_grams_reach_back_to_the_beginning_of_a_text(backend: Backend, sizes: list[int]) -> None:
    tokens = np.random.RandomState(1).randint(0, 12, 150)
    np.testing.assert_array_equal(feed(bind(backend, plan(), rows=150), tokens, sizes), by_hand(tokens.tolist()))


def test_sequences_in_one_step_look_back_at_their_own_tokens(backend: Backend) -> None:
    """Long chunks run together with decoded tokens and a rewound sequence. A GPU runs the chunks in parts."""
    driver, random = (
        Driver(bind(backend, plan(scaled=True), rows=150, blocks=12), sequences=4),
        np.random.RandomState(2),
    )
    texts: list[list[int]] = [[] for _ in range(4)]
    for counts in ([1, 40, 3, 20], [5, 1, 30, 1], [1, 1, 1, 1], [20, 1, 2, 19]):
        parts = [(s, random.randint(0, 12, count).tolist()) for s, count in enumerate(counts)]
        for s, more in parts:
            texts[s] += more
        own = [6.0 * np.array(texts[s])[:, None] + by_hand(texts[s]) for s in range(4)]
        expected = np.concatenate([rows[-count:] for rows, count in zip(own, counts, strict=True)])
        np.testing.assert_array_equal(driver.step(parts), expected)
        driver.lengths[1] -= 1
        del texts[1][-1]


def test_only_the_rows_that_a_step_needs_are_read_and_each_of_them_once(cpu: CpuBackend) -> None:
    table, tokens = counted(), np.random.RandomState(1).randint(0, 12, 9).tolist()
    driver, expected = Driver(bind(cpu, plan(table))), rows_by_hand(tokens)
    assert table.read_rows == []
    for start, stop in ((0, 8), (8, 9)):
        driver.step([(0, tokens[start:stop])])
        assert table.read_rows == sorted(set(expected[start:stop].ravel().tolist()))
        table.read_rows.clear()


def test_the_table_takes_no_memory(backend: Backend) -> None:
    bound, table = bind(backend, plan()), counted()
    assert (bound.memory.weights, bound.memory.weights_per_token) == (0, 0)
    assert plan(table).weights == {}
    assert [(read.weight.tensor, read.used, read.of) for read in plan(table).lookups] == [("table", len(SIZES), 40)]
    bound.close()


def step_of(tokens: list[int], positions: list[int], **others: object) -> Batch:
    numbers = np.array(positions, np.int32)
    batch = Batch(
        np.array(tokens, np.int32), numbers, numbers, 0 * numbers, np.zeros((1, 1), np.int32), numbers[:1] * 0
    )
    return replace(batch, **others)  # type: ignore[arg-type]


@pytest.mark.parametrize("histories", [None, [], [[5, 7]], [[5, 7, 8]], [[5, 7, 9], [5]]])
def test_a_batch_without_its_tokens_is_refused(backend: Backend, histories: list[list[int]] | None) -> None:
    bound = bind(backend, plan(scaled=True))
    with pytest.raises(BackendError, match="batch: histories must hold"):
        bound.step(step_of([7, 9], [1, 2], histories=histories))
    # A longer history than needed is allowed.
    assert bound.step(step_of([7, 9], [1, 2], histories=[[5, 7, 9, 1]])).shape[1] == 12
    bound.close()


def test_a_table_that_cannot_be_read_stops_a_step_before_it_begins(backend: Backend) -> None:
    """A failed table read must not change the KV cache or the result of the next step."""

    @dataclass(frozen=True)
    class Broken(MemoryWeight):
        broken: list[bool] = field(default_factory=list)

        def read(self, start: int, stop: int) -> np.ndarray:
            if self.broken:
                raise OSError("no disk")
            return super().read(start, stop)

    table = Broken("table", "F32", TABLE.shape, quant.quantize(TABLE, "F32"))
    bound: Executable = bind(backend, plan(table, scaled=True))
    driver = Driver(bound)
    first = driver.step([(0, [3, 4, 5])])
    table.broken.append(True)
    with pytest.raises(OSError, match="no disk"):
        driver.step([(0, [6])])
    table.broken.clear()
    driver.lengths[0] = 0
    np.testing.assert_array_equal(driver.step([(0, [3, 4, 5])]), first)
    bound.close()

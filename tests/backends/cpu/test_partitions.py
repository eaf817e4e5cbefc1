"""Attention split over many partitions gives bitwise identical results and KV cache contents with any number
of threads, for every KV cache type.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import numpy as np
import pytest

from localllm.backends.base import CacheTypes, Limits
from localllm.backends.cache import CACHE_TYPES, rotate_heads
from localllm.backends.cpu.backend import CpuBackend
from localllm.backends.cpu.kernels.attention import PARTITION, Work
from localllm.backends.cpu.kernels.attention_shape import AttentionShape
from localllm.backends.cpu.sharing import Sharing
from localllm.plan import BLOCK, Batch, Plan, Recorder, Value
from tests.backends.attending import Heads, attend
from tests.backends.cases import VOCABULARY
from tests.backends.cpu.test_instruction_sets import needs
from tests.backends.support import Build, bind, check_company, record
from tests.models.support import Driver, MemoryWeight

LONG = 2 * PARTITION * BLOCK + 100  # positions: two full partitions and part of a third
SHAPES = {
    "narrow values": Heads(4, 2, 48, value_dim=32),  # shares its compiled kernels with test_attention
    "one kv head": Heads(4, 1, 32),
    "window": Heads(4, 2, 32, window=300),
    "sinks": Heads(6, 2, 20, softcap=3.0, sinks=True),
    "pieces": Heads(64, 2, 20, sinks=True),
}


def plan_of(h: Heads) -> Plan:
    values = np.random.RandomState(3).standard_normal((VOCABULARY, sum(h.widths))).astype(np.float32)
    return record(MemoryWeight.of("table", values), attend(h))


# Every cache type once; sliding windows and sinks with float types and with block-quantized types.
SPLIT = [
    *(("narrow values", name) for name in CACHE_TYPES),
    *((shape, name) for shape in ("one kv head", "window", "sinks", "pieces") for name in ("f16", "q5_1")),
]


@pytest.mark.parametrize(("shape", "name"), SPLIT)
def test_threads_chunks_and_mates_change_nothing(backends: list[CpuBackend], shape: str, name: str) -> None:
    """Threads, chunk sizes and other sequences do not change the bits. A long prompt runs at once, then its last tokens
    run again in batches that are split over partitions.
    """
    plan, cache = plan_of(SHAPES[shape]), CacheTypes(name, name)
    tokens = np.random.RandomState(1).randint(0, VOCABULARY, LONG)
    check_company(backends, plan, cache, tokens)


def test_a_row_is_shared_out_and_a_prompt_is_not() -> None:
    """With few heads and a deep context, the attention of one token is split over many threads. With enough
    tasks, heads are not split.
    """
    limits = Limits(512, 16, 512, 512 * BLOCK)
    for kv_heads, threads, position, split, heads in (
        (1, 8, 100, 0, 1),
        (8, 2, 4 * PARTITION * BLOCK - 1, 1, 2),
        (8, 2, 100 * PARTITION * BLOCK, 1, 8),
        (1, 8, 100 * PARTITION * BLOCK, 1, 1),
    ):
        sharing = Sharing(AttentionShape(64, 64, 4, kv_heads), 0, limits, threads)
        one = np.array([position], np.int32)
        row = Batch(one, one, one, np.zeros(1, np.int32), np.zeros((1, 512), np.int32), one)
        sharing.fill(row, position)
        assert (sharing.work[Work.split], sharing.work[Work.heads]) == (split, heads)
        many = np.arange(position // 4 * 4, position // 4 * 4 + 512, dtype=np.int32)
        sharing.fill(
            replace(row, tokens=many, positions=many, slots=many, sequence=np.zeros(512, np.int32)), int(many[-1])
        )
        assert (sharing.work[Work.split], sharing.work[Work.tiles]) == (0, 128)


def test_query_heads_of_one_head_are_shared_out() -> None:
    """MLA has one KV head, whose query heads are split over the threads unless a batch has enough tokens."""
    shape, limits = AttentionShape(576, 512, 64, 1), Limits(512, 16, 512, 512 * BLOCK)
    for threads, position, split, heads in (
        (1, 100, 0, 4),
        (2, 100, 0, 2),
        (3, 100, 0, 2),
        (4, 100, 0, 1),
        (2, 3 * PARTITION * BLOCK - 1, 1, 2),
        (2, 8 * PARTITION * BLOCK - 1, 1, 4),
        (16, 8 * PARTITION * BLOCK - 1, 1, 2),
        (2, 100 * PARTITION * BLOCK, 1, 4),
    ):
        sharing, one = Sharing(shape, 0, limits, threads), np.array([position], np.int32)
        row = Batch(one, one, one, np.zeros(1, np.int32), np.zeros((1, 512), np.int32), one)
        sharing.fill(row, position)
        assert (sharing.work[Work.split], sharing.work[Work.heads]) == (split, heads)
        for many in (np.arange(count, dtype=np.int32) for count in (40, 512)):
            sharing.fill(replace(row, tokens=many, positions=many, slots=many, sequence=0 * many), len(many) - 1)
            assert (sharing.work[Work.split], sharing.work[Work.heads]) == (0, 4)


def test_a_piece_has_the_bits_of_its_heads_alone(backends: list[CpuBackend]) -> None:
    """Attention of 32 heads that read the same keys equals two attentions of 16 heads each, in prefill and with work
    shared between threads.
    """
    tokens = np.random.RandomState(1).randint(0, VOCABULARY, LONG)
    values = np.random.RandomState(3).standard_normal((VOCABULARY, 34 * 20)).astype(np.float32)

    def build(heads: int) -> Build:
        def attention(r: Recorder, x: Value) -> Value:
            k, v = (r.slice(x, (32 + n) * 20, (33 + n) * 20) for n in range(2))
            layer = r.append(k, v, 1)
            parts = [r.slice(x, at * 20, (at + heads) * 20) for at in range(0, 32, heads)]
            return reduce(r.concat, [r.attention(q, layer, heads, 0.2) for q in parts])

        return attention

    plans = [record(MemoryWeight.of("table", values), build(heads)) for heads in (32, 16)]
    ours, theirs = (Driver(bind(backends[1], plan, rows=LONG, blocks=LONG // BLOCK + 1)) for plan in plans)
    for count in (LONG - 40, 1, 1, 38):
        rows, tokens = tokens[:count], tokens[count:]
        np.testing.assert_array_equal(ours.step([(0, rows)]), theirs.step([(0, rows)]))


@pytest.mark.parametrize("name", CACHE_TYPES)
@pytest.mark.parametrize("isa", ["avx2", "generic"])
def test_every_instruction_set_gives_the_same_bits(backends: list[CpuBackend], isa: str, name: str) -> None:
    h = SHAPES["narrow values"]
    tokens = np.random.RandomState(1).randint(0, VOCABULARY, 70)
    other = CpuBackend(2, needs(isa))
    results = []
    for backend in (backends[1], other):
        bound = bind(backend, plan_of(h), rows=80, cache=CacheTypes(name, name))
        driver = Driver(bound)
        rows = [driver.step([(0, tokens[:60])]), driver.step([(0, tokens[60:])])]
        results.append((np.concatenate(rows).view(np.uint32), bound.read_blocks(0, np.arange(2))))
        bound.close()
    other.close()
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("head_dim", [1, 2, 20, 64, 96])
def test_the_rotation_is_orthogonal_and_its_own_inverse(head_dim: int) -> None:
    """If the size is a power of two, the rotation is Sylvester's Hadamard matrix divided by the square root of the
    size.
    """
    matrix = rotate_heads(np.eye(head_dim), head_dim)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(head_dim), atol=1e-12)
    np.testing.assert_allclose(matrix, matrix.T, atol=1e-12)
    size = head_dim & -head_dim
    signs = np.array([[1 - 2 * ((i & j).bit_count() % 2) for i in range(size)] for j in range(size)])
    np.testing.assert_allclose(matrix[:size, :size], signs / size**0.5, atol=1e-12)

"""The conformance table on a device: every operation is within the CPU backend's error bounds of the reference backend.
The bits of a decoded token are the same in any batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from localllm.backends.base import F16_CACHE, Backend, BackendError, CacheTypes
from localllm.backends.cache import CACHE_TYPES
from localllm.backends.gpu.kernels import products
from localllm.backends.gpu.kernels.kernel import FEW_ROWS
from localllm.backends.reference import ReferenceBackend
from localllm.plan import BLOCK, Experts, Linear, Plan
from tests.backends.attending import BOTH_WAYS, CACHES, HEADS, Heads, attend, attend_twice, attention_slack
from tests.backends.cases import CASES, HEAD_FORMATS, RECURRENT, VOCABULARY, table
from tests.backends.selecting import (
    POOLING,
    SELECTING,
    Pooling,
    Selecting,
    attend_pools,
    attend_selected,
    rows_of,
    select,
)
from tests.backends.support import Build, bind, feed, record
from tests.backends.test_attention import wanted_rows
from tests.backends.test_conformance import NONE, check_erasing, check_recurrent, head_matrices, side_by_side
from tests.backends.test_experts import TABLE, TOKENS, mixture
from tests.backends.test_keep import bound, inputs
from tests.backends.test_selection import STEPS, batches
from tests.models.support import EVERY_OPERATION, Driver, MemoryWeight


def run(backend: Backend, build: Build, embedding: MemoryWeight, tokens: np.ndarray, *sizes: int) -> np.ndarray:
    return feed(bind(backend, record(embedding, build)), tokens, sizes)


def looseness(backend: Backend, plan: Plan) -> float:
    """Return the factor on the float32 error bound. With 16-bit weights, tensor cores round activations to 11 bits or
    more.
    """
    compute, linears = backend.device.facts.compute, [op for op in plan.operations if isinstance(op, Linear)]
    shapes = [(op.weight.format, op.weight.shape[-1]) for op in linears]
    return 512.0 if any(products.terms(*shape, compute) for shape in shapes) else 1.0


@pytest.mark.parametrize("name", CASES)
def test_operation(gpu: Backend, name: str) -> None:
    case = CASES[name]
    embedding = table(case.width)
    plan = record(embedding, case.build)
    ours, theirs = bind(gpu, plan), bind(ReferenceBackend(), plan)
    tokens = np.resize(np.random.RandomState(2).permutation(VOCABULARY), 70)
    truth = feed(theirs, tokens).astype(np.float64)
    slack = case.slack(embedding.values()[tokens].astype(np.float64), truth) * looseness(gpu, plan)
    alone = feed(ours, tokens[:10], [1] * 10)
    for rows in (feed(ours, tokens), feed(ours, tokens, [FEW_ROWS, 5, 17])):
        assert (np.abs(rows - truth) <= slack).all(), np.abs(rows - truth).max()
    for sizes in ([2, 3], [10], [1, 9]):
        np.testing.assert_array_equal(feed(ours, tokens[:10], sizes), alone)


def test_positions_have_rows_of_a_table(gpu: Backend) -> None:
    embedding, positions = table(40), MemoryWeight.of("positions", np.random.RandomState(5).standard_normal((50, 40)))
    tokens = np.resize(np.arange(VOCABULARY)[::-1], 70)
    rows = run(gpu, lambda r, x: r.add(x, r.embed(positions, positions=True)), embedding, tokens, 1, 2)
    expected = embedding.values()[tokens] + positions.values()[np.minimum(np.arange(70), 49)]
    np.testing.assert_array_equal(rows, expected)


def test_select_rows(gpu: Backend) -> None:
    embedding = table(40)
    driver = Driver(bind(gpu, record(embedding, lambda r, x: r.scale(r.select_rows(x), 2.0))))
    for wanted in ([4, 0, 2], [], [1], [4] * 30):
        rows = driver.step([(0, [7, 1, 30, 1, 5])], logit_rows=wanted)
        np.testing.assert_array_equal(rows, 2 * embedding.values()[np.array([7, 1, 30, 1, 5])[wanted].astype(int)])


@pytest.mark.parametrize("format", HEAD_FORMATS)
def test_a_head_has_the_bits_of_a_product_of_its_own(gpu: Backend, format: str) -> None:
    weight = head_matrices(format, 41)
    embedding = table(2 * weight.shape[2])
    tokens = np.resize(np.random.RandomState(2).permutation(VOCABULARY), 70)
    ours = bind(gpu, record(embedding, lambda r, x: r.head_linear(x, weight)))
    theirs = bind(gpu, record(embedding, side_by_side(weight)))
    for sizes in ([], [1, 2, 17]):
        np.testing.assert_array_equal(feed(ours, tokens, sizes), feed(theirs, tokens, sizes))


GROUP = 128  # work-items; from wider heads, each has several values
WIDE = [(Heads(10, 1, 136), F16_CACHE), (Heads(2, 1, 256), F16_CACHE), *(of for of in CACHES if of[0].head_dim > GROUP)]
PLAIN = [*((h, F16_CACHE) for h in (*HEADS, *BOTH_WAYS)), *(of for of in CACHES if of[0].head_dim <= GROUP)]


@pytest.mark.parametrize(("h", "cache"), PLAIN, ids=str)
def test_attention(plain_gpu: Backend, h: Heads, cache: CacheTypes) -> None:
    attends_like_the_reference(plain_gpu, h, cache)


@pytest.mark.parametrize(("h", "cache"), WIDE, ids=str)
def test_attention_of_wide_heads(gpu: Backend, h: Heads, cache: CacheTypes) -> None:
    """Optimized, because an optimizer may break loops with barriers."""
    attends_like_the_reference(gpu, h, cache)


def attends_like_the_reference(backend: Backend, h: Heads, cache: CacheTypes) -> None:
    """Two sequences run in one batch, one in decode and one in prefill, over several blocks and partitions.

    Then one sequence continues from a copy of the other's blocks.
    """
    values = np.random.RandomState(h.head_dim).standard_normal((VOCABULARY, sum(h.widths))).astype(np.float32)
    plan = record(MemoryWeight.of("table", values), attend(h))
    ours, theirs = (Driver(bind(b, plan, 300, 16, cache), sequences=2) for b in (backend, ReferenceBackend()))
    slack = attention_slack(values, h, 6 * BLOCK)
    tokens = np.random.RandomState(1).randint(0, VOCABULARY, 900)
    steps = [[(0, 1)], [(0, 5), (1, 3)], [(1, 1), (0, 1)], [(0, 250), (1, 40)], [(0, 20), (1, 1)], [(1, 17), (0, 1)]]

    def step(parts: list[tuple[int, int]], start: int) -> None:
        batch = [(s, tokens[start + 7 * s : start + 7 * s + count]) for s, count in parts]
        np.testing.assert_allclose(ours.step(batch), theirs.step(batch), rtol=0, atol=slack)

    for start, parts in enumerate(steps):
        step(parts, 31 * start)
    for driver in (ours, theirs):
        driver.executable.copy_blocks(driver.tables[0, :2], driver.tables[1, :2])
        driver.lengths = [driver.lengths[0], 2 * BLOCK - 5]
    step([(1, 30), (0, 2)], 300)


CHOOSING = [
    *((s, F16_CACHE) for s in SELECTING),
    *((SELECTING[n % 3], CacheTypes(name, name)) for n, name in enumerate(CACHE_TYPES) if name != "f16"),
]


@pytest.mark.parametrize(("s", "cache"), CHOOSING, ids=str)
def test_attention_to_selected_positions(gpu: Backend, s: Selecting, cache: CacheTypes) -> None:
    """Positions and results equal the reference's, and a decoded token does not depend on its batch."""
    for build, slack in ((select(s), 0.0), (attend_selected(s), 4e-3 if cache == F16_CACHE else 1e-2)):
        plan = record(MemoryWeight.of("table", rows_of(s, VOCABULARY)), build)
        ours, theirs = (Driver(bind(b, plan, 160, 12, cache), sequences=2) for b in (gpu, ReferenceBackend()))
        for batch in batches(STEPS):
            np.testing.assert_allclose(ours.step(batch), theirs.step(batch), rtol=0, atol=slack)
    tokens = np.random.RandomState(2).randint(0, VOCABULARY, 150)
    whole, cut = (feed(bind(gpu, plan, 160, 12, cache), tokens, sizes) for sizes in ([130], [130, 1, 3, 1, 9]))
    np.testing.assert_array_equal(whole, cut)


@pytest.mark.parametrize("name", CACHE_TYPES)
def test_values_that_begin_the_keys_are_stored_once(gpu: Backend, name: str) -> None:
    """Values that are a prefix of the keys need no memory and give the same bits as separate values. Cache types that
    rotate heads by their width still store both.
    """
    s, bound = replace(SELECTING[0], heads=Heads(5, 1, 96, value_dim=64)), []
    for values in ("copied", "prefix"):
        plan = record(MemoryWeight.of("table", rows_of(s, VOCABULARY)), attend_selected(s, values))
        bound.append(bind(gpu, plan, 80, 12, CacheTypes(name, name)))
    apart, once = (Driver(executable, sequences=2) for executable in bound)
    for batch in batches([[(0, 70)], [(0, 1), (1, 9)], [(0, 1)]]):
        np.testing.assert_array_equal(once.step(batch), apart.step(batch))
    sizes = [executable.block_bytes[1] for executable in bound]
    assert sizes[1] == sizes[0] if CACHE_TYPES[name].rotated else 5 * sizes[1] == 3 * sizes[0]
    assert (bound[0].cache_layout == bound[1].cache_layout) == CACHE_TYPES[name].rotated


@pytest.mark.parametrize(
    ("p", "cache"), [*((p, F16_CACHE) for p in POOLING), (POOLING[0], CacheTypes("q8_0", "q5_1"))], ids=str
)
def test_attention_to_pools(gpu: Backend, p: Pooling, cache: CacheTypes) -> None:
    """Results equal the reference's, and a decoded token does not depend on its batch."""
    plan, slack = (
        record(MemoryWeight.of("table", rows_of(p, VOCABULARY)), attend_pools(p)),
        4e-3 if cache == F16_CACHE else 1e-2,
    )
    ours, theirs = (Driver(bind(b, plan, 160, 12, cache), sequences=2) for b in (gpu, ReferenceBackend()))
    for batch in batches(STEPS):
        np.testing.assert_allclose(ours.step(batch), theirs.step(batch), rtol=0, atol=slack)
    tokens = np.random.RandomState(2).randint(0, VOCABULARY, 150)
    whole, cut = (feed(bind(gpu, plan, 160, 12, cache), tokens, sizes) for sizes in ([130], [130, 1, 3, 1, 9]))
    np.testing.assert_array_equal(whole, cut)
    first, second = (Driver(bind(gpu, plan, 160, 3, cache)) for _ in range(2))
    truth = first.step([(0, tokens[:130])]), first.step([(0, tokens[130:])])
    for layer in range(len(plan.layers)):
        content = first.executable.read_blocks(layer, first.tables[0, :3])
        second.executable.write_blocks(layer, second.tables[0, :3], content)
        with pytest.raises(BackendError, match="not finite"):
            second.executable.write_blocks(layer, second.tables[0, :3], np.full_like(content, 0xFF))
    second.lengths[0] = 130
    np.testing.assert_array_equal(second.step([(0, tokens[130:])]), truth[1])


def test_texts_in_both_directions_have_the_same_bits_in_any_company(gpu: Backend) -> None:
    """With bidirectional attention, the bits do not depend on other texts. A chunk never splits a text of few tokens,
    even if the chunk stays partly empty.
    """
    h = Heads(4, 2, 16, causal=False)
    values = np.random.RandomState(3).standard_normal((VOCABULARY, 128)).astype(np.float32)
    plan = record(MemoryWeight.of("table", values), attend(h))
    lengths = (7, 11, 40, 5, 1)
    texts = [np.random.RandomState(length).randint(0, VOCABULARY, length) for length in lengths]
    together = Driver(bind(gpu, plan), sequences=5).step(list(enumerate(texts)))
    alone = [feed(bind(gpu, plan), text) for text in texts]
    np.testing.assert_array_equal(together, np.concatenate(alone))


def test_a_layer_may_read_the_cache_of_another(plain_gpu: Backend) -> None:
    h = Heads(4, 2, 16, window=9)
    values = np.random.RandomState(6).standard_normal((VOCABULARY, 128)).astype(np.float32)
    plan = record(MemoryWeight.of("table", values), attend_twice(h))
    tokens = np.random.RandomState(1).randint(0, VOCABULARY, 100)
    ours, theirs = (feed(bind(b, plan, rows=100), tokens, [30, 1]) for b in (plain_gpu, ReferenceBackend()))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=10 * attention_slack(values, h, 2 * BLOCK))


@pytest.mark.parametrize("cache", [F16_CACHE, CacheTypes("q8_0", "q8_0")], ids=str)
@pytest.mark.parametrize("h", [Heads(4, 2, 16), Heads(4, 1, 32, window=9)], ids=str)
def test_rows_that_are_wanted_keep_their_positions(plain_gpu: Backend, h: Heads, cache: CacheTypes) -> None:
    """The wanted tokens keep their positions, although kernels for few tokens run instead of the prefill kernels."""
    for ours, theirs in zip(
        wanted_rows(plain_gpu, h, True, cache), wanted_rows(ReferenceBackend(), h, False, cache), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-3)


def test_decoding_gives_the_same_bits_in_any_company(gpu: Backend) -> None:
    """A sequence decodes alone, and then in batches with sequences that decode, verify drafts and prefill."""
    h = Heads(4, 2, 16)
    values = np.random.RandomState(3).standard_normal((VOCABULARY, 128)).astype(np.float32)
    plan = record(MemoryWeight.of("table", values), attend(h))
    tokens = np.random.RandomState(2).randint(0, VOCABULARY, 400)
    results = []
    for company in ([], [(1, 1)], [(1, 9), (2, 15)], [(1, 40), (2, 1)]):
        driver = Driver(bind(gpu, plan, rows=80, blocks=15), sequences=3)
        driver.step([(0, tokens[:70])])
        rows = []
        for at in range(3):
            parts = [(s, tokens[at * n : at * n + n]) for s, n in company]
            rows.append(
                driver.step([*parts[:1], (0, tokens[70 + at : 71 + at]), *parts[1:]])[sum(n for _, n in company[:1])]
            )
        results.append(np.array(rows))
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


def test_large_keys_and_values_stay_in_the_range_of_halves(plain_gpu: Backend) -> None:
    values = np.zeros((4, 24), np.float32)
    values[:, 16:] = np.array([1e6, -1e6, 65504, 3.0])[:, None]
    rows = run(plain_gpu, attend(Heads(1, 1, 8)), MemoryWeight.of("table", values), np.arange(4))
    np.testing.assert_allclose(rows[:, 0], [65504, 0, 65504 / 3, 65507 / 4], rtol=1e-6)


@pytest.mark.parametrize("name", NONE)
def test_what_is_no_number_is_not_lost(plain_gpu: Backend, name: str) -> None:
    values = np.ones((2, 24), np.float32)
    values[0, 3] = np.nan
    for tokens in (np.array([1, 0, 1]), np.array([1, 0, 1] * 10)):  # decode, prefill
        rows = run(plain_gpu, NONE[name], MemoryWeight.of("table", values), tokens)
        assert [np.isnan(row).any() for row in rows] == [False, True, False] * (len(tokens) // 3)


MIXTURES: dict[str, Build] = {
    "softmax": mixture("softmax", 2),
    "softmax, biased": mixture("softmax", 4, normalize=True, biased=True),
    "sigmoid": mixture("sigmoid", 3, normalize=True, biased=True),
    "chosen": mixture("softmax_of_chosen", 4, extras=True, activation="swiglu_oai"),
    "weighted input": mixture("sigmoid_of_chosen", 2, weighted_input=True),
    "limits": mixture("softmax", 3, activation="silu_clamp", limit=0.75),
    "all": mixture("softmax_of_chosen", 20),
    "groups": mixture("sigmoid", 6, normalize=True, biased=True, groups=8, groups_used=3),
    "groups, softmax": mixture("softmax", 4, groups=5, groups_used=1),
    "groups of one": mixture("sigmoid", 3, groups=40, groups_used=7),
    "root of softplus": mixture("sqrt_softplus", 3, normalize=True, biased=True),
    "given": mixture("sqrt_softplus", 3, normalize=True, given=True),
    "sparse mixer": mixture("sparse_mixer", 2),
    "sparse mixer, groups": mixture("sparse_mixer", 30, biased=True, groups=5, groups_used=4),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_experts(gpu: Backend, name: str) -> None:
    plan = record(TABLE, MIXTURES[name])
    ours, theirs = bind(gpu, plan), bind(ReferenceBackend(), plan)
    tokens = np.arange(TOKENS)
    truth = feed(theirs, tokens)
    np.testing.assert_allclose(feed(ours, tokens), truth, rtol=2e-5, atol=2e-5)
    one_by_one = feed(ours, tokens[:12], [1] * 12)
    np.testing.assert_allclose(one_by_one, truth[:12], rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(feed(ours, tokens[:12], [12]), one_by_one)


def test_quantized_experts(plain_gpu: Backend) -> None:
    """The error of three int8 products in sequence is at most a hundredth of the largest result."""
    plan = record(TABLE, mixture("softmax", 3, formats=lambda name: {"down": "Q4_0", "up": "F16"}.get(name, "Q8_0")))
    rows, truth = (feed(bind(b, plan), np.arange(TOKENS)) for b in (plain_gpu, ReferenceBackend()))
    assert np.abs(rows - truth).max() < 0.01 * np.abs(truth).max()


def test_kept_values_and_routings(plain_gpu: Backend) -> None:
    plan = record(TABLE, MIXTURES["softmax"])
    keep: list[Any] = inputs(plan)
    ours, theirs = bound(plain_gpu, plan, keep, TOKENS), bound(ReferenceBackend(), plan, [], TOKENS)
    for executable in (ours, theirs):
        feed(executable, np.arange(TOKENS))
    for value in keep:
        np.testing.assert_allclose(ours.value(value), theirs.value(value), rtol=2e-5, atol=2e-5)
    (out,) = [op.out for op in plan.operations if isinstance(op, Experts)]
    np.testing.assert_array_equal(ours.routing(out).choices, theirs.routing(out).choices)
    np.testing.assert_allclose(ours.routing(out).hidden, theirs.routing(out).hidden, rtol=1e-4, atol=1e-5)


def test_cache_blocks_can_be_taken_out_and_put_back(gpu: Backend) -> None:
    h = Heads(4, 2, 16)
    values = np.random.RandomState(3).standard_normal((VOCABULARY, 128)).astype(np.float32)
    plan = record(MemoryWeight.of("table", values), attend(h))
    first, second = (Driver(bind(gpu, plan)) for _ in range(2))
    first.step([(0, np.arange(30))])
    numbers = first.tables[0, :1]
    content = first.executable.read_blocks(0, numbers)
    second.executable.write_blocks(0, numbers, content)
    second.lengths = [30]
    np.testing.assert_array_equal(first.step([(0, [7])]), second.step([(0, [7])]))


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers(gpu: Backend, name: str) -> None:
    check_recurrent(gpu, name)


@pytest.mark.parametrize("channels", [False, True])
def test_small_decays_count_after_the_state_was_erased(gpu: Backend, channels: bool) -> None:
    check_erasing(gpu, 3e38, channels)


def test_every_operation_is_in_the_table() -> None:
    plans = [record(table(case.width), case.build) for case in CASES.values()]
    plans += [record(table(24), attend(Heads(1, 1, 8))), record(table(24), lambda r, x: r.select_rows(x))]
    plans.append(record(TABLE, MIXTURES["softmax"]))
    plans += [record(table(48), build) for build in RECURRENT.values()]
    plans.append(record(table(sum(SELECTING[0].widths)), select(SELECTING[0])))
    assert {type(op) for plan in plans for op in plan.operations} == EVERY_OPERATION

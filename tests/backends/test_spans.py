"""Spans, such as pictures: their tokens see each other in otherwise causal attention, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from localllm.backends.base import Backend, BackendError, CacheTypes, Limits
from localllm.backends.cpu.backend import CpuBackend
from localllm.backends.reference import ReferenceBackend
from localllm.plan import BLOCK, Plan, Recorder, Value
from tests.backends.attending import Heads, attention_slack
from tests.backends.gpu.conftest import pocl
from tests.backends.support import bind
from tests.models.support import Driver, MemoryWeight

SHAPES = (
    Heads(4, 2, 16),
    Heads(2, 1, 24, softcap=1.5, sinks=True),
    Heads(6, 2, 16, window=9),
    Heads(2, 2, 32, window=140, sinks=True),
    Heads(1, 1, 64),
)
LENGTH = 330
SPANS = ((3, 9), (60, 140), (200, 201), (201, 323))  # inside a block, over a partition, one token, two in a row
PARTS = [0, 2, 3, 9, 40, 60, 140, 160, 200, 201, 323, 329, LENGTH]  # no part cuts a span


def attend(h: Heads, r: Recorder, x: Value) -> Value:
    cuts = np.cumsum([0, *h.widths])
    q, k, v = (r.slice(x, int(a), int(b)) for a, b in pairwise(cuts))
    sinks = MemoryWeight.of("sinks", 2 * np.random.RandomState(4).standard_normal(h.heads)) if h.sinks else None
    r.append(k, v, h.kv_heads)
    return r.attention(q, 0, h.heads, h.head_dim**-0.5, h.window, h.softcap, sinks, spans=True)


def table(h: Heads) -> MemoryWeight:
    return MemoryWeight.of("table", np.random.RandomState(1).standard_normal((LENGTH, sum(h.widths))))


def plan(h: Heads) -> Plan:
    r = Recorder()
    return r.finish(attend(h, r, r.embed(table(h))))


def ends_of(spans: Sequence[tuple[int, int]], start: int, stop: int) -> np.ndarray:
    """Return the last position that each of the positions attends to."""
    ends = np.arange(start, stop, dtype=np.int32)
    for first, end in spans:
        ends[max(first - start, 0) : max(end - start, 0)] = end - 1
    return ends


def by_hand(h: Heads, spans: Sequence[tuple[int, int]] = SPANS) -> np.ndarray:
    rows = table(h).values().astype(np.float64)
    q, k, v = np.split(rows, np.cumsum(h.widths[:2]), axis=1)
    q, k, v = (x.reshape(LENGTH, -1, h.head_dim) for x in (q, k, v))
    k, v = (np.repeat(x, h.heads // h.kv_heads, axis=1) for x in (k, v))
    at = np.arange(LENGTH)
    seen = at <= ends_of(spans, 0, LENGTH)[:, None]
    if h.window:
        seen &= at > at[:, None] - h.window
    scores = np.einsum("qhd,khd->hqk", q, k) * h.head_dim**-0.5
    if h.softcap:
        scores = h.softcap * np.tanh(scores / h.softcap)
    weights = np.exp(np.where(seen, scores, -np.inf))
    sinks = 2 * np.random.RandomState(4).standard_normal(h.heads)
    total = weights.sum(axis=2) + (np.exp(sinks.astype(np.float32))[:, None] if h.sinks else 0)
    return np.asarray(np.einsum("hqk,khd->qhd", weights / total[:, :, None], v).reshape(LENGTH, -1))


def run(driver: Driver, cuts: Sequence[int], crowd: bool = False) -> np.ndarray:
    """Evaluate the text in parts; with a `crowd`, every step has two more sequences."""
    found = []
    for part, (start, stop) in enumerate(pairwise(cuts)):
        parts = [(0, list(range(start, stop)))]
        ends = [ends_of(SPANS, start, stop)]
        if crowd:
            at = driver.lengths[1]
            parts = [(1, [part]), *parts, (2, list(range(7 * part, 7 * part + 5)))]
            other = np.full(5, driver.lengths[2] + 4, np.int32)
            ends = [np.array([at], np.int32), *ends, other]
        rows = driver.step(parts, span_ends=np.concatenate(ends))
        found.append(rows[int(crowd) : int(crowd) + stop - start])
    return np.concatenate(found)


@pytest.fixture(scope="module", params=["reference", "cpu", "gpu"])
def backend(request: pytest.FixtureRequest, cpu: CpuBackend) -> Iterator[Backend]:
    opened = cpu if request.param == "cpu" else ReferenceBackend() if request.param == "reference" else pocl()
    yield opened
    if request.param == "gpu":
        opened.close()


@pytest.mark.parametrize("h", SHAPES, ids=str)
def test_the_tokens_of_a_span_see_each_other(backend: Backend, h: Heads) -> None:
    exact, cuts = CacheTypes("f32", "f32"), [0, 3, 9, 60, 140, LENGTH]
    slack = attention_slack(table(h).values(), h, LENGTH)
    for rows in (LENGTH, 200):
        driver = Driver(bind(backend, plan(h), rows=LENGTH, blocks=7, cache=exact))
        found = run(driver, [0, LENGTH] if rows == LENGTH else cuts)
        np.testing.assert_allclose(found, by_hand(h), rtol=0, atol=slack)


@pytest.mark.parametrize("h", SHAPES, ids=str)
def test_rows_repeat_to_the_bit_whatever_stands_beside_them(backends: list[CpuBackend], h: Heads) -> None:
    one, rows = plan(h), LENGTH + 10
    truth = run(Driver(bind(backends[0], one, rows=rows, blocks=7)), [0, LENGTH])
    for own in backends:
        driver = Driver(bind(own, one, rows=rows, blocks=24), sequences=3)
        np.testing.assert_array_equal(run(driver, PARTS, crowd=True), truth)


def test_short_spans_of_several_sequences(backend: Backend) -> None:
    """A GPU evaluates few rows at a time, but never a part of a span."""
    h = SHAPES[0]
    driver = Driver(bind(backend, plan(h), rows=60, blocks=9, cache=CacheTypes("f32", "f32")), sequences=3)
    expected = by_hand(h, ((0, 9),))[:9]
    found = driver.step([(s, list(range(9))) for s in range(3)], span_ends=np.full(27, 8, np.int32))
    slack = attention_slack(table(h).values(), h, 9)
    np.testing.assert_allclose(found, np.tile(expected, (3, 1)), rtol=0, atol=slack)


def test_text_keeps_its_bits(cpu: CpuBackend) -> None:
    h = Heads(6, 2, 16, window=9)
    textual = Recorder()
    own = attend(h, textual, textual.embed(table(h)))
    causal = replace(textual.finish(own), operations=tuple(
        [replace(op, spans=False) if hasattr(op, "spans") else op for op in textual.finish(own).operations]
    ))  # fmt: skip
    tokens = [(0, list(range(100)))]
    expected = Driver(bind(cpu, causal, rows=100)).step(tokens)
    np.testing.assert_array_equal(Driver(bind(cpu, plan(h), rows=100)).step(tokens), expected)
    assert plan(h).spans
    assert not causal.spans


def test_a_window_with_its_own_blocks(backend: Backend) -> None:
    """The step buffer of a GPU then holds both slots of windows and ends of spans."""
    h = Heads(6, 2, 16, window=9)
    limits = Limits(LENGTH, LENGTH, 8, 8 * BLOCK, window_blocks=7)
    bound = backend.bind(plan(h), limits, CacheTypes("f32", "f32"))
    driver, whole = Driver(bound), []
    for start, stop in ((0, 60), (60, LENGTH)):
        slots = np.arange(start, stop, dtype=np.int32)
        tables = np.arange(6, dtype=np.int32)[None]
        further = {"span_ends": ends_of(SPANS, start, stop), "window_slots": slots, "window_tables": tables}
        whole.append(driver.step([(0, list(range(start, stop)))], **further))
    slack = attention_slack(table(h).values(), h, LENGTH)
    np.testing.assert_allclose(np.concatenate(whole), by_hand(h), rtol=0, atol=slack)


@pytest.mark.parametrize("ends", [[0, 1], [0, 1, 2, 4], [0, 0, 2, 3], [2, 1, 2, 3], [0, 9, 9, 9]])
def test_spans_that_do_not_end_in_the_batch_are_refused(cpu: CpuBackend, ends: list[int]) -> None:
    with pytest.raises(BackendError, match="span_ends must be"):
        Driver(bind(cpu, plan(SHAPES[0]))).step([(0, [1, 2, 3, 4])], span_ends=np.array(ends, np.int32))

"""Media tokens take their embeddings from the batch, and tokens of the text are left as they are."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from localllm.backends.base import Backend, BackendError
from localllm.backends.cpu.backend import CpuBackend
from localllm.backends.reference import ReferenceBackend
from localllm.plan import Plan, Recorder
from localllm.plan.rewrites.split import split
from tests.backends.gpu.conftest import pocl
from tests.backends.support import bind
from tests.models.support import Driver, MemoryWeight

WIDTH, STREAMS = 37, 3
TABLE = np.random.RandomState(1).standard_normal((11, WIDTH)).astype(np.float32)
MEDIA = np.random.RandomState(2).standard_normal((90, STREAMS * WIDTH)).astype(np.float32)


def plan() -> Plan:
    """Return a plan that scales the embeddings of a text, splices media, and adds their other streams."""
    r = Recorder()
    media = r.embed_media(STREAMS * WIDTH)
    x = r.splice(r.scale(r.embed(MemoryWeight.of("table", TABLE)), 2.0), media)
    x = r.splice(r.scale(x, -0.5), media, WIDTH, add=True)
    return r.finish(r.splice(r.select_rows(x), r.select_rows(media), 2 * WIDTH, add=True))


def by_hand(tokens: np.ndarray, media: np.ndarray) -> np.ndarray:
    rows = -TABLE[np.maximum(tokens, 0)]
    first, second, third = np.split(media, STREAMS, axis=1)
    rows[tokens < 0] = first * np.float32(-0.5) + second + third
    return rows


def tokens_of(seed: int, count: int) -> np.ndarray:
    random = np.random.RandomState(seed)
    return np.where(random.rand(count) < 0.4, -random.randint(1, 1 << 31, count), random.randint(0, 11, count))


@pytest.fixture(scope="module", params=["reference", "cpu", "gpu"])
def backend(request: pytest.FixtureRequest, cpu: CpuBackend) -> Iterator[Backend]:
    opened = cpu if request.param == "cpu" else ReferenceBackend() if request.param == "reference" else pocl()
    yield opened
    if request.param == "gpu":
        opened.close()


@pytest.mark.parametrize("counts", [[1, 1, 1], [3, 40, 2], [70, 1, 19]])
def test_media_tokens_take_their_rows_in_any_batch(backend: Backend, counts: list[int]) -> None:
    driver, at = Driver(bind(backend, plan(), rows=100, blocks=24), sequences=3), 0
    for seed in range(3):
        parts = [tokens_of(10 * seed + s, count) for s, count in enumerate(counts)]
        tokens = np.concatenate(parts)
        media = MEDIA[: np.count_nonzero(tokens < 0)]
        found = driver.step([(s, part.tolist()) for s, part in enumerate(parts)], media=media)
        np.testing.assert_array_equal(found, by_hand(tokens, media))
        wanted = list(range(0, len(tokens), 2))
        driver.lengths = [length - count for length, count in zip(driver.lengths, counts, strict=True)]
        found = driver.step([(s, part.tolist()) for s, part in enumerate(parts)], wanted, media=media)
        np.testing.assert_array_equal(found, by_hand(tokens, media)[wanted])
        at += len(tokens)


def test_a_text_needs_no_embeddings(backend: Backend) -> None:
    driver = Driver(bind(backend, plan()))
    np.testing.assert_array_equal(driver.step([(0, [3, 4, 5])]), -TABLE[[3, 4, 5]])
    np.testing.assert_array_equal(driver.step([(0, [6])]), -TABLE[[6]])


def test_embeddings_that_do_not_fit_are_refused(backend: Backend) -> None:
    bound = bind(backend, plan())
    for media in (None, MEDIA[:1], MEDIA[:3], MEDIA[:2, 1:]):
        with pytest.raises(BackendError, match=r"2 media tokens need embeddings of shape \(2, 111\)"):
            Driver(bound).step([(0, [1, -5, 2, -6])], media=media)
    with pytest.raises(BackendError, match="tokens must be from 0 to 10"):
        Driver(bound).step([(0, [1, -5, 11])], media=MEDIA[:1])
    r = Recorder()
    textual = bind(backend, r.finish(r.embed(MemoryWeight.of("table", TABLE))))
    for tokens in ([1, -5], [-5]):
        with pytest.raises(BackendError, match="tokens must be from 0 to 10"):
            Driver(textual).step([(0, tokens)], media=MEDIA[:1])


def test_streams_reach_the_stage_that_adds_them(cpu: CpuBackend) -> None:
    whole = plan()
    cut = split(whole, [0] * 4 + [1] * (len(whole.operations) - 4))
    first, last = (bind(cpu, cut.plans[place]) for place in (0, 1))
    driver = Driver(first)
    tokens = tokens_of(5, 30)
    media = MEDIA[: np.count_nonzero(tokens < 0)]
    batches = []
    first.step = lambda batch: batches.append(batch) or np.empty(0)  # type: ignore[method-assign, func-returns-value]
    driver.step([(0, tokens.tolist())], media=media)
    [batch] = batches
    first.begin(batch)
    last.begin(batch)
    last.run(first.run())
    np.testing.assert_array_equal(last.result(), by_hand(tokens, media))

"""The fast top-k selection equals a full sort, for realistic sizes and for degenerate inputs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.engine.top_k import leading, top_k_indices

V = 128256
Logits = NDArray[np.float32]
INPUTS: dict[str, Callable[[np.random.Generator, int], NDArray[np.float64]]] = {
    "normal": lambda r, n: r.normal(0, 3, n),
    "rising": lambda r, n: np.arange(n) / n,
    "falling": lambda r, n: -np.arange(n) / n,
    "equal": lambda r, n: np.full(n, 1.5),
    "three values": lambda r, n: r.integers(0, 3, n) * 1.0,
    "zeros of both signs": lambda r, n: np.where(r.random(n) < 0.5, -0.0, 0.0),
    "nearly all masked": lambda r, n: np.where(r.random(n) < 20 / n, r.normal(0, 3, n), -np.inf),
    "all large in one column": lambda r, n: r.normal(0, 1, n) + 50.0 * (np.arange(n) % 1024 == 7),
    "all large at the end": lambda r, n: r.normal(0, 1, n) + 50.0 * (np.arange(n) > n - 200),
    "huge": lambda r, n: r.normal(0, 1, n) * 10.0 ** r.integers(-37, 38, n),
}


def make(kind: str, n: int) -> Logits:
    return INPUTS[kind](np.random.default_rng(n), n).astype(np.float32)


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("n", [1, 41, 2047, 2048, 2049, V])
@pytest.mark.parametrize("k", [1, 40, 250, 1000, V])
def test_largest_is_the_beginning_of_the_sorted_order_with_ties_by_index(kind: str, n: int, k: int) -> None:
    values = make(kind, n)
    assert top_k_indices(values, k).tolist() == np.lexsort((np.arange(n), -values))[:k].tolist()


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("total", [0.0, 0.3, 0.97, 2.0])
@pytest.mark.parametrize("at_least", [0, 300])
def test_leading_is_the_shortest_run_that_reaches_the_total(kind: str, total: float, at_least: int) -> None:
    values = make(kind, 5000)
    weights = np.random.default_rng(1).random(5000)
    weights /= weights.sum()
    order = top_k_indices(values, 5000)
    run = leading(values, weights, total, "left", at_least)
    assert run.tolist() == order[: len(run)].tolist()
    assert len(run) >= max(1, at_least)
    if len(run) < 5000:
        assert weights[run].sum() >= total
    if len(run) > max(1, at_least):
        assert weights[run[:-1]].sum() < total


def test_leading_on_the_right_goes_beyond_an_exact_sum() -> None:
    scores = np.array([4, 3, 2, 1], np.float32)
    quarters = np.full(4, 0.25)
    assert leading(scores, quarters, 0.5, "left", 0).tolist() == [0, 1]
    assert leading(scores, quarters, 0.5, "right", 0).tolist() == [0, 1, 2]

"""One diffusion step against a float64 computation by the formulas of the papers' reference implementations."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from localllm.diffusion.choice import confidence, guided, propose, settling
from localllm.diffusion.schedule import DenoisingStage, evenly, over_time, stages
from localllm.options import SamplingOptions

MASK, VOCABULARY = 7, 50
GREEDY = SamplingOptions(temperature=0.0, top_k=0, top_p=1.0)


def logits(seed: int = 0) -> np.ndarray:
    return (np.random.RandomState(seed).standard_normal(VOCABULARY) * 3).astype(np.float32)


def expected(row: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Return the probability of each token in float64, computed one token at a time."""
    order = sorted((token for token in range(VOCABULARY) if token != MASK), key=lambda token: (-row[token], token))
    order = order[:top_k] if top_k else order
    weights = [math.exp(float(row[token]) - float(row[order[0]])) for token in order]
    kept, total = [], 0.0
    for token, weight in zip(order, weights, strict=True):
        kept.append(token)
        total += weight / sum(weights)
        if top_p < 1 and total >= top_p:
            break
    scale = temperature or 1.0
    powers = {token: math.exp((float(row[token]) - float(row[order[0]])) / scale) for token in kept}
    result = np.zeros(VOCABULARY)
    for token, power in powers.items():
        result[token] = power / sum(powers.values())
    return result


@pytest.mark.parametrize("algorithm", ["confidence", "entropy", "margin"])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(0.0, 0, 1.0), (0.0, 5, 0.9), (0.7, 20, 0.95), (2.0, 0, 1.0)]
)
def test_proposals(algorithm: str, temperature: float, top_k: int, top_p: float) -> None:
    options = SamplingOptions(temperature=temperature, top_k=top_k, top_p=top_p)
    for seed in range(20):
        row, uniform = logits(seed), (seed + 0.5) / 20
        p = expected(row, temperature, top_k, top_p)
        found = propose(row, MASK, options, algorithm, uniform)
        if temperature:
            assert found.token in np.flatnonzero(p)
        else:
            assert found.token == int(p.argmax())
        some = np.sort(p[p > 0])
        sure = {
            "confidence": p[found.token],
            "entropy": float((some * np.log(some)).sum()),
            "margin": some[-1] - some[-2] if len(some) > 1 else some[-1],
        }
        assert found.confidence == pytest.approx(sure[algorithm], rel=1e-5, abs=1e-7)


def test_draws_have_the_probabilities() -> None:
    options, row = SamplingOptions(temperature=0.9, top_k=10, top_p=0.95), logits()
    uniforms = (np.arange(2000) + 0.5) / 2000
    drawn = np.bincount([propose(row, MASK, options, "confidence", u).token for u in uniforms], minlength=VOCABULARY)
    assert drawn / 2000 == pytest.approx(expected(row, 0.9, 10, 0.95), abs=1e-3)


def test_the_mask_is_never_proposed() -> None:
    row = logits()
    row[MASK] = 100
    assert propose(row, MASK, GREEDY, "confidence", 0.0).token == int(np.delete(row, MASK).argmax()) + (
        int(np.delete(row, MASK).argmax()) >= MASK
    )


def test_surer_is_larger() -> None:
    sure, unsure = np.array([0.9, 0.05, 0.05]), np.array([0.4, 0.35, 0.25])
    for algorithm in ("confidence", "entropy", "margin"):
        assert confidence(sure, 0, algorithm) > confidence(unsure, 0, algorithm)


def never() -> float:
    raise AssertionError("nothing is drawn at temperature 0")


def test_the_surest_settle_ties_to_the_left() -> None:
    assert settling(np.array([0.5, 0.9, 0.5, 0.9, 0.1]), 3, 0.0, never).tolist() == [1, 3, 0]


def from_list(numbers: list[float]) -> Callable[[], float]:
    return iter(numbers).__next__


def test_places_are_drawn_without_replacement() -> None:
    confidences = np.array([0.2, 0.8, 0.5])
    weights = np.exp(confidences / 0.5)
    shares = weights.cumsum() / weights.sum()
    assert settling(confidences, 2, 0.5, from_list([shares[0] + 1e-9, 0.0])).tolist() == [1, 0]
    assert settling(confidences, 2, 0.5, from_list([shares[0] - 1e-9, 0.0])).tolist() == [0, 1]
    everything = settling(confidences, 3, 0.5, np.random.RandomState(0).random_sample)
    assert sorted(everything.tolist()) == [0, 1, 2]
    # Most probabilities underflow.
    assert sorted(settling(np.array([0.0, 1.0, 0.5]), 3, 1e-4, lambda: 0.5).tolist()) == [0, 1, 2]


def test_guidance() -> None:
    conditional, without = logits(1), logits(2)
    exact = without.astype(np.float64) + 2.5 * (conditional.astype(np.float64) - without)
    assert guided(conditional, without, 1.5) == pytest.approx(exact, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(("steps", "length"), [(1, 40), (16, 48), (128, 32), (100, 480)])
def test_all_settle_over_time(steps: int, length: int) -> None:
    masked, counts = length, []
    for step in range(steps):
        t, s = (1 - n / steps * (1 - 1e-3) for n in (step, step + 1))
        count = over_time(step, steps, masked, 1e-3)
        exact = masked * (1 - s / t) if step < steps - 1 else masked
        assert exact - 1 - 1e-3 <= count <= exact + 1e-3
        masked -= count
        counts.append(count)
    assert (masked, sum(counts)) == (0, length)


def test_blocks() -> None:
    assert list(stages(10, 58, 16, 0)) == [DenoisingStage(10, 58, 16)]
    assert list(stages(10, 50, 7, 16)) == [
        DenoisingStage(10, 26, 3),
        DenoisingStage(26, 42, 2),
        DenoisingStage(42, 50, 2),
    ]
    assert [stage.steps for stage in stages(0, 64, 1, 16)] == [1, 1, 1, 1]
    assert all(one.stop == next_one.start for one, next_one in pairwise(stages(3, 99, 12, 10)))
    assert [evenly(step, 5, 13) for step in range(5)] == [3, 3, 3, 2, 2]

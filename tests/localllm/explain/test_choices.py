"""Each sampler removes the same tokens as a plain float64 implementation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.explain.choices import Seen, chain_of, seen
from localllm.options import SamplingOptions
from localllm.sampling.sampler import Sampler

SIZE = 500
Doubles = NDArray[np.float64]


def logits(seed: int) -> NDArray[np.float32]:
    return (3 * np.random.default_rng(seed).standard_normal(SIZE)).astype(np.float32)


def probabilities(values: Doubles) -> Doubles:
    weights = np.exp(values - values.max())
    return np.asarray(weights / weights.sum())


def plain(row: NDArray[np.float32], options: dict[str, Any], history: Sequence[int]) -> list[tuple[str, Doubles]]:
    """Return the name of each sampler in the chain, and the float64 logits (V,) after it, -inf for removed tokens."""
    values = row.astype(np.float64)
    found = [("logits", values.copy())]
    if "repeat_penalty" in options:
        for token in set(history[-64:]):
            values[token] *= 1 / options["repeat_penalty"] if values[token] > 0 else options["repeat_penalty"]
        found.append(("penalties", values.copy()))
    if "top_k" in options:
        out = np.argsort(-values, kind="stable")[options["top_k"] :]
        values[out] = -np.inf
        found.append(("top_k", values.copy()))
    if "top_p" in options:
        order = np.argsort(-values, kind="stable")
        sums = np.cumsum(probabilities(values)[order])
        values[order[int(np.argmax(sums >= options["top_p"])) + 1 :]] = -np.inf
        found.append(("top_p", values.copy()))
    if "min_p" in options:
        p = probabilities(values)
        values[p < options["min_p"] * p.max()] = -np.inf
        found.append(("min_p", values.copy()))
    values /= options["temperature"]
    found.append(("temperature", values.copy()))
    return found


def look(row: NDArray[np.float32], options: dict[str, Any], history: Sequence[int] = (), top: int = SIZE) -> Seen:
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
    sampler = Sampler(SamplingOptions(**{**off, "seed": 1, **options}))
    for token in history:
        sampler.accept(token)
    return seen(sampler.stages(row), top, [])


CHAINS: list[dict[str, Any]] = [
    {"top_k": 40, "top_p": 0.9, "min_p": 0.05, "temperature": 0.8},
    {"top_k": 7, "temperature": 1.3},
    {"top_p": 0.5, "temperature": 0.5},
    {"min_p": 0.2, "temperature": 1.5},
    {"repeat_penalty": 1.3, "top_p": 0.8, "min_p": 0.1, "temperature": 0.7},
]


@pytest.mark.parametrize("options", CHAINS, ids=lambda o: "-".join(o))
@pytest.mark.parametrize("seed", range(5))
def test_removed_candidates_are_those_of_a_plain_computation(options: dict[str, Any], seed: int) -> None:
    row, history = logits(seed), [3, 5, 3, 100, 499]
    found, expected = look(row, options, history), plain(row, options, history)
    assert [stage.name for stage in found.stages] == [name for name, _ in expected[1:]]
    for stage, (_, before), (_, after) in zip(found.stages, expected[:-1], expected[1:], strict=True):
        alive, gone = after > -np.inf, (before > -np.inf) & (after == -np.inf)
        assert (stage.left, stage.removed) == (alive.sum(), gone.sum())
        assert stage.mass == pytest.approx(probabilities(before)[gone].sum(), abs=1e-6)
    last, first = probabilities(expected[-1][1]), probabilities(expected[0][1])
    for each in found.candidates:
        assert each.model == pytest.approx(first[each.token], abs=1e-9)
        assert each.drawn == pytest.approx(last[each.token], abs=1e-6)
        outs = [name for name, values in expected if values[each.token] == -np.inf]
        assert each.removed_by == (outs[0] if outs else "")


@pytest.mark.parametrize("top", [1, 5, SIZE])
def test_probabilities_sum_to_one(top: int) -> None:
    found = look(logits(9), CHAINS[0], top=top)
    assert (len(found.candidates), found.others) == (top, SIZE - top)
    assert sum(each.model for each in found.candidates) + found.others_mass == pytest.approx(1, abs=1e-9)
    if top == SIZE:
        assert sum(each.drawn for each in found.candidates) == pytest.approx(1, abs=1e-9)


def test_the_last_candidates_are_those_that_the_sampler_draws_from() -> None:
    """The last stage's candidates have the probabilities that the sampler draws from, even though top_p and min_p run
    as one step.
    """
    for seed in range(20):
        sampler = Sampler(SamplingOptions(seed=1, top_k=0, top_p=0.9, min_p=0.1))
        row = logits(seed)
        ids, p = sampler.distribution(row)
        found = seen(sampler.stages(row), SIZE, [])
        assert {each.token: each.drawn for each in found.candidates if each.drawn} == dict(
            zip(ids.tolist(), p.tolist(), strict=True)
        )


def test_bias_and_a_token_that_is_not_likely() -> None:
    sampler = Sampler(SamplingOptions(seed=1, logit_bias={7: -np.inf, 8: 2.0}, top_k=3))
    found = seen(sampler.stages(logits(2)), 2, [7, 7, 8])
    bias = found.stages[0]
    assert (bias.name, bias.removed, bias.changed) == ("logit_bias", 1, 1)
    by_token = {each.token: each for each in found.candidates}
    assert len(found.candidates) == 4
    assert (by_token[7].removed_by, by_token[7].drawn) == ("logit_bias", 0)


def test_greedy_keeps_one() -> None:
    row = logits(4)
    [stage] = look(row, {"temperature": 0.0}).stages
    assert (stage.name, stage.left, stage.removed) == ("temperature", 1, SIZE - 1)
    assert stage.mass == pytest.approx(1 - probabilities(row.astype(np.float64)).max())


def test_the_chain_is_named_with_its_settings() -> None:
    assert chain_of(SamplingOptions(top_k=40, top_p=0.95, min_p=0.05, temperature=0.8)) == (
        "top_k 40", "top_p 0.95", "min_p 0.05", "temperature 0.8",
    )  # fmt: skip
    assert chain_of(SamplingOptions(temperature=0)) == ("temperature 0",)
    assert "xtc 0.5 0.1" in chain_of(SamplingOptions(xtc_probability=0.5))
    assert chain_of(SamplingOptions(dynatemp_range=0.5))[-1] == "temperature 0.8 0.5 1"
    assert chain_of(SamplingOptions(mirostat=2)) == ("temperature 0.8", "mirostat 2 5 0.1")
    editor = SamplingOptions(samplers=("adaptive_p", "top_k", "infill"), adaptive_target=0.5)
    assert chain_of(editor) == ("top_k 40", "infill", "adaptive_p 0.5 0.9")

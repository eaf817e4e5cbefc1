"""Every sampler gives the results that llama.cpp's tests expect, and agrees with a plain implementation of
its definition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from localllm.engine.top_k import leading
from localllm.options import SamplingOptions
from localllm.options.sampling import NAMES, ORDER
from localllm.sampling.chain import (
    SAMPLERS,
    Candidates,
    SamplingContext,
    enabled,
    min_p,
    softmax,
    top_p,
    top_p_min_p,
)
from localllm.sampling.repetition import Breakers, continuations
from localllm.sampling.sampler import Sampler
from tests.localllm.sampling import oracle as oracle

Logits = NDArray[np.float32]


def probabilities(
    options: SamplingOptions, logits: Logits, history: Sequence[int] = (), breakers: Breakers | None = None
) -> dict[int, float]:
    sampler = Sampler(options, breakers)
    for token in history:
        sampler.accept(token)
    ids, p = sampler.distribution(logits)
    assert ids.dtype == np.int32
    assert p.dtype == np.float64
    assert p.sum() == pytest.approx(1, abs=1e-12)
    return dict(zip(ids.tolist(), p.tolist(), strict=True))


def only(name: str, **values: Any) -> SamplingOptions:
    return SamplingOptions(samplers=(name,), **values)


def log(p: Sequence[float]) -> Logits:
    with np.errstate(divide="ignore"):
        return np.log(np.array(p, np.float32))


# llama.cpp, tests/test-sampling.cpp: sampler, options, probabilities before, probabilities after (0 = ruled out).
RISING = (0.1, 0.2, 0.3, 0.4)
FALLING = (0.4, 0.3, 0.2, 0.1)
EXPECTED: list[tuple[str, dict[str, Any], Sequence[float], Sequence[float]]] = [
    ("temperature", {"temperature": 1.0}, RISING, RISING),
    ("temperature", {"temperature": 0.0}, RISING, (0, 0, 0, 1)),
    ("temperature", {"temperature": 1.0, "dynatemp_range": 0.0}, RISING, RISING),
    ("top_k", {"top_k": 1}, RISING, (0, 0, 0, 1)),
    ("top_k", {"top_k": 3}, RISING, (0, 0.22222, 0.33333, 0.44444)),
    ("top_k", {"top_k": 4}, RISING, RISING),
    ("top_k", {"top_k": 0}, RISING, RISING),
    ("top_p", {"top_p": 0.0}, RISING, (0, 0, 0, 1)),
    ("top_p", {"top_p": 0.7}, RISING, (0, 0, 0.428571, 0.571429)),
    ("top_p", {"top_p": 0.8}, RISING, (0, 0.22222, 0.33333, 0.44444)),
    ("top_p", {"top_p": 1.0}, RISING, RISING),
    ("min_p", {"min_p": 0.0}, RISING, RISING),
    ("min_p", {"min_p": 0.24}, RISING, RISING),
    ("min_p", {"min_p": 0.26}, RISING, (0, 0.2 / 0.9, 0.3 / 0.9, 0.4 / 0.9)),
    ("min_p", {"min_p": 0.49}, RISING, (0, 0.2 / 0.9, 0.3 / 0.9, 0.4 / 0.9)),
    ("min_p", {"min_p": 0.51}, RISING, (0, 0, 0.3 / 0.7, 0.4 / 0.7)),
    ("min_p", {"min_p": 0.74}, RISING, (0, 0, 0.3 / 0.7, 0.4 / 0.7)),
    ("min_p", {"min_p": 0.76}, RISING, (0, 0, 0, 1)),
    ("min_p", {"min_p": 1.0}, RISING, (0, 0, 0, 1)),
    # llama.cpp's expected probabilities for these five are not renormalized: {0.1}, {0.2, 0.1}, {0.97}, {0.2,
    # 0.2, 0.2} ...
    ("xtc", {"xtc_probability": 1.0, "xtc_threshold": 0.09}, FALLING, (0, 0, 0, 1)),
    ("xtc", {"xtc_probability": 1.0, "xtc_threshold": 0.19}, FALLING, (0, 0, 0.2 / 0.3, 0.1 / 0.3)),
    ("xtc", {"xtc_probability": 1.0, "xtc_threshold": 0.29}, FALLING, (0, 0.3 / 0.6, 0.2 / 0.6, 0.1 / 0.6)),
    ("typ_p", {"typical_p": 0.5}, (0.97, 0.01, 0.01, 0.01), (1, 0, 0, 0)),
    ("typ_p", {"typical_p": 0.5}, (0.4, 0.2, 0.2, 0.2), (0, 1 / 3, 1 / 3, 1 / 3)),
    ("xtc", {"xtc_probability": 1.0, "xtc_threshold": 0.39}, FALLING, FALLING),
    ("xtc", {"xtc_probability": 1.0, "xtc_threshold": 0.09, "min_keep": 1}, FALLING, (0, 0, 0, 1)),
    ("xtc", {"xtc_probability": 1.0, "xtc_threshold": 0.09, "min_keep": 2}, FALLING, FALLING),
    ("xtc", {"xtc_probability": 1.0, "xtc_threshold": 0.0}, (0.5, 0.5, 0.0), (0, 1, 0)),
    # The kept probabilities must sum to more than p.
    ("typ_p", {"typical_p": 0.5}, (0.25,) * 4, (1 / 3, 1 / 3, 1 / 3, 0)),
    ("top_n_sigma", {"top_n_sigma": 1.0}, RISING, (0, 0, 0.428571, 0.571429)),
    ("top_n_sigma", {"top_n_sigma": 0.0}, RISING, RISING),
    ("top_n_sigma", {"top_n_sigma": 3.0}, RISING, RISING),
]


@pytest.mark.parametrize(("name", "values", "before", "after"), EXPECTED)
def test_llama_cpp_expects(name: str, values: dict[str, Any], before: Sequence[float], after: Sequence[float]) -> None:
    found = probabilities(only(name, **values), log(before))
    assert [found.get(token, 0.0) for token in range(len(before))] == pytest.approx(after, abs=1e-5)


FIVE = (0.2,) * 5


@pytest.mark.parametrize(
    ("history", "repeat", "both", "after"),
    [
        ((0,), 50.0, 0.0, (0, 0.25, 0.25, 0.25, 0.25)),
        ((0, 1, 2), 50.0, 0.0, (0, 0, 0, 0.5, 0.5)),
        ((0, 1, 2, 0, 0), 50.0, 0.0, (0, 0, 0, 0.5, 0.5)),
        ((0,), 1.0, 5.0, (0.000011, 0.249997, 0.249997, 0.249997, 0.249997)),
        ((0, 1, 2), 1.0, 5.0, (0.000023, 0.000023, 0.000023, 0.499966, 0.499966)),
        ((0, 1, 2, 0, 0), 1.0, 5.0, (0.000000, 0.000023, 0.000023, 0.499977, 0.499977)),
    ],
)
def test_llama_cpp_expects_of_penalties(
    history: Sequence[int], repeat: float, both: float, after: Sequence[float]
) -> None:
    options = only(
        "penalties",
        repeat_penalty=repeat,
        frequency_penalty=both,
        presence_penalty=both,
        repeat_last_n=len(history),
    )
    found = probabilities(options, log(FIVE), history)
    assert [found[token] for token in range(5)] == pytest.approx(after, abs=1e-5)


@pytest.mark.parametrize(
    ("history", "multiplier", "allowed", "breakers", "after"),
    [
        ((0, 1), 1.0, 2, {}, (0.25, 0.25, 0.25, 0.25)),
        ((0, 1, 2, 0, 1), 1.0, 2, {}, (0.296923, 0.296923, 0.109232, 0.296923)),
        ((0, 1, 3, 4, 0, 1), 1.0, 2, {3: ((),)}, FIVE),
        ((0, 1, 2, 0, 1), 2.0, 2, {}, (0.241818, 0.241818, 0.032727, 0.241818, 0.241818)),
        ((0, 1, 2, 3, 4, 0, 1), 1.0, 4, {}, FIVE),
    ],
)
def test_llama_cpp_expects_of_dry(
    history: Sequence[int], multiplier: float, allowed: int, breakers: Breakers, after: Sequence[float]
) -> None:
    options = only(
        "dry",
        dry_multiplier=multiplier,
        dry_base=1.1,
        dry_allowed_length=allowed,
        dry_penalty_last_n=max(4, len(history)),
    )
    found = probabilities(options, log((1 / len(after),) * len(after)), history, breakers)
    assert [found[token] for token in range(len(after))] == pytest.approx(after, abs=1e-5)


@pytest.mark.parametrize(
    "queue", ["k", "p", "m", "kp", "km", "pk", "pm", "mk", "mp", "kpm", "kmp", "pkm", "pmk", "mkp"]
)
@pytest.mark.parametrize(("k", "p", "m"), [(100, 0.8, 0.1), (100, 0.0003, 9997.9 / 9999), (1, 0.8, 1e-12)])
def test_queues_leave_the_ids_that_follow_from_probabilities_proportional_to_the_id(
    queue: str, k: int, p: float, m: float
) -> None:
    n = 10000
    lowest = 1  # lowest remaining id, because id 0 has probability 0
    for letter in queue:
        if letter == "k":
            lowest = max(lowest, n - k)
        elif letter == "m":
            lowest = max(lowest, math.ceil(m * (n - 1)))
        else:
            target = p * sum(range(lowest, n))
            total, token = 0, n
            while total < target:
                token -= 1
                total += token
            lowest = token
    names = {"k": "top_k", "p": "top_p", "m": "min_p"}
    options = SamplingOptions(samplers=tuple(names[letter] for letter in queue), top_k=k, top_p=p, min_p=m)
    found = probabilities(options, log(range(n)))
    assert sorted(found) == list(range(lowest, n))


many = settings(max_examples=60, deadline=None, derandomize=True)  # the same cases in every run

SIZES = (1, 2, 3, 7, 40, 300, 2500)
KINDS: dict[str, Callable[[np.random.Generator, int], NDArray[np.float64]]] = {
    "normal": lambda r, n: r.normal(0, 3, n),
    "flat": lambda r, n: r.normal(0, 0.01, n),
    "peaked": lambda r, n: r.normal(0, 1, n) + 12 * (r.random(n) < 3 / n),
    "ties": lambda r, n: r.normal(0, 2, n).round(),
    "equal": lambda r, n: np.full(n, -3.25),
    "one hot": lambda r, n: 60.0 * (np.arange(n) == r.integers(n)),
    "huge": lambda r, n: r.normal(0, 1, n) * 10.0 ** r.integers(-30, 19, n),
    "masked": lambda r, n: np.where((r.random(n) < 0.9) & (np.arange(n) > 0), -np.inf, r.normal(0, 3, n)),
}
cases = st.tuples(st.sampled_from(SIZES), st.sampled_from(sorted(KINDS)), st.integers(0, 10**6))


def make(case: tuple[int, str, int]) -> tuple[Logits, oracle.Items, list[int]]:
    """Return logits, the same logits as items for the oracle, and a history with repetitions."""
    size, kind, seed = case
    random = np.random.default_rng(seed)
    logits = KINDS[kind](random, size).astype(np.float32)
    history = random.integers(0, min(size, 4), random.integers(0, 100)).tolist()
    return logits, list(enumerate(logits.tolist())), history


def assert_same(found: Mapping[int, float], expected: Mapping[int, float]) -> None:
    assert found.keys() == expected.keys()
    assert [found[token] for token in expected] == pytest.approx(list(expected.values()), rel=1e-4, abs=1e-9)


@many
@given(cases, st.sampled_from([1, 2, 39, 40, 256, 1000]))
def test_top_k(case: tuple[int, str, int], k: int) -> None:
    logits, items, _ = make(case)
    assert_same(probabilities(only("top_k", top_k=k), logits), oracle.distribution(oracle.top_k(items, k)))


@many
@given(cases, st.sampled_from([0.0, 0.0913, 0.5077, 0.9491, 0.9997]), st.sampled_from([0, 1, 5, 400]))
def test_top_p_min_p_typical(case: tuple[int, str, int], p: float, min_keep: int) -> None:
    logits, items, _ = make(case)
    found = probabilities(only("top_p", top_p=p, min_keep=min_keep), logits)
    assert_same(found, oracle.distribution(oracle.top_p(items, p, min_keep)))
    found = probabilities(only("typ_p", typical_p=p, min_keep=min_keep), logits)
    assert_same(found, oracle.distribution(oracle.typ_p(items, p, min_keep)))
    found = probabilities(only("min_p", min_p=p, min_keep=min_keep), logits)
    assert_same(found, oracle.distribution(oracle.min_p(items, p, min_keep) if p else items))


@many
@given(cases, st.sampled_from([0.0, 0.0117, 0.1013, 0.3331, 0.5]), st.sampled_from([0, 2, 300]))
def test_xtc(case: tuple[int, str, int], threshold: float, min_keep: int) -> None:
    logits, items, _ = make(case)
    options = only("xtc", xtc_probability=1.0, xtc_threshold=threshold, min_keep=min_keep)
    assert_same(probabilities(options, logits), oracle.distribution(oracle.xtc(items, threshold, min_keep)))


@many
@given(cases, st.sampled_from([0.013, 0.97, 2.03]))
def test_top_n_sigma(case: tuple[int, str, int], n: float) -> None:
    logits, items, _ = make(case)
    found = probabilities(only("top_n_sigma", top_n_sigma=n), logits)
    assert_same(found, oracle.distribution(oracle.top_n_sigma(items, n)))


@many
@given(
    cases, st.sampled_from([0.0, 0.31, 0.8, 1.7]), st.sampled_from([0.0, 0.29, 2.0]), st.sampled_from([0.7, 1.0, 2.5])
)
def test_temperature(case: tuple[int, str, int], degree: float, spread: float, exponent: float) -> None:
    logits, items, _ = make(case)
    options = only("temperature", temperature=degree, dynatemp_range=spread, dynatemp_exp=exponent)
    assert_same(
        probabilities(options, logits), oracle.distribution(oracle.temperature(items, degree, spread, exponent))
    )


@many
@given(cases, st.sampled_from([0.9, 1.0, 1.3]), st.sampled_from([0.0, 0.2, -0.4]), st.sampled_from([1, 30, 64, 4096]))
def test_penalties(case: tuple[int, str, int], repeat: float, frequency: float, last: int) -> None:
    logits, items, history = make(case)
    options = only(
        "penalties",
        repeat_penalty=repeat,
        frequency_penalty=frequency,
        presence_penalty=2 * frequency,
        repeat_last_n=last,
    )
    expected = oracle.penalties(items, history, last, repeat, frequency, 2 * frequency)
    assert_same(probabilities(options, logits, history), oracle.distribution(expected))


BREAKERS: list[tuple[Breakers, list[list[int]]]] = [
    ({}, []),
    ({3: ((),)}, [[3]]),
    ({0: ((1,), (1, 2)), 2: ((),)}, [[0, 1], [0, 1, 2], [2]]),
]


@many
@given(cases, st.sampled_from([0, 1, 2, 5]), st.sampled_from([3, 30, 64]), st.sampled_from(BREAKERS))
def test_dry(case: tuple[int, str, int], allowed: int, last: int, breakers: tuple[Breakers, list[list[int]]]) -> None:
    logits, items, history = make(case)
    options = only("dry", dry_multiplier=0.8, dry_base=1.75, dry_allowed_length=allowed, dry_penalty_last_n=last)
    expected = oracle.dry(items, history, last, 0.8, 1.75, allowed, breakers[1])
    assert_same(probabilities(options, logits, history, breakers[0]), oracle.distribution(expected))


@many
@given(cases)
def test_the_whole_chain_in_llama_cpps_order(case: tuple[int, str, int]) -> None:
    logits, items, history = make(case)
    options = SamplingOptions(
        repeat_penalty=1.1,
        frequency_penalty=0.05,
        presence_penalty=0.03,
        dry_multiplier=0.8,
        top_n_sigma=2.03,
        top_k=37,
        typical_p=0.9713,
        top_p=0.9129,
        min_p=0.0517,
        xtc_probability=1.0,
        xtc_threshold=0.0931,
        temperature=0.71,
        dynatemp_range=0.2,
    )
    expected = oracle.chain(
        items,
        lambda x: oracle.penalties(x, history, 64, 1.1, 0.05, 0.03),
        lambda x: oracle.dry(x, history, 64, 0.8, 1.75, 2),
        lambda x: oracle.top_n_sigma(x, 2.03) if len(x) > 1 else x,
        lambda x: oracle.top_k(x, 37),
        lambda x: oracle.typ_p(x, 0.9713),
        lambda x: oracle.top_p(x, 0.9129),
        lambda x: oracle.min_p(x, 0.0517),
        lambda x: oracle.xtc(x, 0.0931),
        lambda x: oracle.temperature(x, 0.71, 0.2),
    )
    assert_same(probabilities(options, logits, history), expected)


@many
@given(
    cases,
    st.permutations(ORDER),
    st.sampled_from([0, 1, 5]),
    st.sampled_from([0.3, 1.0]),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([1.0, 1.3]),
)
def test_greedy_leaves_out_only_samplers_that_make_no_difference(
    case: tuple[int, str, int], order: list[str], k: int, typical: float, xtc: float, repeat: float
) -> None:
    logits, _, history = make(case)
    options = SamplingOptions(
        samplers=tuple(order),
        temperature=0.0,
        top_k=k,
        typical_p=typical,
        xtc_probability=xtc,
        repeat_penalty=repeat,
        top_n_sigma=1.0,
    )
    context = SamplingContext(history)
    candidates = Candidates(np.arange(len(logits), dtype=np.int32), logits)
    for name in order:
        if SAMPLERS[name].wanted(options):
            candidates = SAMPLERS[name].run(candidates, options, context)
    assert probabilities(options, logits, history) == {int(candidates.ids[candidates.logits.argmax()]): 1.0}


def test_penalties_find_their_tokens_among_sorted_candidates() -> None:
    options = SamplingOptions(samplers=("top_k", "penalties", "top_p"), top_k=3, top_p=0.7, presence_penalty=2.5)
    assert probabilities(options, np.array([0, 1, 2, 3, -5], np.float32), [3, 4]).keys() == {2, 1}


def test_min_keep_holds_for_sorted_candidates_too() -> None:
    options = SamplingOptions(samplers=("top_k", "top_p"), top_k=4, top_p=0.1, min_keep=3)
    assert probabilities(options, log(RISING)).keys() == {1, 2, 3}


def test_the_longest_breaker_counts() -> None:
    history = [2, 5, 9, 0, 1, 2, 5]  # "2 5" repeats, but this 2 belongs to the sequence breaker "0 1 2"
    assert continuations(history, 64, 1, {0: ((1,),)}) == {9: 2}
    assert continuations(history, 64, 1, {0: ((1,), (1, 2))}) == {9: 1}


def test_the_table_and_the_default_order_name_the_same_samplers() -> None:
    assert (*NAMES, "mirostat") == tuple(SAMPLERS)
    assert SamplingOptions().samplers == ORDER == NAMES[:9]


def test_plain_greedy_is_one_step() -> None:
    assert enabled(SamplingOptions(temperature=0)) == (SAMPLERS["temperature"],)


@many
@given(cases, st.sampled_from([0.0, 1e-5, 0.25, 0.5, 0.9491, 0.99999]), st.sampled_from([0, 5, 400]))
def test_top_p_is_exact_where_float32_cannot_tell(case: tuple[int, str, int], p: float, min_keep: int) -> None:
    """Ties are ordered by float64 probabilities, with and without min_p after top_p."""
    logits, _, _ = make(case)
    candidates = Candidates(np.arange(len(logits), dtype=np.int32), logits)
    options = SamplingOptions(top_p=p, min_p=0.03, min_keep=min_keep)
    rows = leading(logits, softmax(candidates), p, "left", min_keep)
    assert top_p(candidates, options, SamplingContext()).ids.tolist() == rows.tolist()
    expected = min_p(candidates.take(rows, descending=True), options, SamplingContext())
    found = top_p_min_p(candidates, options, SamplingContext())
    assert found.ids.tolist() == expected.ids.tolist()
    assert found.logits.tolist() == expected.logits.tolist()

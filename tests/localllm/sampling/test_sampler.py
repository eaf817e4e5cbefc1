"""The options, random numbers, history and errors of the sampler. test_chain.py covers the sampling algorithms."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from localllm.base.errors import LocalLLMError
from localllm.options import OptionError, SamplingOptions
from localllm.sampling.chain import Candidates, quick_draw, softmax
from localllm.sampling.errors import SamplingError
from localllm.sampling.repetition import find_dry_breakers
from localllm.sampling.sampler import Sampler

V = 1000
LOGITS = np.random.default_rng(5).normal(0, 2, V).astype(np.float32)


def test_defaults_are_llama_cpps() -> None:
    o = SamplingOptions()  # defaults of llama.cpp's common_params_sampling (common/common.h)
    assert (o.temperature, o.dynatemp_range, o.dynatemp_exp) == (0.8, 0.0, 1.0)
    assert (o.top_k, o.top_p, o.min_p, o.typical_p, o.top_n_sigma, o.min_keep) == (40, 0.95, 0.05, 1.0, -1.0, 0)
    assert (o.xtc_probability, o.xtc_threshold) == (0.0, 0.1)
    assert (o.repeat_last_n, o.repeat_penalty, o.frequency_penalty, o.presence_penalty) == (64, 1.0, 0.0, 0.0)
    assert (o.dry_multiplier, o.dry_base, o.dry_allowed_length, o.dry_penalty_last_n) == (0.0, 1.75, 2, 64)
    assert o.dry_sequence_breaker == ("\n", ":", '"', "*")
    assert " ".join(o.samplers) == "penalties dry top_n_sigma top_k typ_p top_p min_p xtc temperature"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("seed", -2, "-1 for a fresh one"),
        ("seed", 2**64, "2^64 - 1"),
        ("temperature", math.nan, "finite"),
        ("temperature", "hot", "finite"),
        ("dynatemp_range", -0.1, "0 or more"),
        ("top_k", 40.5, "whole number"),
        ("top_k", True, "whole number"),
        ("top_p", 1.01, "from 0 to 1"),
        ("top_p", math.nan, "from 0 to 1"),
        ("min_p", -0.01, "from 0 to 1"),
        ("typical_p", 2, "from 0 to 1"),
        ("top_n_sigma", math.inf, "finite"),
        ("xtc_probability", 1.5, "from 0 to 1"),
        ("xtc_threshold", -1, "from 0 to 1"),
        ("repeat_penalty", 0, "above 0"),
        ("repeat_last_n", -1, "0 or more"),
        ("presence_penalty", math.inf, "finite"),
        ("dry_base", 0.5, "1 or more"),
        ("dry_multiplier", -1, "0 or more"),
        ("min_keep", -1, "0 or more"),
        ("logit_bias", {-1: 0.0}, "token id"),
        ("logit_bias", {"a": 0.0}, "token id"),
        ("logit_bias", {7: math.inf}, "-inf to ban"),
        ("logit_bias", {7: math.nan}, "-inf to ban"),
        ("dry_sequence_breaker", ("\n", ""), "1 to 40 bytes"),
        ("dry_sequence_breaker", ("é" * 21,), "1 to 40 bytes"),
        ("samplers", ("top_k", "top_q"), "known are penalties, dry,"),
    ],
)
def test_a_bad_option_is_refused_by_name_with_its_range(name: str, value: Any, text: str) -> None:
    with pytest.raises(OptionError) as error:
        SamplingOptions(**{name: value})
    assert name in str(error.value)
    assert text in str(error.value)
    assert isinstance(error.value, LocalLLMError)


def test_draws_follow_the_probabilities() -> None:
    sampler = Sampler(SamplingOptions(seed=1))
    ids = np.array([5, 3, 9, 2, 7, 11, 0, 4], np.int32)
    p = np.array([0.3, 0.25, 0.2, 0.1, 0.08, 0.04, 0.02, 0.01])
    n = 20000
    counts = Counter(sampler.draw(ids, p) for _ in range(n))
    chi2 = sum((counts[int(token)] - n * x) ** 2 / (n * x) for token, x in zip(ids, p, strict=True))
    assert chi2 < 24.32  # the 99.9 % quantile for 7 degrees of freedom


def test_impossible_tokens_are_never_drawn() -> None:
    sampler = Sampler(SamplingOptions(seed=2))
    ids, p = np.arange(5, dtype=np.int32), np.array([0, 0.5, 0, 0.5, 0])
    assert {sampler.draw(ids, p) for _ in range(2000)} == {1, 3}


def test_the_ends_of_the_dice() -> None:
    class Loaded(Sampler):
        roll = 0.0

        def uniform(self) -> float:
            return self.roll

    sampler = Loaded(SamplingOptions())
    ids, p = np.arange(4, dtype=np.int32), np.array([0, 0.5, 0.5, 0])
    assert sampler.draw(ids, p) == 1
    sampler.roll = 0.5  # [0, 0.5) is token 1, [0.5, 1) is token 2
    assert sampler.draw(ids, p) == 2
    sampler.roll = 1 - 2.0**-53
    assert sampler.draw(ids, p) == 2


def test_random_numbers_are_those_of_numpys_generator_and_stay_so() -> None:
    sampler = Sampler(SamplingOptions(seed=42))
    found = [sampler.uniform() for _ in range(3)]
    assert found == [0.7739560485559633, 0.4388784397520523, 0.8585979199113825]
    assert found == np.random.Generator(np.random.PCG64(42)).random(3).tolist()


def test_the_same_seed_gives_the_same_tokens_and_reset_starts_over() -> None:
    first, second = Sampler(SamplingOptions(seed=3)), Sampler(SamplingOptions(seed=3))
    tokens = [first.sample(LOGITS) for _ in range(50)]
    assert [second.sample(LOGITS) for _ in range(50)] == tokens
    assert [Sampler(SamplingOptions(seed=4)).sample(LOGITS) for _ in range(50)] != tokens
    greedy = Sampler(SamplingOptions(temperature=0, presence_penalty=100.0))
    greedy.accept(int(LOGITS.argmax()))
    assert greedy.sample(LOGITS) != LOGITS.argmax()
    greedy.reset()
    assert greedy.sample(LOGITS) == LOGITS.argmax()
    first.reset()
    assert [first.sample(LOGITS) for _ in range(50)] == tokens


def test_a_fresh_seed_is_told_and_repeats_the_run() -> None:
    first, other = Sampler(SamplingOptions()), Sampler(SamplingOptions())
    assert first.seed != other.seed
    again = Sampler(SamplingOptions(seed=first.seed))
    assert [first.sample(LOGITS) for _ in range(20)] == [again.sample(LOGITS) for _ in range(20)]


def test_one_random_number_per_draw_whatever_the_number_of_candidates() -> None:
    one, many = Sampler(SamplingOptions(seed=5, top_k=1)), Sampler(SamplingOptions(seed=5))
    for _ in range(10):
        one.sample(LOGITS)
        many.sample(LOGITS)
    assert one.uniform() == many.uniform()


def test_distribution_changes_nothing_and_repeats() -> None:
    logits = LOGITS.copy()
    options = SamplingOptions(
        seed=6, repeat_penalty=1.3, dry_multiplier=0.8, xtc_probability=0.5, logit_bias={3: 2.0}, temperature=1.5
    )
    sampler = Sampler(options)
    for token in [1, 2, 3, 1, 2]:
        sampler.accept(token)
    first, second = sampler.distribution(logits), sampler.distribution(logits)
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1], second[1])
    np.testing.assert_array_equal(logits, LOGITS)


def test_restore_takes_back_accepted_tokens() -> None:
    options = SamplingOptions(seed=7, presence_penalty=1.0, xtc_probability=0.5, temperature=2.0)
    sampler = Sampler(options)
    sampler.accept(int(LOGITS.argmax()))
    before = sampler.distribution(LOGITS)
    snapshot = sampler.snapshot()
    for token in LOGITS.argsort()[-10:]:
        sampler.accept(int(token))
    assert not np.array_equal(sampler.distribution(LOGITS)[0], before[0])
    sampler.restore(snapshot)
    after = sampler.distribution(LOGITS)
    np.testing.assert_array_equal(after[0], before[0])
    np.testing.assert_array_equal(after[1], before[1])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0},
        {"temperature": 0, "presence_penalty": 1.0},
        {"top_k": 0, "temperature": 2.0, "dry_multiplier": 0.8},
        {"xtc_probability": 0.5, "temperature": 1.5},
        {"mirostat": 1},
        {"mirostat": 2},
        {"adaptive_target": 0.3, "samplers": ("min_p", "adaptive_p")},
    ],
    ids=str,
)
@pytest.mark.parametrize("read", [0, 1, 7, 12])
def test_a_sampler_that_is_rewound_continues_after_the_tokens_that_were_read(
    options: dict[str, Any], read: int
) -> None:
    def answer(sampler: Sampler, count: int) -> list[int]:
        sampler.begin()
        sampler.accept(1)
        found = []
        for _ in range(count):
            found.append(sampler.sample(np.roll(LOGITS, 7 * len(found))))
            sampler.write(found[-1])
        return found

    ahead, exact = (Sampler(SamplingOptions(seed=9, **options)) for _ in range(2))
    assert answer(ahead, 5) == answer(exact, 5)
    assert answer(ahead, 12)[:read] == answer(exact, read)
    ahead.sample(LOGITS)  # sampled, but not appended to the answer
    rewound = ahead.rewound(read)
    ahead.sample(LOGITS)  # in another thread
    for count in (9, 4):
        assert answer(rewound, count) == answer(exact, count)


def test_xtc_happens_as_often_as_asked() -> None:
    sampler = Sampler(SamplingOptions(seed=8, samplers=("xtc",), xtc_probability=0.25, xtc_threshold=0.1))
    logits = np.log(np.array([0.5, 0.4, 0.1], np.float32))
    happened = 0
    for _ in range(2000):
        happened += len(sampler.distribution(logits)[0]) < 3
        sampler.accept(0)
    assert abs(happened - 500) < 4 * math.sqrt(2000 * 0.25 * 0.75)


def test_greedy_takes_the_largest_and_of_equal_ones_the_lowest_id() -> None:
    logits = LOGITS.copy()
    logits[[17, 400, 401]] = 50
    for options in (
        SamplingOptions(temperature=0),
        SamplingOptions(temperature=0, presence_penalty=1e-3),  # no fast path for greedy decoding
        SamplingOptions(temperature=0, samplers=("top_k", "penalties", "temperature"), presence_penalty=1e-3),
    ):
        assert Sampler(options).sample(logits) == 17


def test_greedy_heeds_bias_and_penalties() -> None:
    logits = np.array([3, 2, 1, 0], np.float32)
    assert Sampler(SamplingOptions(temperature=0, logit_bias={0: -math.inf})).sample(logits) == 1
    assert Sampler(SamplingOptions(temperature=0, logit_bias={3: 4.0, 2: 2.5})).sample(logits) == 3
    sampler = Sampler(SamplingOptions(temperature=0, presence_penalty=1.5))
    sampler.accept(0)
    assert sampler.sample(logits) == 1


def test_bias_is_added_before_everything_else() -> None:
    logits = np.zeros(4, np.float32)
    sampler = Sampler(SamplingOptions(samplers=(), logit_bias={1: math.log(2), 3: -math.inf}))
    ids, p = sampler.distribution(logits)
    assert ids.tolist() == [0, 1, 2]
    assert p == pytest.approx([0.25, 0.5, 0.25])


@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(temperature=0),
        SamplingOptions(seed=1),
        SamplingOptions(top_k=2, seed=1),
        SamplingOptions(logit_bias={0: 100.0, 2: 100.0}, seed=1),  # the user's bias does not restore a forbidden token
    ],
)
def test_suppressed_tokens_are_never_chosen(options: SamplingOptions) -> None:
    sampler = Sampler(options, suppressed=(2, 0))
    assert sampler.required_top_k == 0
    logits = np.array([9, 3, 9, 2.5], np.float32)
    drawn = {sampler.sample(logits) for _ in range(200)}
    assert drawn == ({1} if options.greedy else {1, 3})
    assert set(sampler.distribution(logits)[0].tolist()) <= {1, 3}
    assert [name for name, _ in sampler.stages(logits)][1] == ("logit_bias" if options.logit_bias else "suppressed")


@pytest.mark.parametrize("options", [SamplingOptions(), SamplingOptions(temperature=0), SamplingOptions(top_k=0)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e38])
@pytest.mark.parametrize("where", [0, 500, V - 1])
def test_broken_logits_are_an_error_that_names_the_likely_cause(
    options: SamplingOptions, bad: float, where: int
) -> None:
    logits = LOGITS.copy()
    logits[where] = bad
    with pytest.raises(SamplingError, match="weights are probably damaged"):
        Sampler(options).sample(logits)


def test_no_token_left_and_unknown_token_are_errors() -> None:
    with pytest.raises(SamplingError, match="weights are probably damaged"):
        Sampler(SamplingOptions()).sample(np.full(4, -np.inf, np.float32))
    with pytest.raises(SamplingError, match="no token can be chosen"):
        Sampler(SamplingOptions(logit_bias=dict.fromkeys(range(4), -math.inf))).sample(np.zeros(4, np.float32))
    with pytest.raises(SamplingError, match=r"token 9, but the model has tokens 0 to 3"):
        Sampler(SamplingOptions(logit_bias={9: 1.0})).sample(np.zeros(4, np.float32))


@pytest.mark.filterwarnings("error")
def test_extreme_but_allowed_numbers_give_a_distribution_without_warnings() -> None:
    logits = np.concatenate((np.linspace(-3e38, 0, 1500), np.linspace(-9e19, 9e19, 1500))).astype(np.float32)
    sampler = Sampler(
        SamplingOptions(
            repeat_penalty=5.0,
            frequency_penalty=1e30,
            dry_multiplier=1e6,
            dry_base=10.0,
            top_n_sigma=50.0,
            typical_p=0.9,
        )
    )
    for token in [0, 1, 2999] * 30:
        sampler.accept(token)
    ids, p = sampler.distribution(logits)
    assert p.sum() == pytest.approx(1)
    assert 2999 not in ids


def test_sequence_breakers_are_found_in_every_spelling() -> None:
    pieces = [b"a", b"\n", b"x\n\n", b"END", b"the E", b"N", b"D", b"EN", b"nd", b"EE"]
    tokenized = {"ND": [5, 6], "D": [6]}
    found = find_dry_breakers(("\n", "END"), pieces, lambda text: tokenized[text])
    assert found == {
        1: ((),),
        2: ((),),
        3: ((),),
        4: ((5, 6),),
        7: ((6,),),
        9: ((5, 6),),
    }
    both = find_dry_breakers(("aab",), [b"aa"], lambda text: list(text.encode()))
    assert both == {0: ((97, 98), (98,))}  # as "a|ab" after the last a, or as "aa|b"


def test_many_sequence_breakers_are_found_as_fast_as_few() -> None:
    """A request may have hundreds of sequence breakers. The search takes as long per vocabulary token as with
    a single sequence breaker.
    """
    looks = 0

    class Watched(bytes):
        def __contains__(self, part: Any) -> bool:
            nonlocal looks
            looks += 1
            return super().__contains__(part)

        def __getitem__(self, place: Any) -> Any:
            nonlocal looks
            looks += 1
            return super().__getitem__(place)

    def count(strings: Sequence[str]) -> int:
        nonlocal looks
        looks = 0
        find_dry_breakers(strings, [Watched(b"once"), Watched(b"upon"), Watched(b"a")], lambda text: [1])
        return looks

    assert 0 < count([f"{i:03}" for i in range(256)]) <= count(["xyz"])


def test_a_quick_draw_is_the_exact_one() -> None:
    """If float32 sums decide a draw among many candidates, float64 probabilities give the same token."""
    random = np.random.default_rng(5)
    quick = 0
    for spread in (0.01, 1.0, 3.0, 9.0):
        logits = random.normal(0, spread, 20_000).astype(np.float32)
        logits[random.integers(0, len(logits), 50)] = -np.inf
        candidates = Candidates(np.arange(len(logits), dtype=np.int32)[::-1].copy(), logits)
        sums = softmax(candidates).cumsum()
        for uniform in (0.0, 1 - 2**-53, *random.random(200)):
            found = quick_draw(candidates, float(uniform))
            quick += found is not None
            assert found in (None, int(candidates.ids[sums.searchsorted(uniform * sums[-1], side="right")]))
    assert quick > 250

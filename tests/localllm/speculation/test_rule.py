"""Whoever guesses and however badly: the tokens have the distribution that the model and the samplers give."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from statistics import NormalDist

import numpy as np
import pytest

from localllm.options import SamplingOptions
from localllm.sampling.sampler import Sampler
from localllm.speculation.rule import Guess, choose
from localllm.speculation.speculator import SpeculativeDecoding
from tests.localllm.speculation.support import Clock, TableSession, ToldDrafter, reckless, write

# Every sampler does something; the vocabulary is small, so that every outcome is seen often.
ALL_ON = SamplingOptions(
    seed=5, temperature=0.9, dynatemp_range=0.3, top_k=6, top_p=0.97, min_p=0.02, typical_p=0.98, top_n_sigma=2.5,
    xtc_probability=0.5, xtc_threshold=0.15, repeat_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.1,
    dry_multiplier=0.6, dry_allowed_length=1, logit_bias={3: 0.4},
)  # fmt: skip
PLAIN = SamplingOptions(seed=5, temperature=1, top_k=0, top_p=1, min_p=0)
V = 8
PROMPT = [1, 2, 1]


def table(seed: int, spread: float = 1.5):  # type: ignore[no-untyped-def]
    """A model: logits (V,) that depend on the last two tokens."""
    logits = np.random.RandomState(seed).standard_normal((V, V, V)).astype(np.float32) * spread
    return lambda tokens: logits[tokens[-2:][0], tokens[-1]]


def limit(cells: int) -> float:
    """What chi-square stays below in all but one of 100,000 runs (Wilson and Hilferty)."""
    df = cells - 1
    return df * (1 - 2 / (9 * df) + NormalDist().inv_cdf(1 - 1e-5) * (2 / (9 * df)) ** 0.5) ** 3


def chi_square(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> tuple[float, float]:
    """(statistic, limit); cells expected fewer than five times count as one. Nothing impossible may have happened."""
    assert set(counts) <= set(expected)
    n = counts.total()
    cells = [(counts[k], n * p) for k, p in expected.items() if n * p >= 5]
    rest = (n - sum(seen for seen, _ in cells), n - sum(wanted for _, wanted in cells))
    cells += [rest] if rest[1] > 1 else []
    return sum((seen - wanted) ** 2 / wanted for seen, wanted in cells), limit(len(cells))


def exactly(options: SamplingOptions, logits, length: int) -> dict[tuple[int, ...], float]:  # type: ignore[no-untyped-def]
    """The probability of every answer of `length` tokens, by the definition: one token after another."""
    sampler = Sampler(options)
    found = {(): 1.0}
    for _ in range(length):
        longer = {}
        for answer, probability in found.items():
            sampler.restore(0)
            for token in (*PROMPT, *answer):
                sampler.accept(token)
            for token, p in zip(*sampler.distribution(logits([*PROMPT, *answer])), strict=True):
                longer[(*answer, int(token))] = probability * float(p)
        found = longer
    return found


def drawn(logits):  # type: ignore[no-untyped-def]
    """Guesses as a draft model makes them: drawn from its own distribution, with the same samplers."""

    def guess(text: list[int], sampler: Sampler) -> Guess:
        ids, q = sampler.distribution(logits(text))
        return Guess(sampler.draw(ids, q), 0, (ids, q))

    return guess


def certain(text: list[int], sampler: Sampler) -> Guess:
    """Guesses as n-grams make them."""
    return Guess((text[-1] + text[-2]) % V, 0, None)


DRAFTERS = {
    "alike": drawn(lambda tokens: table(1)(tokens) + 0.3 * table(2)(tokens)),
    "unlike": drawn(table(2, 3.0)),
    "hostile": drawn(lambda tokens: -table(1, 3.0)(tokens)),
    "certain": certain,
}


@pytest.mark.parametrize("options", [ALL_ON, PLAIN], ids=["all on", "plain"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_answers_have_the_models_distribution(options: SamplingOptions, drafter: str) -> None:
    """Chi-square over answers of three tokens, each drawn through passes that check up to three guesses."""
    sampler, clock, counts = Sampler(options), Clock(), Counter[tuple[int, ...]]()
    session = TableSession(table(1), clock, dict.fromkeys(range(1, 17), 1.0))
    told = ToldDrafter(DRAFTERS[drafter], clock)
    for _ in range(1500):
        sampler.restore(0)
        session.rewind(0)
        decoding = SpeculativeDecoding(reckless(told, 3), session, sampler, PROMPT)  # type: ignore[arg-type]
        counts[tuple(write(decoding, sampler, session, PROMPT, 3))] += 1
    statistic, most = chi_square(counts, exactly(options, table(1), 3))
    assert statistic < most


FOLLOWING = {
    "mirostat": SamplingOptions(mirostat=1, mirostat_tau=2.0, mirostat_eta=0.9, temperature=1),
    "mirostat 2": SamplingOptions(mirostat=2, mirostat_tau=1.2, mirostat_eta=0.9, temperature=1),
    "adaptive-p": SamplingOptions(
        samplers=("top_k", "adaptive_p"), top_k=6, adaptive_target=0.5, adaptive_decay=0.3, temperature=1
    ),
}


def following(options: SamplingOptions, logits, length: int) -> dict[tuple[int, ...], float]:  # type: ignore[no-untyped-def]
    """The probability of every answer with samplers that follow the text, each answer by a sampler of its own."""
    found = {(): 1.0}
    for _ in range(length):
        longer = {}
        for answer, probability in found.items():
            sampler = Sampler(options)
            for place, token in enumerate(answer):
                sampler.distribution(logits([*PROMPT, *answer[:place]]))
                sampler.write(token)
            for token, p in zip(*sampler.distribution(logits([*PROMPT, *answer])), strict=True):
                longer[(*answer, int(token))] = probability * float(p)
        found = longer
    return found


@pytest.mark.parametrize("name", FOLLOWING)
def test_samplers_that_follow_the_text_keep_their_distribution(name: str) -> None:
    options, clock, counts = FOLLOWING[name], Clock(), Counter[tuple[int, ...]]()
    session = TableSession(table(1), clock, dict.fromkeys(range(1, 17), 1.0))
    told = ToldDrafter(DRAFTERS["unlike"], clock)
    for seed in range(600):
        sampler = Sampler(replace(options, seed=seed))
        session.rewind(0)
        decoding = SpeculativeDecoding(reckless(told, 3), session, sampler, PROMPT)  # type: ignore[arg-type]
        counts[tuple(write(decoding, sampler, session, PROMPT, 3))] += 1
    statistic, most = chi_square(counts, following(options, table(1), 3))
    assert statistic < most


def likely(text: list[int], sampler: Sampler) -> Guess:
    """Guesses of a draft model that always takes its likeliest token."""
    ids, q = sampler.distribution(table(2)(text) + table(1)(text))
    return Guess(int(ids[q.argmax()]), 0, None)


@pytest.mark.parametrize("drafter", [certain, likely])
@pytest.mark.parametrize("name", FOLLOWING)
def test_guesses_without_a_choice_give_the_tokens_of_plain_decoding_with_them(name: str, drafter) -> None:  # type: ignore[no-untyped-def]
    """Wrong guesses among them: what follows a rejected one is as if it had never been there."""
    for seed in range(40):
        text, plain = list(PROMPT), Sampler(replace(FOLLOWING[name], seed=seed))
        for _ in range(8):
            text.append(plain.sample(table(1)(text)))
            plain.write(text[-1])
        clock, sampler = Clock(), Sampler(replace(FOLLOWING[name], seed=seed))
        session = TableSession(table(1), clock, dict.fromkeys(range(1, 17), 1.0))
        speculator = reckless(ToldDrafter(drafter, clock), 3)
        decoding = SpeculativeDecoding(speculator, session, sampler, PROMPT)  # type: ignore[arg-type]
        assert write(decoding, sampler, session, PROMPT, 8) == text[len(PROMPT) :]


def test_chi_square_sees_a_draft_that_is_believed() -> None:
    """The test above can fail: guesses of an unlike draft that all stand have another distribution."""
    sampler, counts = Sampler(PLAIN), Counter[tuple[int, ...]]()
    for _ in range(1500):
        counts[(drawn(table(2, 3.0))(PROMPT, sampler).token,)] += 1
    expected = exactly(PLAIN, table(1), 1)
    statistic, most = chi_square(counts, expected)
    assert statistic > most


def test_a_guess_stands_as_often_as_the_distributions_overlap() -> None:
    """The sum of min(p, q): the best that any rule can do. The likelihoods that are told have the same mean."""
    sampler, draws = Sampler(PLAIN), 4000
    target, draft = table(1)(PROMPT), table(2)(PROMPT)
    p, q = (sampler.distribution(logits)[1] for logits in (target, draft))
    stood, told = 0, 0.0
    for _ in range(draws):
        guess = drawn(table(2))(PROMPT, sampler)
        token, likelihood = choose(sampler, target, guess)
        stood += token == guess.token
        told += likelihood
    overlap = np.minimum(p, q).sum()
    assert stood / draws == pytest.approx(overlap, abs=4 * (overlap * (1 - overlap) / draws) ** 0.5)
    assert told / draws == pytest.approx(overlap, abs=0.03)


def test_a_certain_guess_changes_not_even_the_dice() -> None:
    """With the same seed the token is the one that would have been drawn without a guess."""
    with_guess, without = Sampler(ALL_ON), Sampler(ALL_ON)
    for first, second in product(range(V), range(V)):
        logits = table(1)([first, second])
        assert choose(with_guess, logits, Guess(first, 0, None)).token == without.sample(logits)


@pytest.mark.parametrize("guess", range(V))
def test_greedy_takes_the_likeliest_whatever_is_guessed(guess: int) -> None:
    sampler = Sampler(SamplingOptions(temperature=0))
    logits = table(1)(PROMPT)
    verdict = choose(sampler, logits, Guess(guess, 0, (np.array([guess], np.int32), np.ones(1))))
    assert verdict == (logits.argmax(), float(guess == logits.argmax()))


def test_equal_distributions_always_agree() -> None:
    sampler = Sampler(PLAIN)
    for _ in range(200):
        guess = drawn(table(1))(PROMPT, sampler)
        assert choose(sampler, table(1)(PROMPT), guess) == (guess.token, 1.0)


def test_what_is_left_of_distributions_that_differ_by_rounding_can_be_drawn_from() -> None:
    """p below q in every token: nothing is left, and one of p is drawn."""
    sampler = Sampler(PLAIN)
    ids, p = sampler.distribution(table(1)(PROMPT))
    for _ in range(50):
        assert 0 <= choose(sampler, table(1)(PROMPT), Guess(int(ids[0]), 0, (ids, p * 1.5))).token < V

"""Speculative decoding under a grammar: for any drafts, the grammar allows every token of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.generation.request import Request
from localllm.generation.speculation.rule import DraftToken
from localllm.options import SamplingOptions
from localllm.sampling.errors import SamplingError
from localllm.sampling.sampler import Sampler
from tests.localllm.generation.speculation.support import GREEDY, Guessing, Told, table_engine
from tests.localllm.generation.speculation.test_rule import DRAFTERS, OPTIONS, PLAIN, PROMPT, V, table
from tests.localllm.generation.support import Stepped, Watched


class Steps:
    """A grammar in which every token is 1 to 3 more than the previous token, modulo the vocabulary. Any token may
    start.
    """

    finished = False

    def __init__(self) -> None:
        self.last = -1

    def allowed(self) -> NDArray[np.bool_] | None:
        return None if self.last < 0 else self.after(self.last)

    def accept(self, token: int) -> None:
        assert self.last < 0 or self.after(self.last)[token]
        self.last = token

    def validate(self, tokens: Sequence[int]) -> int:
        last = self.last
        for count, token in enumerate(tokens):
            if last >= 0 and not self.after(last)[token]:
                return count
            last = token
        return len(tokens)

    @staticmethod
    def after(token: int) -> NDArray[np.bool_]:
        return np.isin(np.arange(V), [(token + step) % V for step in (1, 2, 3)])


def plain(options: SamplingOptions, count: int) -> list[int]:
    """Return the answer of plain decoding."""
    sampler, text = Sampler(options), list(PROMPT)
    sampler.constrain(Steps())
    for token in PROMPT:
        sampler.accept(token)
    for _ in range(count):
        text.append(sampler.sample(table(1)(text)))
        sampler.write(text[-1])
    return text[len(PROMPT) :]


def drafted(options: SamplingOptions, guess: Guessing, count: int) -> tuple[list[int], Watched]:
    """Return the answer with all drafts verified, and the engine that verified them."""
    engine = Watched(table_engine(table(1)))
    with Stepped(engine, Told(guess, 3)) as it:
        _, answer = it.ask(Request(PROMPT, options, count, constraint=Steps))
        it.finish()
    return answer.tokens, engine


def test_the_constraint_is_kept_and_matters() -> None:
    answer = plain(PLAIN, 200)
    assert all((after - before) % V in (1, 2, 3) for before, after in pairwise(answer))
    assert len(set(answer)) == V


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_answers_are_those_without_drafts(options: SamplingOptions, drafter: str) -> None:
    answer, engine = drafted(options, DRAFTERS[drafter], 100)
    assert answer == plain(options, 100)
    assert any(len(rows.tokens) > 1 for step in engine.stepped[1:] for rows in step)


def test_what_the_grammar_forbids_is_not_verified() -> None:
    """Of three draft tokens, the grammar allows the first, often the second, and never the third, so at most
    two are verified.
    """

    def guess(text: list[int], sampler: Sampler) -> DraftToken:
        return DraftToken((text[-1] + (2, 3 + len(text) % 2, V // 2)[len(text) % 3]) % V, 0)

    answer, engine = drafted(PLAIN, guess, 100)
    assert answer == plain(PLAIN, 100)
    parts = [rows.tokens for [rows] in engine.stepped[1:]]
    assert all((after - before) % V in (1, 2, 3) for part in parts for before, after in pairwise(part))
    assert sum(len(part) - 1 for part in parts) > 30


class Nothing(Steps):
    """A grammar that allows only a token whose logit is -inf, or no token."""

    def __init__(self, *tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def allowed(self) -> NDArray[np.bool_]:
        return np.isin(np.arange(V), self.tokens)


@pytest.mark.parametrize("options", [GREEDY, PLAIN], ids=["greedy", "sampled"])
@pytest.mark.parametrize("tokens", [(), (3,)])
def test_a_grammar_that_leaves_no_token_is_a_line(options: SamplingOptions, tokens: tuple[int, ...]) -> None:
    sampler, logits = Sampler(options), np.zeros(V, np.float32)
    logits[3] = -np.inf
    sampler.constrain(Nothing(*tokens))
    with pytest.raises(SamplingError, match="grammar allows no token"):
        sampler.sample(logits)


def test_all_logits_are_wanted_while_a_constraint_is_on() -> None:
    sampler = Sampler(GREEDY)
    assert sampler.required_top_k == 1
    sampler.constrain(Steps())
    assert sampler.required_top_k == 0
    sampler.constrain(None)
    assert sampler.required_top_k == 1

"""Drafts from repetitions, compared with a search through the whole text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice

import numpy as np
import pytest

from localllm.generation.speculation import automaton
from localllm.generation.speculation.rule import DraftToken
from localllm.generation.speculation.suffixes import PRIORS, SuffixDrafter
from localllm.options import SamplingOptions
from localllm.sampling.sampler import Sampler

SAMPLER = Sampler(SamplingOptions())


def drafts(text: Sequence[int], count: int = 6) -> list[DraftToken]:
    return list(islice(SuffixDrafter(text).propose(SAMPLER), count))


def tokens(text: Sequence[int], count: int = 6) -> list[int]:
    return [draft.token for draft in drafts(text, count)]


def followers(text: Sequence[int], context: Sequence[int]) -> list[int]:
    """Return the tokens that followed the places of `context` in the text, in order."""
    size = len(context)
    return [text[at + size] for at in range(len(text) - size) if list(text[at : at + size]) == list(context)]


def searched(text: Sequence[int], count: int) -> list[int]:
    """Return the most frequent next token of the longest context with one, append it to the context, and repeat."""
    context, found = list(text), list[int]()
    while len(found) < count:
        while context and not followers(text, context):
            context = context[1:]
        if not context:
            break
        seen = followers(text, context)
        most = max(Counter(seen).values())
        best = next(token for token in reversed(seen) if seen.count(token) == most)
        found.append(best)
        context = [*context, best]
    return found


@pytest.mark.parametrize("alphabet", [2, 3, 5, 30])
def test_drafts_are_those_of_a_search(alphabet: int) -> None:
    random = np.random.default_rng(alphabet)
    for size in range(60):
        text = random.integers(0, alphabet, size).tolist()
        assert tokens(text, 8) == searched(text, 8), text


def test_a_text_may_be_extended_between_drafts() -> None:
    text = np.random.default_rng(1).integers(0, 3, 80).tolist()
    drafter = SuffixDrafter(text[:5])
    for at in range(5, len(text)):
        assert [draft.token for draft in islice(drafter.propose(SAMPLER), 4)] == searched(text[:at], 4)
        drafter.accept(text[at])


def test_the_most_frequent_next_token_is_drafted_and_of_equals_the_newest() -> None:
    assert tokens([1, 2, 5, 1, 2, 5, 1, 2, 6, 1, 2], 1) == [5]
    assert tokens([1, 2, 5, 1, 2, 6, 1, 2], 1) == [6]
    assert tokens([7, 1, 2, 3, 4, 0, 8, 1, 2, 3, 5, 0, 7, 1, 2, 3], 1) == [4]  # the longest context decides


def test_a_repetition_runs_on_into_itself() -> None:
    assert tokens([1, 2, 1, 2, 1, 2], 7) == [1, 2, 1, 2, 1, 2, 1]
    assert tokens([1]) == tokens([]) == tokens([1, 2, 3]) == []


def test_long_certain_contexts_have_a_high_prior() -> None:
    """A context of many tokens that was always followed by the same token, against one token with several."""
    [sure] = drafts([*range(20)] * 4, 1)
    [unsure] = drafts([1, 2, 1, 3, 1, 4, 1], 1)
    assert PRIORS[sure.trust] > 0.95
    assert PRIORS[unsure.trust] < 0.2
    assert all(0 < prior < 1 for prior in PRIORS)


def test_a_long_prompt_is_indexed_in_parts() -> None:
    drafter = SuffixDrafter([1, 2, 3] * 8)
    found = [list(islice(drafter.propose(SAMPLER, 10), 3)) for _ in range(3)]
    assert [len(each) for each in found] == [0, 0, 3]
    assert [draft.token for draft in found[2]] == [1, 2, 3]


def test_a_text_of_one_token_stays_cheap() -> None:
    """The chain of contexts is as long as the text; only its longest are counted."""
    drafter = SuffixDrafter([5] * 2000)
    assert [draft.token for draft in islice(drafter.propose(SAMPLER, 2000), 3)] == [5, 5, 5]
    assert sum(count > 1 for count in drafter._own._count) <= 2000
    assert max(drafter._own._count) <= automaton._CHAIN + 1


@pytest.mark.parametrize("text", [[5] * 3000 + [6], [4] + [5] * 2000 + [6] + [5] * 1998 + [7]], ids=["end", "split"])
def test_no_token_visits_the_whole_text(text: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token follows thousands of contexts. The drafter starts a new automaton instead of visiting all."""
    monkeypatch.setattr(automaton, "_WALK", 100)
    visited = 0

    def counting(self: automaton.SuffixAutomaton, state: int, token: int) -> int:
        nonlocal visited
        visited += 1
        return following(self, state, token)

    following = automaton.SuffixAutomaton._next
    monkeypatch.setattr(automaton.SuffixAutomaton, "_next", counting)
    drafter, most = SuffixDrafter(text), 0
    while drafter.behind:
        before = visited
        next(iter(drafter.propose(SAMPLER, 1)), None)
        most = max(most, visited - before)
    assert most < 600
    for token in (1, 2, 3, 1, 2):
        drafter.accept(token)
    assert next(drafter.propose(SAMPLER)).token == 3

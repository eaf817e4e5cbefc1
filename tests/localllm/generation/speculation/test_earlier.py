"""Drafts from earlier answers, compared with a search through the answers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
import pytest

import localllm
from localllm.generation.interfaces import SchedulerLimits
from localllm.generation.request import Request
from localllm.generation.request_state import RequestState, Ticket
from localllm.generation.speculation import earlier
from localllm.generation.speculation.drafts import Drafts
from localllm.generation.speculation.earlier import EarlierAnswers, EarlierByAccount, Following
from localllm.generation.speculation.suffixes import PRIORS, SuffixDrafter
from localllm.options import SamplingOptions
from localllm.sampling.sampler import Sampler
from tests.localllm.generation.speculation.support import Free, eager

SAMPLER = Sampler(SamplingOptions())


def searched(answers: Sequence[Sequence[int]], text: Sequence[int]) -> int:
    """Return the length of the longest end of `text` that one of the answers contains."""
    for length in range(len(text), 0, -1):
        end = list(text[-length:])
        if any(list(each[at : at + length]) == end for each in answers for at in range(len(each) - length + 1)):
            return length
    return 0


@pytest.mark.parametrize("alphabet", [2, 4, 12])
def test_the_longest_end_is_that_of_a_search_while_answers_are_added(alphabet: int) -> None:
    random = np.random.default_rng(alphabet)
    for _ in range(20):
        store, answers = EarlierAnswers(3000), list[list[int]]()
        text = random.integers(0, alphabet, 6).tolist()
        following = Following(store, text)
        for step in range(60):
            if step % 7 == 0:
                answers.append(random.integers(0, alphabet, 30).tolist())
                store.add(answers[-1], 0)
            recent = text[-earlier.PROMPT :]
            _, found = following.longest()
            assert searched(answers, recent) <= found.length <= searched(answers, text)
            text.append(int(random.integers(0, alphabet)))
            following.accept(text[-1])


def test_the_longer_context_drafts_and_a_draft_ends_with_the_answer() -> None:
    store = EarlierAnswers(300)
    store.add([9, 9, 1, 2, 3, 4, 5], prompt=2)
    text = [1, 2, 7, 0, 1, 2]
    assert [each.token for each in islice(SuffixDrafter(text).propose(SAMPLER), 1)] == [7]
    same_length = SuffixDrafter(text, Following(store, text))
    assert [each.token for each in islice(same_length.propose(SAMPLER), 1)] == [7]  # its own text, if both are equal
    longer = SuffixDrafter([9, 1, 2], Following(store, [9, 1, 2]))
    assert [each.token for each in longer.propose(SAMPLER)] == [3, 4, 5]
    assert min(each.trust for each in longer.propose(SAMPLER)) >= len(PRIORS) // 2  # classes of earlier answers


def test_answers_beyond_the_allowed_tokens_go_and_so_do_accounts() -> None:
    store = EarlierByAccount(300)
    for number in range(200):
        store.add("a", [1000 + number] * 12, 2)
        store.of("a").index()
        assert store.of("a").tokens <= 300
    assert Following(store.of("a"), [1199] * 8).longest()[1].length == 8
    assert Following(store.of("a"), [1000] * 8).longest()[1].length == 0
    store.add("b", [5] * 90, 2)
    assert Following(store.of("b"), [1199] * 8).longest()[1].length == 0  # another account's answers
    store.of("a")
    store.add("c", [6] * 90, 2)
    store.of("c").index()
    store.add("c", [6] * 90, 2)
    assert store.of("b").tokens == 0  # the least recently used account went first


def test_accounts_without_answers_take_no_memory_forever() -> None:
    store = EarlierByAccount(300)
    store.add("old", [5] * 20, 2)
    first = store.of("old")
    for number in range(earlier.MOST_ACCOUNTS - 1):
        store.of(f"address {number}")
    assert store.of("old") is first
    for number in range(earlier.MOST_ACCOUNTS):
        store.of(f"other {number}")
    assert store.of("old") is not first
    assert len(store._accounts) == earlier.MOST_ACCOUNTS


def test_an_indexed_answer_delays_a_step_by_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(earlier, "INDEXED", 10)
    store = EarlierAnswers(300)
    store.add(list(range(40)), 0)
    following = Following(store, [0, 1, 2])
    for left in (31, 21, 11, 1, 0):
        following.longest()
        assert store.waiting == left


@pytest.mark.parametrize(("reuse", "finished"), [(True, True), (False, True), (True, False)])
def test_only_whole_answers_that_may_be_kept_are_kept(reuse: bool, finished: bool) -> None:
    drafts = Drafts(Free(), 15, earlier=300)
    one = RequestState(Ticket(Request([1, 2, 3], SamplingOptions(), reuse=reuse), print), 1, SAMPLER, None)
    drafts.begin(one)
    one.tokens += [4, 5, 6]
    if finished:
        one.finish("length")
    drafts.end(one)
    assert drafts._earlier is not None
    other = Following(drafts._earlier.of(""), [2, 3, 4])
    assert other.longest()[1].length == (3 if reuse and finished else 0)


def test_an_answer_given_again_is_drafted_and_has_the_same_tokens() -> None:
    with localllm.load("demo", ctx_size=256, spec="ngram", draft_earlier=3000) as model:
        eager(model)
        model.new_core(SchedulerLimits())
        answers, used = [], []
        for _ in range(3):
            reply = model.generate("One day a dog", max_tokens=60, temperature=0.7, seed=3, ignore_eos=True)
            answers.append([piece.token for piece in reply])
            used.append(reply.usage)
    with localllm.load("demo", ctx_size=256) as plain:
        reply = plain.generate("One day a dog", max_tokens=60, temperature=0.7, seed=3, ignore_eos=True)
        assert [[piece.token for piece in reply]] * 3 == answers
    assert used[1].accepted > 40 + used[0].accepted
    assert used[2].decode_passes < 20 < used[0].decode_passes

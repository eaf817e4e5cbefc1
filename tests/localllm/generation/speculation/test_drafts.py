"""The draft tokens that a batch verifies equal a choice worked out by hand from given costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from time import thread_time
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import localllm
from localllm.backends.base import Limits
from localllm.generation.request import Request
from localllm.generation.request_state import RequestState
from localllm.generation.speculation.drafts import Drafts
from localllm.generation.speculation.model_drafter import Round
from localllm.generation.speculation.policy import Acceptance, Budget, Costs
from localllm.generation.speculation.rule import DraftToken
from localllm.generation.speculation.suffixes import INDEXED, SuffixDrafter
from localllm.options import SamplingOptions
from localllm.sampling.sampler import Sampler
from tests.localllm.generation.speculation.support import Clock, Told
from tests.localllm.generation.support import Stepped, Watched
from tests.localllm.generation.test_scheduler import Free, each_alone

GREEDY = SamplingOptions(temperature=0.0)
PHRASE = [5, 6, 7, 8, 9, 10, 11, 12]
LIMITS = Limits(rows=64, logit_rows=64, blocks=8, positions=400)


class Fixed(Costs):
    """Costs that never change."""

    def __init__(self, measured: dict[int, float]) -> None:
        super().__init__(measured)
        self.seen: list[int] = []

    def observe(self, rows: int, seconds: float) -> None:
        self.seen.append(rows)


@pytest.fixture(scope="module")
def model() -> Iterator[localllm.Model]:
    with localllm.load("demo", backend="cpu", threads=1, sequences=3) as model:
        yield model


def writing(model: localllm.Model, drafts: Drafts, prompts: list[list[int]], most: int = 50) -> list[RequestState]:
    """Return requests in generation, for which a step drafts."""
    it = Stepped(model, drafts)
    found = [it.ask(Request(prompt, GREEDY, most, ignore_eos=True))[0] for prompt in prompts]
    for one in found:
        drafts.begin(one)
    return found


def test_what_followed_the_same_tokens_is_drafted(model: localllm.Model) -> None:
    drafts = Drafts(Free({1: 1.0, 64: 1.0}), 6)
    [one, other] = writing(model, drafts, [[*PHRASE, *PHRASE[:4]], [1, 2, 3]])
    drafts.propose([one, other], LIMITS)
    assert [draft.token for draft in one.drafts] == [9, 10, 11, 12, 5, 6]
    assert (one.verified, other.drafts, other.verified) == (6, [], 0)


def test_requests_share_the_tokens_indexed_in_a_step(model: localllm.Model) -> None:
    drafts = Drafts(Free({1: 1.0, 64: 1.0}), 6)
    ones = writing(model, drafts, [PHRASE * 40] * 3)
    for one in ones:
        one.drafter = SuffixDrafter(PHRASE * 100)
    drafts.propose(ones, LIMITS)
    assert sum(len(PHRASE) * 100 - one.drafter.behind for one in ones if one.drafter) <= INDEXED
    assert not any(one.drafts for one in ones)
    for _ in range(6):
        drafts.propose(ones, LIMITS)
    assert all(len(one.drafts) == 6 for one in ones)


def test_drafts_end_where_the_answer_or_the_context_does(model: localllm.Model) -> None:
    drafts = Drafts(Free({1: 1.0, 64: 1.0}), 15)
    prompt = [*PHRASE, *PHRASE[:4]]
    [short] = writing(model, drafts, [prompt], most=4)
    drafts.propose([short], LIMITS)
    assert len(short.drafts) == 3
    [full] = writing(model, drafts, [prompt])
    drafts.propose([full], Limits(64, 64, 8, len(prompt) + 3))
    assert len(full.drafts) == 2
    drafts.propose([full], Limits(64, 64, 8, len(prompt) + 1))
    assert full.drafts == []


def test_rows_are_verified_while_they_cost_less_than_they_save(model: localllm.Model) -> None:
    """Forward passes of up to four tokens cost the same. Each further token costs as much as a step, which is the most
    that a draft token can save.
    """
    rows = {1: 1.0, 4: 1.0, 5: 2.5, 64: 62.0}
    drafts = Drafts(Fixed(rows), 15)
    [one] = writing(model, drafts, [[*PHRASE, *PHRASE[:4]]])
    drafts.propose([one], LIMITS)
    assert one.verified == 3
    pair = writing(model, drafts, [[*PHRASE, *PHRASE[:4]]] * 2)
    drafts.propose(pair, LIMITS)
    assert [one.verified for one in pair] == [1, 1]  # both requests compete for two tokens whose verification is free


def test_nothing_is_verified_where_every_row_costs_a_step(model: localllm.Model) -> None:
    drafts = Drafts(Fixed({1: 1.0, 64: 64.0}), 15)
    [one] = writing(model, drafts, [[*PHRASE, *PHRASE[:4]]])
    drafts.propose([one], LIMITS)
    assert one.drafts
    assert one.verified == 0


def test_a_batch_as_wide_as_what_was_measured_verifies_nothing(model: localllm.Model) -> None:
    drafts = Drafts(Free({1: 1.0, 2: 1.0}), 15)
    pair = writing(model, drafts, [[*PHRASE, *PHRASE[:4]]] * 2)
    drafts.propose(pair, LIMITS)
    assert [one.verified for one in pair] == [0, 0]


def test_guesses_that_fail_are_drafted_less(model: localllm.Model) -> None:
    drafts = Drafts(Free({1: 1.0, 64: 1.0}), 15)
    [one] = writing(model, drafts, [[*PHRASE, *PHRASE[:4]]])
    drafts.propose([one], LIMITS)
    assert len(one.drafts) > 5
    for _ in range(200):
        one.outcome += [(draft.trust, False) for draft in one.drafts[:3]]
        drafts.judge(one)
        assert one.outcome == []
    drafts.propose([one], LIMITS)
    assert len(one.drafts) == 1  # two right draft tokens in sequence are very unlikely


def test_costs_are_learnt_from_steps_of_answers_alone(model: localllm.Model) -> None:
    costs = Fixed({1: 1.0, 16: 2.0})
    drafts = Drafts(costs, 15)
    drafts.observe(3, 0, 1.0)
    drafts.observe(40, 37, 1.0)
    drafts.observe(17, 0, 1.0)
    assert costs.seen == [3]


@pytest.mark.parametrize("wrong", [1, 8])
def test_requests_share_the_budget_by_one_number(model: localllm.Model, wrong: int) -> None:
    """One of eight requests has eight certain drafts, the others a weak one. They lose what was allowed, no more."""
    drafts = Drafts(Fixed({1: 1.0, 8: 1.2, 16: 1.7}), 15)
    ones = writing(model, drafts, [[*PHRASE, *PHRASE[:4]]] * 8)
    drafts._guess = (  # type: ignore[method-assign]
        lambda one, *_: [DraftToken(3, 1)] * 8 if one is ones[0] else [DraftToken(3, 0)]
    )
    drafts._acceptance = Acceptance([0.05, 0.99])
    drafts.propose(ones, LIMITS)
    assert ones[0].verified > 1
    drafts.observe(8 + sum(one.verified for one in ones), 0, 1.7, drafts.depart())
    for one in ones[:wrong]:
        one.outcome = [(0, False)]
        drafts.judge(one)
    assert 1.2 - 0.6 <= drafts._budget.tokens < 1.2


def test_a_model_is_asked_where_it_promises_more_than_repetitions_that_share_the_budget(model: localllm.Model) -> None:
    """One of eight requests has three certain drafts. Eight requests share a budget that allows all three. Alone, the
    request could verify one. So its repetitions save 0.25 passes. The model promises to save 0.15.
    """
    drafter: Any = Promising(0.15)
    drafts = Drafts(Fixed({1: 1.0, 8: 1.2, 16: 1.7}), 15, drafter)
    ones = writing(model, drafts, [[*PHRASE, *PHRASE[:4]]] * 8)
    drafts._guess = (  # type: ignore[method-assign]
        lambda one, *_: [DraftToken(3, 1)] * 3 if one is ones[0] else [DraftToken(3, 0)]
    )
    drafts._acceptance = Acceptance([0.05, 0.99])
    drafts.propose(ones, LIMITS)
    assert drafter.asked == ones[1:]
    assert ones[0].verified == 3


@pytest.mark.parametrize("ran", [8, 1])
def test_requests_that_a_model_ran_for_share_the_cost_of_a_draft(model: localllm.Model, ran: int) -> None:
    """A model ran for eight requests. It drafted one token, because grammars forbid its other drafts. The draft fails.
    Its verification costs two thirds of a token.
    """
    drafter: Any = Promising(100.0)
    drafter.round.shared = ran
    drafts = Drafts(Fixed({1: 1.0, 8: 1.2, 9: 1.3, 16: 2.0}), 15, drafter, repeats=False)
    ones = writing(model, drafts, [[1, 2, 3]] * 8)
    drafts.propose(ones, LIMITS)
    assert [one.verified for one in ones] == [1] + [0] * 7
    drafts.observe(9, 0, 1.3, proposal := drafts.depart())
    assert proposal.requests == drafter.round.shared == ran
    ones[0].outcome = [(0, False)]
    drafts.judge(ones[0])
    assert drafter.round.won == pytest.approx(-2 / 3)


class Rising:
    """A grammar in which every token is 1 to 3 more than the previous token, modulo 40. No token may follow 200."""

    def __init__(self, width: int, most: int) -> None:
        self._width, self._left, self._last = width, most, 0

    def allowed(self) -> NDArray[np.bool_] | None:
        mask = np.zeros(self._width, np.bool_)
        mask[[5 + (self._last + step) % 40 for step in (1, 2, 3)]] = True
        return mask

    def accept(self, token: int) -> None:
        assert self.validate([token]) == 1
        self._last, self._left = token - 5, self._left - 1

    def validate(self, tokens: Sequence[int]) -> int:
        last = self._last
        for count, token in enumerate(tokens):
            if (token - 5 - last) % 40 not in (1, 2, 3):
                return count
            last = token - 5
        return len(tokens)

    @property
    def finished(self) -> bool:
        return self._left <= 0


def test_what_a_grammar_forbids_is_not_verified(model: localllm.Model) -> None:
    """The grammar forbids every third draft token. The answer's tokens are the same as without drafts."""
    prompt = list(range(5, 45))

    def guess(text: list[int], sampler: Sampler) -> DraftToken:
        return DraftToken(5 + (text[-1] - 5 + (1, 2, 9)[len(text) % 3]) % 40, 0)

    requests = [
        Request(prompt, sampling, 200, constraint=lambda: Rising(model.vocabulary, 90))
        for sampling in (GREEDY, SamplingOptions(temperature=0.5, seed=2))
    ]
    expected = []
    for request in requests:
        with Stepped(model) as it:
            expected.append(it.ask(request)[1])
            it.finish()
    engine, drafts = Watched(model.engine), Told(guess)
    with Stepped(engine, drafts) as it:
        answers = [it.ask(request)[1] for request in requests]
        it.finish()
    verified = 0
    for step in engine.stepped:
        for rows in step:
            if rows.wanted == "all":
                assert all((b - a) % 40 in (1, 2, 3) for a, b in pairwise(rows.tokens))
                verified += len(rows.tokens) - 1
    assert verified
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    assert [answer.result().reason for answer in answers] == ["end", "end"]
    assert all(len(answer.tokens) == 90 for answer in answers)


def test_guesses_count_where_only_the_largest_logits_are_looked_at(model: localllm.Model) -> None:
    """No draft is verified, so a step returns only the largest logits. Acceptance statistics are still updated."""
    drafts = Drafts(Fixed({1: 1.0, 64: 64.0}), 15)
    with Stepped(model, drafts) as it:
        it.ask(Request([*PHRASE * 6], GREEDY, 60, ignore_eos=True))
        before = [drafts._acceptance.expect(trust) for trust in range(14)]
        it.finish()
    assert [drafts._acceptance.expect(trust) for trust in range(14)] != before


def test_usage_counts_what_was_verified_and_what_was_right(model: localllm.Model) -> None:
    request = Request([*PHRASE * 6, 3], GREEDY, 100, ignore_eos=True)
    engine = Watched(model.engine)
    with Stepped(engine, Drafts(Free({1: 1e-3, 16: 1e-3}), 15)) as it:
        _, answer = it.ask(request)
        it.finish()
    usage = answer.result().usage
    steps = engine.stepped[1:]  # without the prompt's step
    assert usage.drafted == sum(len(rows.tokens) - 1 for step in steps for rows in step)
    assert usage.accepted == 100 - 1 - len(steps)
    assert 0 < usage.accepted <= usage.drafted
    assert [answer.tokens] == each_alone(model, [request])


def test_a_step_with_prefill_would_take_nearly_as_long_without_drafts(model: localllm.Model) -> None:
    """Without drafts, only the time of the verified tokens is saved. A step with no prefill would take one pass."""
    drafts = Drafts(Fixed({rows: 9.0 + rows for rows in range(1, 17)}), 15, clock=Clock())
    [one] = writing(model, drafts, [PHRASE * 6])
    drafts.propose([one], LIMITS)
    assert one.verified > 2
    proposal = drafts.depart()
    drafts.observe(1 + one.verified + 64, 64, 80.0, proposal)
    assert drafts.plain_seconds(1, 80.0) == pytest.approx(80 - one.verified)
    drafts.observe(1 + one.verified, 0, 10.0 + one.verified, proposal)
    assert drafts.plain_seconds(1, 10.0 + one.verified) == pytest.approx(10)


def test_requests_in_prefill_are_not_counted_as_decoding(
    model: localllm.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def plain_seconds(self: Drafts, requests: int, seconds: float) -> float:
        seen.append(requests)
        return seconds

    monkeypatch.setattr(Drafts, "plain_seconds", plain_seconds)
    with Stepped(Watched(model.engine, rows=32), Drafts(Fixed({1: 1.0, 16: 16.0}), 15)) as it:
        one, _ = it.ask(Request([*PHRASE], GREEDY, 30, ignore_eos=True))
        it.turn(2)
        it.ask(Request([7, *range(100)], GREEDY, 2))
        seen.clear()
        it.turn()
    assert one.answer_tokens
    assert seen == [1]


# -- several sources, and the time they take -------------------------------------------------------------------------


class Promising:
    """A model that promises a gain, and drafts the token 3 for every request."""

    def __init__(self, gain: float) -> None:
        self._gain, self.asked = gain, list[RequestState]()
        self.acceptance, self.budget, self.round = Acceptance([0.9]), Budget(), Round()

    def promised(self, rows: int, worth: float) -> float:
        return self._gain

    def propose(self, ones: Sequence[RequestState], rows: int, worth: float, positions: int) -> None:
        self.asked = list(ones)
        for one in ones[:1]:  # it drafts nothing for the others
            one.drafts = [DraftToken(3, 0)]

    def begin_round(self, plain: float) -> Round:
        return self.round


@pytest.mark.parametrize(("gain", "asked"), [(100.0, [0, 1]), (1.0, [1]), (0.0, [])])
def test_the_source_that_promises_more_drafts(model: localllm.Model, gain: float, asked: list[int]) -> None:
    """The first request has a repetition, which is worth about four passes, the second has no repetition."""
    drafter: Any = Promising(gain)
    drafts = Drafts(Fixed({1: 1.0, 64: 1.0}), 15, drafter)
    ones = writing(model, drafts, [[*PHRASE * 4, *PHRASE[:4]], [1, 2, 3]])
    drafts.propose(ones, LIMITS)
    assert drafter.asked == [ones[number] for number in asked]
    modelled = [[], [1], [0]][len(asked)]
    assert [number for number, one in enumerate(ones) if one.modelled] == modelled
    if 0 in modelled:
        assert [draft.token for draft in ones[0].drafts] == [3]
    else:
        assert [draft.token for draft in ones[0].drafts[:3]] == [9, 10, 11]
        assert ones[0].verified > 2


def test_looking_for_repetitions_takes_a_share_of_the_time(model: localllm.Model) -> None:
    """Each look takes a second here, so the next one waits for a hundred seconds of steps."""
    clock = Clock()
    drafts = Drafts(Fixed({1: 1.0, 64: 1.0}), 6, shortest_pass=1e-9, clock=clock)
    [one] = writing(model, drafts, [[*PHRASE, *PHRASE[:4]]])
    assert one.drafter is not None
    propose = one.drafter.propose

    def slowly(sampler: Sampler, most: int = 0) -> Iterator[DraftToken]:
        clock.now += 1
        return propose(sampler, most)

    one.drafter.propose = slowly  # type: ignore[method-assign]
    looked = []
    for _ in range(300):
        drafts.propose([one], LIMITS)
        looked.append(bool(one.drafts))
        drafts.observe(1, 0, 1.0)
    assert 2 <= sum(looked) <= 4
    drafts._credit = 0.5
    drafts._worth, one.verified, one.modelled = 1.0, 2, False
    one.outcome = [(0, True), (0, True)]
    drafts.judge(one)  # saved time may be spent on further looks
    assert drafts._credit == pytest.approx(0.7)


@pytest.mark.parametrize(("seconds", "skipped"), [(1.0, 0), (3e-3, 7)])
def test_a_text_without_repetitions_is_not_looked_at_in_every_step(
    model: localllm.Model, seconds: float, skipped: int
) -> None:
    """Looking takes 0.1 ms here. It may take 0.5 % of a step after eight steps in vain."""
    clock = Clock()

    def read() -> float:
        clock.now += 1e-4
        return clock.now

    drafts = Drafts(Fixed({1: seconds, 16: 1.5 * seconds}), 6, clock=read)
    [one] = writing(model, drafts, [[1, 2, 3]])

    def steps() -> list[bool]:
        found = []
        for _ in range(32):
            found.append(drafts.skip_step())
            if not found[-1]:
                drafts.propose([one], LIMITS)
        return found

    found = steps()
    assert found[:9] == [False] * 9
    assert sum(found[9:]) == sum(at % (skipped + 1) != skipped for at in range(32 - 9))
    one.drafter = SuffixDrafter([*PHRASE, *PHRASE[:4]])
    found = steps()  # repetitions
    assert sum(found) <= skipped
    assert one.verified


def test_the_next_turn_of_a_chat_extends_the_text(model: localllm.Model) -> None:
    drafts = Drafts(Free({1: 1.0, 64: 1.0}), 6)
    first, other = writing(model, drafts, [[*PHRASE, *PHRASE[:4]], [1, 2, 3]])
    before = first.drafter
    assert before is not None
    drafts.propose([first, other], LIMITS)
    for one in (first, other):
        drafts.end(one)
    turn, elsewhere = writing(model, drafts, [[*PHRASE, *PHRASE[:4], *PHRASE], [*PHRASE, 1]])
    assert turn.drafter is before
    assert before.behind == len(PHRASE)
    assert elsewhere.drafter is not None
    assert elsewhere.drafter.behind == len(PHRASE) + 1
    drafts.propose([turn, elsewhere], LIMITS)
    assert [draft.token for draft in turn.drafts[:3]] == [5, 6, 7]


def test_costs_are_compared_by_the_processor_time_of_the_stepping_thread(model: localllm.Model) -> None:
    """On the CPU, other programs delay a pass but do not make it dearer."""
    assert model.engine.clock is thread_time

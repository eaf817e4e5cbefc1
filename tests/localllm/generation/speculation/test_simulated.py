"""Whole answers with a simulated clock: drafting continues only if it saves time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.engine import Engine
from localllm.generation import core
from localllm.generation.request import Request
from localllm.generation.speculation.draft_model import DraftModel
from localllm.generation.speculation.drafts import Drafts
from localllm.generation.speculation.model_drafter import Round
from localllm.generation.speculation.policy import Budget, Costs
from localllm.generation.speculation.rule import DraftToken
from localllm.generation.speculation.suffixes import PRIORS, SuffixDrafter
from localllm.generation.speculation.vocabulary import Mapping
from tests.localllm.generation.speculation.support import (
    GREEDY,
    MEASURED,
    Clock,
    Logits,
    Told,
    ToldDrafter,
    table_engine,
)
from tests.localllm.generation.support import Stepped

V = 50
EVERY_ROW = dict.fromkeys(range(1, 17), 20.0)  # verifying more tokens costs no time
NO_GAIN = {rows: 20.0 * rows for rows in range(1, 17)}  # verification saves nothing
SAME = Mapping(np.arange(V, dtype=np.int32), V, None, None)
SHAPES = {"measured": MEASURED, "free": EVERY_ROW, "no gain": NO_GAIN}


def best_fixed(likelihood: float, step: float, costs: dict[int, float]) -> float:
    """Return the speedup of the best fixed number of draft tokens, as if that number were known in advance."""
    return max(
        sum(likelihood**i for i in range(k + 1)) / (costs[k + 1] + k * step) * costs[1] for k in range(len(costs))
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Provide the simulated clock of generation. Only forward passes advance it."""
    found = Clock()
    monkeypatch.setattr(core, "perf_counter", found)
    return found


def says(text: list[int], right: list[bool] | None = None) -> Logits:
    """Return a model that continues with `text`, but with a wrong token at each position that is not `right`."""

    def logits(seen: list[int]) -> np.ndarray:
        wrong = right is not None and not right[len(seen)]
        return 9 * np.eye(V, dtype=np.float32)[(text[len(seen)] + wrong) % V]

    return logits  # type: ignore[return-value]


class Exactly:
    """A grammar that allows only one text."""

    finished = False

    def __init__(self, text: list[int]) -> None:
        self._text = text

    def allowed(self) -> NDArray[np.bool_] | None:
        return np.eye(V, dtype=np.bool_)[self._text[0]]

    def accept(self, token: int) -> None:
        self._text = self._text[1:]

    def validate(self, tokens: Sequence[int]) -> int:
        return next((n for n, token in enumerate(tokens) if token != self._text[n]), len(tokens))


def speedup(
    clock: Clock, likelihood: float, step: float, costs: dict[int, float], known: dict[int, float] | None = None,
    tokens: int = 512, trust: int | None = None, prompt: int = 1, right: list[bool] | None = None, seed: int = 1,
    constrained: bool = False,
) -> float:  # fmt: skip
    """Return the speedup with a draft model of this acceptance rate, whose forward passes take `step`. It gives every
    draft the class `trust`, or else the highest one. `right` replaces the rate. `constrained`: a grammar allows only
    the right tokens.
    """
    random = np.random.RandomState(seed)
    text = random.randint(0, V, tokens + prompt + 40).tolist()
    right = right or (random.random_sample(len(text)) < likelihood).tolist()
    engine = table_engine(says(text), clock, lambda rows: costs[rows] if rows in costs else rows * costs[16] / 16)
    drafting = table_engine(says(text, right), clock, lambda rows: step * (1 + 0.1 * max(rows - 16, 0)))
    verifying = Costs(known or {rows: costs[rows] for rows in (1, 2, 3, 4, 6, 8, 12, 16)}, 16)
    model = DraftModel(drafting, SAME, Costs({1: step, 16: step}), verifying, 15)
    if trust is not None:
        real = model.guess
        model.guess = lambda one, logits: (  # type: ignore[method-assign]
            draft._replace(trust=trust) if (draft := real(one, logits)) is not None else None
        )
    drafts = Drafts(verifying, 15, model, repeats=False, clock=clock)
    with Stepped(engine, drafts) as it:
        constraint = (lambda: Exactly(text[prompt:])) if constrained else None
        _, answer = it.ask(Request(text[:prompt], GREEDY, tokens, constraint=constraint))
        it.finish()
    assert answer.tokens == text[prompt : tokens + prompt]
    return (tokens - 1) * costs[1] / answer.result().usage.decode_seconds


@pytest.mark.parametrize("likelihood", [0, 0.2, 0.4, 0.6, 0.8, 0.95, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_answer_is_nearly_as_fast_as_were_all_known_before(clock: Clock, likelihood: float, shape: str) -> None:
    """The decode speed is never below 0.97 of plain decoding."""
    gained = [speedup(clock, likelihood, 2.0, SHAPES[shape], seed=seed) for seed in range(1, 4)]
    assert min(gained) > 0.97
    assert np.mean(gained) > 0.9 * best_fixed(likelihood, 2.0, SHAPES[shape])


# Costs of 1, 2 ... 16 rows of weights in memory, relative to one row, from benchmarks/results/rows.jsonl: the usual
# ones, and the dearest.
ROWS = {
    "Q4_0": {1: 1.0, 2: 1.07, 3: 1.14, 4: 1.40, 6: 2.09, 8: 2.73, 16: 5.3},
    "Q4_K": {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.22, 6: 1.79, 8: 2.35, 16: 4.6},
    "Q8_0": {1: 1.0, 2: 1.01, 3: 1.11, 4: 1.24, 6: 1.01, 8: 1.31, 16: 2.5},
    "dearest": {1: 1.0, 2: 1.4, 3: 1.8, 4: 2.2, 16: 7.0},
}
LURES = {
    "wrong": lambda position: False,
    "right for a third, then wrong": lambda position: position < 32,
    "wrong, then right": lambda position: position >= 64,
    "four right, sixteen wrong": lambda position: position // 4 % 5 == 0,
    "eight right, eight wrong": lambda position: position // 8 % 2 == 0,
}


def costs_of(name: str) -> dict[int, float]:
    return dict(enumerate(20 * np.interp(range(17), list(ROWS[name]), list(ROWS[name].values()))))


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("trust", [4, 8])
@pytest.mark.parametrize("lure", LURES)
def test_drafts_that_fail_cost_less_than_three_percent(clock: Clock, name: str, trust: int, lure: str) -> None:
    """The draft model gives its tokens a probability of a half (class 4), or is certain (8). No costs of several rows
    are known, and the draft model reads a prompt of 32 tokens first.
    """
    right = [LURES[lure](position - 32) for position in range(400)]
    for tokens in (96, 256):
        for step in (1.0, 2.4, 4.4):
            given = {"known": {1: 20.0}, "tokens": tokens, "trust": trust, "prompt": 32, "right": right}
            assert speedup(clock, 0.0, step, costs_of(name), **given) > 0.97


@pytest.mark.parametrize(("name", "least"), [("Q4_0", 0.9), ("Q4_K", 0.9), ("Q8_0", 0.8), ("dearest", 0.85)])
@pytest.mark.parametrize("likelihood", [0.6, 0.8, 0.95])
def test_a_first_answer_comes_near_the_ceiling(clock: Clock, name: str, least: float, likelihood: float) -> None:
    """Nothing is known before but the cost of one row and of a draft. The answer has 96 tokens."""
    costs = costs_of(name)
    found = []
    for seed in range(12):
        given = {"known": {1: 20.0}, "tokens": 96, "trust": 4, "prompt": 32, "seed": seed}
        found.append(speedup(clock, likelihood, 2.2, costs, **given))
    assert np.mean(found) > least * best_fixed(likelihood, 2.2, {rows: costs[rows] for rows in range(1, 17)})


@pytest.mark.parametrize("name", ROWS)
def test_wrong_repetitions_that_look_certain_cost_less_than_two_percent(clock: Clock, name: str) -> None:
    costs = costs_of(name)
    text, drafts = np.random.RandomState(2).randint(0, V, 140).tolist(), Drafts(Costs.unknown(16), 15, clock=clock)
    certain = int(np.argmax(PRIORS))

    def guess(seen: list[int], sampler: object) -> DraftToken:
        return DraftToken((text[len(seen)] + 1) % V, certain)

    drafts.new_repeats = lambda seen, earlier: cast(SuffixDrafter, ToldDrafter(guess, seen))
    with Stepped(table_engine(says(text), clock, costs.__getitem__), drafts) as it:
        _, answer = it.ask(Request(text[:1], GREEDY, 96))
        it.finish()
    assert 95 * costs[1] / answer.result().usage.decode_seconds > 0.98


@pytest.mark.parametrize("tokens", [96, 512, 1500])
def test_drafts_that_a_grammar_forbids_cost_the_budget(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """The draft model's first draft is always forbidden, so none is ever verified. A draft takes a twelfth of a pass.

    The draft model reads each token of the answer at most once, in 0.2 ms. The budget pays for that until it owes one
    draft. So the loss is bounded by the budget, this time and the debt.
    """
    budgets: list[Budget] = []
    start = Budget.__init__

    def counted(self: Budget) -> None:
        budgets.append(self)
        start(self)

    monkeypatch.setattr(Budget, "__init__", counted)
    gained = speedup(clock, 0.0, 2.0, MEASURED, tokens=tokens, constrained=True)
    [budget] = budgets
    lost = (tokens - 1) / gained - (tokens - 1)
    debt = 2.1 / MEASURED[1]  # a draft and its verification
    assert -budget.tokens <= debt + 1e-6
    assert lost <= 1.2 + 0.003 * tokens + 0.2 / MEASURED[1] * tokens + debt
    assert lost > 0.5


def test_requests_whose_drafts_a_grammar_forbids_share_the_cost_of_drafting(clock: Clock) -> None:
    """The draft model runs for four requests, and a grammar forbids the drafts of three. Its step costs 0.4 tokens, 0.1
    for each request.
    """
    text = np.random.RandomState(1).randint(0, V, 300).tolist()
    drafting = table_engine(says(text, [False] * 300), clock, lambda rows: 2.5)
    free = dict.fromkeys(range(1, 17), 25.0)
    model = DraftModel(drafting, SAME, Costs({1: 2.5, 16: 2.5}), costs := Costs(free, 16), 1)
    rounds: list[Round] = []
    begin = model.begin_round
    model.begin_round = lambda plain: (rounds.append(begin(plain)), rounds[-1])[1]  # type: ignore[method-assign]
    drafts = Drafts(costs, 15, model, repeats=False, clock=clock)
    with Stepped(table_engine(says(text), clock, lambda rows: 25.0), drafts) as it:
        for number in range(4):
            constraint = (lambda: Exactly(text[8:])) if number else None
            it.ask(Request([number, *text[1:8]], GREEDY, 100, constraint=constraint))
        for _ in range(20):
            it.turn()
            if rounds and rounds[-1].shared:
                break
        before = model.budget.tokens
        it.turn()
    assert [each.shared for each in rounds[:-1] if each.shared] == [4]
    assert before - model.budget.tokens == pytest.approx(0.1, abs=0.004)


def drafting_model(
    clock: Clock,
    text: list[int],
    right: dict[int, list[bool]] | None = None,
    step: float = 2.0,
    row: float = 0.1,
) -> tuple[Engine, DraftModel, Drafts]:
    """Return an engine that continues with `text`, and a draft model for it, whose passes take `step`, and `row` for
    each row from the 17th. `right` says which drafts are right after which first token; without it, all are.
    """

    def drafted(seen: list[int]) -> NDArray[np.float32]:
        return says(text, right and right[seen[0]])(seen)

    drafting = table_engine(drafted, clock, lambda rows: step + row * max(rows - 16, 0))  # type: ignore
    model = DraftModel(drafting, SAME, Costs({1: step, 16: step}), costs := Costs(MEASURED, 16), 15)
    engine = table_engine(says(text), clock, lambda rows: MEASURED.get(rows, 6.0 * rows))
    return engine, model, Drafts(costs, 15, model, repeats=False, clock=clock)


def test_a_prefill_in_parts_takes_half_of_the_budget(clock: Clock) -> None:
    """Each of seven parts costs a quarter of a token. The first three take half of the 1.2 tokens, the others none."""
    text = np.random.RandomState(1).randint(0, V, 900).tolist()
    engine, model, drafts = drafting_model(clock, text)
    found = []
    with Stepped(engine, drafts) as it:
        it.ask(Request(text[:400], GREEDY, 300))
        for _ in range(20):
            it.turn()
            found.append(round(model.budget.tokens, 3))
    part = (2 + 0.1 * 48) / MEASURED[1]  # of 64 rows
    while found[1] == 1.2:
        del found[0]
    expected = [1.2, 1.203 - part, 1.206 - 2 * part, *(0.609 + 0.003 * n for n in range(3))]
    assert found[:6] == pytest.approx(expected, abs=2e-3)
    assert max(found) > 2  # the drafts are right


@pytest.mark.parametrize("step", [2.0, 4.0])
def test_a_draft_model_that_was_wrong_catches_up_after_long_pauses(clock: Clock, step: float) -> None:
    """It is wrong for 200 tokens, then right for 1000. Reading a token costs 0.8 or 1.6 % of a pass, and every pass
    adds 0.3 % to the budget. The next client's drafts are right.
    """
    right = {1: [False] * 208 + [True] * 1100, 2: [True] * 700}
    text = np.random.RandomState(1).randint(0, V, 2000).tolist()
    engine, model, drafts = drafting_model(clock, text, right, step, 0.1 * step)
    with Stepped(engine, drafts) as it:
        one, _ = it.ask(Request([1, *text[1:8]], GREEDY, 1200))
        it.turn()
        while len(one.tokens) < 208:
            it.turn()
            assert -model.budget.tokens < (step + 0.2) / MEASURED[1]  # the cost of a draft
        began, before = clock.now, len(one.tokens)
        it.finish()
        assert clock.now - began < 0.5 * MEASURED[1] * (len(one.tokens) - before)
        it.ask(Request([2, *text[1:8]], GREEDY, 600))
        began = clock.now
        it.finish()
    assert clock.now - began < 0.45 * MEASURED[1] * 600


@pytest.mark.parametrize(("step", "wrong"), [(2.0, 150), (2.0, 300), (4.0, 150), (4.0, 400)])
def test_drafts_that_fail_leave_a_debt_of_one_draft_to_the_next_client(clock: Clock, step: float, wrong: int) -> None:
    """No pause is running when it begins."""
    right = {1: [False] * 1600, 2: [True] * 700}
    text = np.random.RandomState(1).randint(0, V, 2000).tolist()
    engine, model, drafts = drafting_model(clock, text, right, step, 0.1 * step)
    with Stepped(engine, drafts) as it:
        it.ask(Request([1, *text[1:8]], GREEDY, wrong))
        it.finish()
        assert -model.budget.tokens < (step + 0.2) / MEASURED[1]
        it.ask(Request([2, *text[1:8]], GREEDY, 600))
        steps = 0
        while it.running.busy:
            it.turn()
            steps += 1
    assert steps < 130


@pytest.mark.parametrize(
    ("repeats", "pause", "reads"), [(False, 12, 1), (False, 36, 1), (False, 108, 2), (False, 324, 6), (True, 12, 1)]
)
def test_a_pause_of_the_draft_model_takes_no_time(clock: Clock, repeats: bool, pause: int, reads: int) -> None:
    """The first step of a pause records the last gain, and the last one ends the pause. In the others, nothing is
    decided, unless repetitions are drafted too. The draft model then reads at most 64 tokens per step, even if the
    budget is nearly empty, and drafts in the last step.
    """
    text = np.random.RandomState(1).randint(0, V, 700).tolist()
    engine, model, drafts = drafting_model(clock, text)
    drafts._repeats = repeats
    looked: list[int] = []
    propose = drafts.propose
    with Stepped(engine, drafts) as it:
        it.ask(Request(text[:8], GREEDY, 600))
        it.turn(4)
        used = len(it.core.running.active[0].tokens)
        assert used > 14  # drafts were accepted
        model._judge._next_rest = pause
        model._judge.rest()
        for step in range(pause + reads):
            if step == 1 and not repeats:
                model.budget.tokens = 0.1 - 0.003 * pause  # one draft costs 0.09
            drafts.propose = lambda *given, step=step: (looked.append(step), propose(*given))[1]  # type: ignore
            it.turn()
            used, before = len(it.core.running.active[0].tokens), used
            assert used - before == 1 if step < pause + reads - 1 else used - before > 1
    assert looked == ([] if repeats else [0, pause - 1]) + list(range(0 if repeats else pause, pause + reads))


def test_a_draft_as_slow_as_the_model_is_left_alone(clock: Clock) -> None:
    assert speedup(clock, 0.9, 25.0, MEASURED) > 0.97


def test_passes_that_cost_more_than_was_measured_are_noticed(clock: Clock) -> None:
    """The costs that were measured when the model was opened are wrong here."""
    gained = [speedup(clock, 0.5, 0.01, NO_GAIN, {1: 20.0, 16: 21.0}, seed=seed) for seed in range(16)]
    assert np.mean(gained) > 0.91


def test_repeated_text_is_guessed_from_itself(clock: Clock) -> None:
    text = list(range(40)) * 8
    engine = table_engine(says(text), clock, lambda rows: (MEASURED | {60: 0.0})[rows])
    with Stepped(engine, Drafts(Costs(MEASURED), 15, clock=clock)) as it:
        _, answer = it.ask(Request(text[:60], GREEDY, 240))
        it.finish()
    assert answer.tokens == text[60:300]
    usage = answer.result().usage
    assert 239 * MEASURED[1] / usage.decode_seconds > 2.5
    assert usage.accepted > 0.9 * usage.drafted
    assert usage.accepted + usage.decode_passes == 239  # one token per forward pass, plus the accepted drafts


@pytest.mark.parametrize("learned", [False, True])
def test_a_text_that_only_looks_repetitive_costs_little(clock: Clock, learned: bool) -> None:
    """Two tokens take turns in the prompt, and follow at random in the answer: long contexts of many kinds mislead."""
    costs, gained = {rows: 7.5 + 2.5 * rows for rows in range(1, 17)}, []
    for seed in range(8):
        text = [0, 1] * 30 + np.random.RandomState(seed).randint(0, 2, 140).tolist()
        engine = table_engine(says(text), clock, (costs | {60: 0.0}).__getitem__)
        with Stepped(engine, Drafts(Costs(costs) if learned else Costs.unknown(16), 15, clock=clock)) as it:
            _, answer = it.ask(Request(text[:60], GREEDY, 96))
            it.finish()
        assert answer.tokens == text[60:156]
        gained.append(95 * costs[1] / answer.result().usage.decode_seconds)
    assert min(gained) > 0.97


def decode_rows(clock: Clock, right: list[bool], costs: dict[int, float], tokens: int) -> tuple[float, list[int]]:
    """Return the speedup with drafts from repetitions that are always expected to be accepted, and the number
    of rows of each pass.
    """
    text = np.random.RandomState(2).randint(0, V, tokens + 40).tolist()
    rows: list[int] = []

    def cost(count: int) -> float:
        rows.append(count)
        return costs[count]

    def guess(seen: list[int], sampler: object) -> DraftToken:
        return DraftToken((text[len(seen)] + (not right[len(seen)])) % V, 0)

    drafts = Told(guess, costs=Costs(costs))
    drafts._clock = clock
    with Stepped(table_engine(says(text), clock, cost), drafts) as it:
        _, answer = it.ask(Request(text[:1], GREEDY, tokens))
        it.finish()
    assert answer.tokens == text[1 : tokens + 1]
    return (tokens - 1) * costs[1] / answer.result().usage.decode_seconds, rows[1:]


def test_failing_repetitions_cost_the_budget(clock: Clock) -> None:
    """The acceptance rate is never learned here, so only the budget stops the drafts."""
    costs = {rows: 9.0 + rows for rows in range(1, 17)}
    gained, rows = decode_rows(clock, [False] * 140, costs, 100)
    assert gained > 0.97
    lost = [(costs[count] - costs[1]) / costs[1] for count in rows]
    assert lost[0] <= 0.6
    assert sum(lost) <= 1.2 + 0.003 * 100


def test_verification_resumes_when_drafts_would_have_been_right(clock: Clock) -> None:
    costs = {rows: 9.0 + rows for rows in range(1, 17)}
    gained, rows = decode_rows(clock, [False] * 60 + [True] * 80, costs, 100)
    assert gained > 1.25
    assert sum(count > 1 for count in rows[10:58]) <= 3
    assert max(rows[58:80]) > 8

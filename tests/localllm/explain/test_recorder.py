"""Recording does not change an answer, and the record matches the answer's usage statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import localllm
from localllm.explain.account import Account, measure_roofs
from localllm.explain.record import Record
from localllm.explain.recorder import AnswerRecorder
from localllm.generation.interfaces import SchedulerLimits
from localllm.generation.request import Finished, Request, Token
from localllm.generation.speculation.policy import Costs
from localllm.generation.speculation.rule import DraftToken
from localllm.options import SamplingOptions
from localllm.plan import BLOCK
from localllm.sampling.chain import softmax
from tests.localllm.generation.speculation.support import Told, drafting_by, eager

PROMPT = "Once upon a time there was a little bird. The little bird"
COUNT = 40

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "defaults": {},
    "all": {"temperature": 1.2, "top_k": 0, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.95, "xtc_probability": 0.5},
    "penalties": {"repeat_penalty": 1.2, "frequency_penalty": 0.3, "dry_multiplier": 0.8, "logit_bias": {260: -3.0}},
    "everything is possible": {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0},
    "sigma": {"top_n_sigma": 1.5, "min_p": 0, "dynatemp_range": 0.4},
}


@pytest.fixture(scope="module")
def demo() -> Iterator[localllm.Model]:
    with localllm.load("demo", ctx_size=256, threads=1) as model:
        yield model


@pytest.fixture(autouse=True)
def empty(demo: localllm.Model) -> None:
    """Empty the KV cache before each test."""
    demo.new_core(SchedulerLimits())


def recorded(
    model: localllm.Model, options: SamplingOptions, prompt: str = PROMPT, top: int = 8, count: int = COUNT
) -> tuple[Record, list[int], Finished]:
    recorder = AnswerRecorder(model, top)
    request = Request(model.tokenize(prompt), options, count, observer=recorder)
    with recorder.watching() as record:
        events = list(model.stepper.stream(request))
    assert isinstance(events[-1], Finished)
    return record, [event.token for event in events if isinstance(event, Token)], events[-1]


def plainly(model: localllm.Model, options: SamplingOptions) -> list[int]:
    found = model.generate(model.tokenize(PROMPT), sampling=options, max_tokens=COUNT).tokens
    model.new_core(SchedulerLimits())
    return found


@pytest.mark.parametrize("given", OPTIONS.values(), ids=list(OPTIONS))
def test_the_tokens_are_those_of_an_answer_that_nobody_records(demo: localllm.Model, given: dict[str, Any]) -> None:
    options = SamplingOptions(**{"seed": 5, **given})
    expected = plainly(demo, options)
    record, chosen, _ = recorded(demo, options)
    assert chosen == expected
    written = [choice.token for choice in record.choices]
    assert written[: len(chosen)] == chosen  # the record may end with the EOS token
    assert record.seed == 5


@pytest.mark.parametrize("given", OPTIONS.values(), ids=list(OPTIONS))
def test_what_is_shown_of_a_choice_comes_from_its_logits(demo: localllm.Model, given: dict[str, Any]) -> None:
    """Recorded probabilities follow from logits recomputed in one forward pass.

    The last stage has exactly the tokens that can be drawn, including the chosen token.
    """
    record, chosen, _ = recorded(demo, SamplingOptions(**{"seed": 5, **given}), top=10000)
    rows = demo.logits([*record.prompt, *chosen])[len(record.prompt) - 1 :]
    for choice, row in zip(record.choices, rows, strict=False):
        values = row.astype(np.float64)
        p = np.exp(values - values.max()) / np.exp(values - values.max()).sum()
        assert sum(each.drawn for each in choice.candidates) == pytest.approx(1)
        assert choice.of(choice.token).drawn > 0
        assert all(each.model == pytest.approx(p[each.token]) for each in choice.candidates[:20])
        assert sum(each.drawn > 0 for each in choice.candidates) == choice.stages[-1].left


def test_passes_and_time(demo: localllm.Model) -> None:
    record, chosen, end = recorded(demo, SamplingOptions(seed=1))
    [prompt, *later] = record.steps
    assert (prompt.first, len(prompt.tokens), list(prompt.tokens)) == (0, len(record.prompt), record.prompt)
    assert [step.first for step in later] == [len(record.prompt) + n for n in range(len(later))]
    assert [step.tokens for step in later] == [(token,) for token in chosen[: len(later)]]
    assert end.usage.decode_passes == len(later)
    assert [choice.step for choice in record.choices] == list(range(len(record.choices)))
    moments = sorted([(s.began, s.ended) for s in record.steps] + [(c.began, c.ended) for c in record.choices])
    assert all(0 <= began <= ended for began, ended in moments)
    assert all(before[1] <= after[0] for before, after in pairwise(moments))
    assert record.held == end.cached_tokens == len(record.prompt) + len(later)


def test_time_and_work_add_up(demo: localllm.Model) -> None:
    roofs = measure_roofs(demo)
    record, _, end = recorded(demo, SamplingOptions(seed=1))
    account = Account(record, demo, roofs, end)
    assert sum(seconds for _, seconds in account.time) == pytest.approx(record.ended)
    for phase in account.phases:
        assert sum(each.bytes for each in phase.kinds) == phase.whole.bytes
        assert sum(each.operations for each in phase.kinds) == phase.whole.operations
        assert sum(each.seconds for each in phase.kinds) == pytest.approx(phase.whole.seconds)
        assert 0 < phase.whole.seconds < 1.05 * phase.seconds  # time inside kernels is at most the time seen by Python
        assert 0 <= phase.whole.waited <= phase.whole.seconds
    decoding = account.phase("decoding")
    assert decoding is not None
    lengths = [step.first + 1 for step in decoding.steps]
    embedding = sum(cost.per_row for cost in account.costs) * len(lengths)
    assert decoding.whole.bytes - embedding == sum(demo.executable.memory.read_after(n) for n in lengths)


def test_the_account_of_a_backend_without_a_clock() -> None:
    with localllm.load("demo", backend="reference", ctx_size=64) as model:
        record, _, end = recorded(model, SamplingOptions(temperature=0), "Once", 4, count=3)
        account = Account(record, model, measure_roofs(model), end)
        assert not account.clocked
        assert [phase.whole.seconds for phase in account.phases] == [0, 0]
        assert all(phase.whole.bytes and phase.whole.operations for phase in account.phases)


def test_a_prefix_in_the_cache_is_counted_in_blocks(demo: localllm.Model) -> None:
    words = "Once upon a time there was a little bird who liked to sing. " * 8
    recorded(demo, SamplingOptions(temperature=0), words)
    record, _, end = recorded(demo, SamplingOptions(temperature=0), words + "One day")
    assert record.reused == end.usage.reused_tokens > BLOCK
    assert record.reused_blocks == -(-record.reused // BLOCK)
    assert record.steps[0].first == record.reused
    assert list(record.steps[0].tokens) == record.prompt[record.reused :]


def test_nobody_watches_afterwards(demo: localllm.Model) -> None:
    recorded(demo, SamplingOptions(seed=1))
    assert demo.engine.watch is None


# -- drafts ----------------------------------------------------------------------------------------------------------


def told(guess: Callable[[Sequence[int]], int], costs: Costs | None = None) -> Told:
    return Told(lambda text, _: DraftToken(guess(text), 0), 3, costs)


@pytest.mark.parametrize("sort", ["right", "wrong", "mixed"])
@pytest.mark.parametrize("given", [{"temperature": 0}, {"temperature": 0.9}], ids=["greedy", "sampled"])
def test_accepted_and_rejected_drafts(demo: localllm.Model, sort: str, given: dict[str, Any]) -> None:
    options = SamplingOptions(**{"seed": 4, **given})
    expected = plainly(demo, options)
    truth = demo.tokenize(PROMPT) + expected

    def guess(text: Sequence[int]) -> int:
        right = truth[len(text)] if len(text) < len(truth) else 0
        return right if sort == "right" or (sort == "mixed" and len(text) % 3) else (right + 1) % demo.vocabulary

    with drafting_by(demo, told(guess)):
        record, chosen, end = recorded(demo, options)
    assert chosen == expected
    account = Account(record, demo, measure_roofs(demo), end)
    drafts, done = account.drafts, end.usage
    assert drafts is not None
    assert (drafts.drafted, drafts.rounds, drafts.passes) == (done.drafted, done.rounds, done.decode_passes)
    assert drafts.accepted == done.accepted
    assert (drafts.accepted == 0) == (sort == "wrong")
    for choice in record.choices:
        step = record.steps[choice.step]
        assert choice.verified == (choice.draft is not None and choice.row + 1 < len(step.tokens))
        if choice.verified:
            assert choice.draft == step.tokens[choice.row + 1]
    assert record.held == end.cached_tokens == len(record.prompt) + len(chosen) - 1


class Dear(Costs):
    """Costs in which verifying three tokens is so expensive that only the first of three draft tokens is verified."""

    def __init__(self) -> None:
        super().__init__({1: 1.0, 2: 1.0, 3: 50.0, 16: 50.0})

    def observe(self, rows: int, seconds: float) -> None: ...


def test_a_draft_that_was_not_verified_saves_no_pass(demo: localllm.Model) -> None:
    options = SamplingOptions(temperature=0)
    truth = demo.tokenize(PROMPT) + plainly(demo, options)
    right = told(lambda text: truth[len(text)] if len(text) < len(truth) else 0, Dear())
    with drafting_by(demo, right):
        record, _, end = recorded(demo, options)
    unverified = [choice for choice in record.choices if choice.draft is not None and not choice.verified]
    assert unverified
    assert all(choice.draft == choice.token and not choice.accepted for choice in unverified)
    drafts = Account(record, demo, measure_roofs(demo), end).drafts
    assert drafts is not None
    assert drafts.unverified == len(unverified)
    assert drafts.accepted == end.usage.accepted


def test_passes_of_a_draft_model_are_its_own() -> None:
    with localllm.load("demo", ctx_size=160, threads=1, model_draft="draft", spec="draft") as model:
        expected = plainly(model, SamplingOptions(temperature=0))
        eager(model)
        record, chosen, end = recorded(model, SamplingOptions(temperature=0))
        assert chosen == expected
        drafting = record.later("draft")
        assert drafting
        account = Account(record, model, measure_roofs(model), end)
        assert account.drafts is not None
        assert account.drafts.drafting == pytest.approx(sum(step.seconds for step in drafting))
        assert dict(account.time)["draft model"] > 0
        assert {choice.drafter for choice in record.choices if choice.draft is not None} == {"draft model"}
        assert all(step.who == "model" for step in record.chunks())


def test_stages_change_no_state(demo: localllm.Model) -> None:
    sampler = demo.sampler(SamplingOptions(seed=2))
    row = np.random.default_rng(1).standard_normal(demo.vocabulary).astype(np.float32)
    before = row.copy()
    stages = list(sampler.stages(row))
    again = list(sampler.stages(row))
    assert (row == before).all()
    assert [name for name, _ in stages] == [name for name, _ in again]
    assert (softmax(stages[-1][1]) == softmax(again[-1][1])).all()
    other = demo.sampler(SamplingOptions(seed=2))
    assert sampler.sample(row) == other.sample(row)

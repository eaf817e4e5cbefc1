"""A draft model in a batch: one step drafts for all answers, the draft KV cache follows the answers, and the
tokens do not change.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import localllm
from localllm.backends.base import Limits
from localllm.generation.interfaces import SchedulerLimits
from localllm.generation.request import Request
from localllm.generation.request_state import RequestState
from localllm.generation.scheduler import Scheduler
from localllm.generation.speculation.draft_model import CATCH_UP, DraftModel
from localllm.generation.speculation.drafts import Drafts
from localllm.generation.speculation.vocabulary import Mapping
from localllm.options import SamplingOptions
from tests.localllm.generation.speculation.test_drafts import Fixed, Rising
from tests.localllm.generation.support import Stepped, Watched, ask, stepper_of
from tests.localllm.generation.test_scheduler import Free, each_alone
from tests.models.kit import KIT

GREEDY = SamplingOptions(temperature=0.0)
FREE = {1: 10.0, 16: 10.0}  # seconds, far more than a real round of drafting takes


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the decode times in FREE, which make drafting worthwhile, instead of this machine's decode times."""
    monkeypatch.setattr(RequestState, "pace", 1.0)


@pytest.fixture(scope="module")
def demo() -> Iterator[localllm.Model]:
    with localllm.load("demo", backend="cpu", threads=1, sequences=3) as model:
        yield model


@pytest.fixture(scope="module")
def small() -> Iterator[localllm.Model]:
    """Provide the bundled draft model."""
    with localllm.load("draft", backend="cpu", threads=1, sequences=3) as model:
        yield model


def same_tokens(model: localllm.Model) -> Mapping:
    return Mapping(np.arange(model.vocabulary, dtype=np.int32), model.vocabulary, None, None)


def drafting(
    model: localllm.Model, by: localllm.Model, costs: dict[int, float] | None = None, step: float = 1e-9
) -> tuple[Drafts, Watched]:
    """Return drafts by a model whose forward passes take `step` seconds, and its engine."""
    engine, verifying = Watched(by.engine), Free(costs or FREE)
    drafter = DraftModel(engine, same_tokens(model), Fixed({1: step, 16: step}), verifying, 7)
    return Drafts(verifying, 7, drafter, repeats=False), engine


def mixed(vocabulary: int) -> list[Request]:
    kinds = (
        GREEDY, SamplingOptions(temperature=0.7, seed=5), SamplingOptions(temperature=0.0, repeat_penalty=1.3),
        SamplingOptions(temperature=1.2, top_k=0, seed=9), GREEDY,
    )  # fmt: skip
    return [
        Request([(3 + number * i) % vocabulary for i in range(5 + 37 * number)], kind, 40 + number, ignore_eos=True)
        for number, kind in enumerate(kinds)
    ]


def test_tokens_are_those_without_it_alone_and_in_company(demo: localllm.Model, small: localllm.Model) -> None:
    requests = mixed(demo.vocabulary)
    expected = each_alone(demo, requests)
    drafts, engine = drafting(demo, small)
    for together in (1, 3):
        with Scheduler(stepper_of(demo, SchedulerLimits(together), drafts)) as scheduler:
            answers = [ask(scheduler, request) for request in requests]
            usages = [answer.result().usage for answer in answers]
        assert [answer.tokens for answer in answers] == expected
        assert sum(usage.drafted for usage in usages) > 20
        assert sum(usage.accepted for usage in usages) > 0
    assert max(len(step) for step in engine.stepped) == 3
    assert small.pool.free_blocks == small.pool.blocks


@pytest.mark.parametrize("family", ["qwen35-mtp", "gpt-oss-moe", "qwen4exp-8of40"])
def test_states_and_windows_keep_the_promise(family: str, tmp_path: Path) -> None:
    """The model is its own draft model. Greedy drafts are right, and sampled drafts often are."""
    path = KIT[family].write(tmp_path / "model.gguf")
    opened = {"backend": "cpu", "threads": 1, "ctx_size": 256, "sequences": 3}
    with localllm.load(path, **opened) as model, localllm.load(path, **opened) as twin:  # type: ignore[arg-type]
        requests = mixed(model.vocabulary)
        expected = each_alone(model, requests)
        drafts, _ = drafting(model, twin)
        with Scheduler(stepper_of(model, SchedulerLimits(3), drafts)) as scheduler:
            answers = [ask(scheduler, request) for request in requests]
            usages = [answer.result().usage for answer in answers]
        assert [answer.tokens for answer in answers] == expected
        assert usages[0].drafted == usages[0].accepted > 20
        assert twin.pool.free_blocks == twin.pool.blocks


def test_one_step_drafts_for_all_answers(demo: localllm.Model, small: localllm.Model) -> None:
    drafts, engine = drafting(demo, small)
    with Stepped(demo, drafts) as it:
        ones = [it.ask(Request([1 + number, 2, 3], GREEDY, 50, ignore_eos=True))[0] for number in range(3)]
        it.turn(2)
    assert all(one.answer_tokens >= 2 for one in ones)
    assert [len(rows.tokens) for rows in engine.stepped[0]] == [4, 4, 4]
    assert all([len(rows.tokens) for rows in step] == [1] * len(step) for step in engine.stepped[1:])
    assert len(engine.stepped) > 2


def test_a_long_prompt_reaches_it_in_pieces(demo: localllm.Model, small: localllm.Model) -> None:
    drafts, engine = drafting(demo, small)
    with Stepped(demo, drafts) as it:
        it.ask(Request([i % 50 for i in range(400)], GREEDY, 60, ignore_eos=True))
        it.finish()
    sizes = [sum(len(rows.tokens) for rows in step) for step in engine.stepped]
    assert max(sizes) <= CATCH_UP + 8
    assert sum(sizes[:6]) >= 400


def test_it_drafts_nothing_where_its_steps_cost_more_than_they_save(
    demo: localllm.Model, small: localllm.Model
) -> None:
    drafts, engine = drafting(demo, small, step=8.0)
    with Stepped(demo, drafts) as it:
        _, answer = it.ask(Request([1, 2, 3], GREEDY, 40, ignore_eos=True))
        it.finish()
    assert answer.result().usage.drafted == 0
    assert engine.stepped == []


def test_it_reads_no_prompt_for_an_answer_that_soon_ends(demo: localllm.Model, small: localllm.Model) -> None:
    drafts, engine = drafting(demo, small, step=1.0)
    with Stepped(demo, drafts) as it:
        it.ask(Request([i % 50 for i in range(900)], GREEDY, 4, ignore_eos=True))
        it.finish()
    assert engine.stepped == []


def test_it_rests_after_rounds_that_lose(demo: localllm.Model, small: localllm.Model) -> None:
    """A real round of drafting takes longer than the microsecond that it saves per token, so drafting pauses."""
    drafts, engine = drafting(demo, small, {1: 1e-6, 16: 1e-6}, step=1e-12)
    with Stepped(demo, drafts) as it:
        _, answer = it.ask(Request([1, 2, 3], SamplingOptions(temperature=3.0, seed=1), 200, ignore_eos=True))
        it.finish()
    rounds = sum(len(step[0].tokens) > 1 for step in engine.stepped)
    assert 0 < rounds < 60
    assert len(answer.tokens) == 200


def test_a_full_cache_of_the_draft_model_ends_drafting_only(demo: localllm.Model) -> None:
    requests = [Request([4 + number] * 90, GREEDY, 40, ignore_eos=True) for number in range(3)]
    expected = each_alone(demo, requests)
    with localllm.load("draft", backend="cpu", threads=1, ctx_size=128, sequences=1) as tight:
        drafts, _ = drafting(demo, tight)
        with Stepped(demo, drafts) as it:
            answers = [it.ask(request)[1] for request in requests]
            it.finish()
        assert [answer.tokens for answer in answers] == expected
        assert tight.pool.free_blocks == tight.pool.blocks


def test_preempted_and_cancelled_requests_leave_its_cache(small: localllm.Model) -> None:
    # The KV cache has room for one sequence.
    with localllm.load("demo", backend="cpu", threads=1, ctx_size=256, sequences=1) as model:
        requests = [Request([9 + number] * 60, GREEDY, 80, ignore_eos=True) for number in range(4)]
        expected = each_alone(model, requests)
        drafts, _ = drafting(model, small)
        with Stepped(model, drafts, parallel=4) as it:
            asked = [it.ask(request) for request in requests]
            preempted = 0
            while len(asked[0][1].tokens) < 60:
                it.turn()
                preempted += bool(it.running.waiting)
            asked[0][0].ticket.cancel()
            it.finish()
        assert preempted
        assert [answer.tokens for _, answer in asked[1:]] == expected[1:]
        assert small.pool.free_blocks == small.pool.blocks


def test_what_a_grammar_forbids_is_not_verified(demo: localllm.Model, small: localllm.Model) -> None:
    request = Request([1, 5, 9], GREEDY, 90, constraint=lambda: Rising(demo.vocabulary, 60))
    with Stepped(demo) as it:
        _, plain = it.ask(request)
        it.finish()
    drafts, _ = drafting(demo, small)
    with Stepped(demo, drafts) as it:
        _, answer = it.ask(request)
        it.finish()
    assert answer.tokens == plain.tokens


def test_repetitions_come_first_and_the_model_drafts_for_the_rest(demo: localllm.Model, small: localllm.Model) -> None:
    engine, verifying = Watched(small.engine), Free(FREE)
    drafter = DraftModel(engine, same_tokens(demo), Fixed({1: 1e-9, 16: 1e-9}), verifying, 7)
    drafts = Drafts(verifying, 7, drafter)
    phrase = [5, 6, 7, 8, 9, 10, 11, 12]
    with Stepped(demo, drafts) as it:
        again, new = (
            it.ask(Request(prompt, GREEDY, 50, ignore_eos=True))[0] for prompt in ([*phrase * 3, *phrase[:4]], [1, 2])
        )
        it.turn()
        again.tokens[-1] = 9  # the token that usually continues the phrase
        drafts.begin(again)
        drafts.propose([again, new], Limits(rows=64, logit_rows=64, blocks=8, positions=400))
        assert again.drafts[0].token == 10
        assert (again.modelled, new.modelled) == (False, True)
        assert new.drafts
        assert len(engine.stepped[0]) == 1

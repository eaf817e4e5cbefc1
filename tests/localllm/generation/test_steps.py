"""A step evaluates tokens of each request, within the engine's limits, and passes its results to the requests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import localllm
from localllm.backends.base import BackendError, Limits
from localllm.backends.cpu.backend import CpuBackend
from localllm.engine import CacheFull, Engine, Pending, SequenceRows
from localllm.generation.budget import FEWEST, Budget
from localllm.generation.request import Prefilled, Request, Token
from localllm.generation.speculation.drafts import Drafts
from localllm.generation.speculation.rule import DraftToken
from localllm.options import SamplingOptions
from localllm.plan import BLOCK
from tests.localllm.engine.support import ATTENDING, RECURRENT, engine_of
from tests.localllm.generation.support import Stepped, Watched
from tests.localllm.generation.test_running import text, wanted
from tests.localllm.generation.test_scheduler import Free, each_alone

GREEDY = SamplingOptions(temperature=0.0)


@pytest.fixture(scope="module")
def model() -> Iterator[localllm.Model]:
    with localllm.load("demo", backend="cpu", threads=1, sequences=4) as model:
        yield model


def counts(step: list[SequenceRows]) -> list[int]:
    return [len(rows.tokens) for rows in step]


# -- the rows of a step ----------------------------------------------------------------------------------------------


def test_the_oldest_prompt_has_half_and_the_shortest_of_the_others_the_rest(model: localllm.Model) -> None:
    engine = Watched(model.engine, rows=64)
    with Stepped(engine, parallel=4) as it:
        for seed, count in enumerate((200, 150, 20, 8)):
            it.ask(wanted(text(seed, count), 2))
        it.turn()
        assert counts(engine.stepped[0]) == [32, 8, 20, 4]
        assert [rows.wanted for rows in engine.stepped[0]] == ["none", "last", "last", "none"]
        it.finish()
        assert max(sum(counts(step)) for step in engine.stepped) <= 64


def test_drafts_do_not_count_as_requests_in_the_size_of_a_chunk(
    model: localllm.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time that a step may take depends on the number of requests, not on their rows."""
    seen: list[tuple[int, int]] = []

    def prompt_rows(self: Budget, rows: int, requests: int, *rest: object) -> int:
        seen.append((rows, requests))
        return 8

    monkeypatch.setattr(Budget, "prompt_rows", prompt_rows)
    with Stepped(model.engine, Drafts(Free({1: 1.0, 64: 1.0}), 6), parallel=2) as it:
        repeated, _ = it.ask(Request([5, 6, 7, 8, 9, 10, 11, 12] * 6, GREEDY, 60, ignore_eos=True))
        while not repeated.answer_tokens:
            it.turn()
        it.ask(wanted(text(1, 200), 2))
        seen.clear()
        it.turn(6)
        it.finish()
    assert {requests for rows, requests in seen if rows} == {2}
    assert max(rows for rows, _ in seen) > 1


def test_a_prompt_of_higher_priority_is_read_first(model: localllm.Model) -> None:
    engine = Watched(model.engine, rows=64)
    with Stepped(engine, parallel=2) as it:
        it.ask(wanted(text(1, 100), 2))
        high, _ = it.ask(wanted(text(2, 100), 2, priority=1))
        it.turn()
        assert counts(engine.stepped[0]) == [32, 32]
        it.turn()
        assert engine.stepped[1][0].sequence is high.sequence
        it.finish()


def test_agents_evaluate_what_they_share_once(model: localllm.Model) -> None:
    """Requests with the same beginning arrive together, and wait for the first of them. Its steps stay large."""
    shared = text(1, 320)
    requests = [wanted([*shared, *text(seed, 20)], 4) for seed in range(2, 6)]
    engine = Watched(model.engine, rows=64)
    with Stepped(engine, parallel=4) as it:
        answers = [it.ask(request)[1] for request in requests]
        it.turn(5)
        assert [counts(step) for step in engine.stepped] == [[64], [64], [64], [64], [64]]
        it.finish()
    assert [answer.reused for answer in answers] == [0, 320, 320, 320]
    assert sum(sum(counts(step)) for step in engine.stepped) == 320 + 4 * 20 + 4 * 3  # each token of the prompts once
    assert [answer.tokens for answer in answers] == each_alone(model, requests)


def test_answers_go_on_while_a_prompt_is_read(model: localllm.Model) -> None:
    """Each step decodes a token of every answer, and fills the remaining room with prompt tokens."""
    engine = Watched(model.engine)
    with Stepped(engine, parallel=3, itl_target=1e-9) as it:
        _, first = it.ask(wanted(text(1, 9), 60))
        _, second = it.ask(wanted(text(2, 9), 60))
        it.turn(3)
        it.ask(wanted(text(3, 500), 2))
        before = len(first.tokens), len(second.tokens)
        it.turn(12)
        assert (len(first.tokens), len(second.tokens)) == (before[0] + 12, before[1] + 12)
        prompts = [count for step in engine.stepped[3:] for count in counts(step) if count > 1]
        assert len(prompts) > 1
        assert set(prompts[:-1]) == {FEWEST}  # since a step may take no time
        it.finish()


def test_no_step_has_more_logits_than_the_engine_takes_and_nobody_starves(model: localllm.Model) -> None:
    engine = Watched(model.engine, rows=32, logit_rows=3)
    requests = [wanted(text(seed, 12), 30) for seed in range(5)]
    with Stepped(engine, parallel=5) as it:
        asked = [it.ask(request) for request in requests]
        it.turn(40)
        written = [one.answer_tokens for one, _ in asked]
        assert min(written) > 5
        assert max(written) - min(written) < 10
        it.finish()
    assert [answer.tokens for _, answer in asked] == each_alone(model, requests)
    assert max(sum(rows.wanted != "none" for rows in step) for step in engine.stepped) == 3


def test_log_probabilities_of_prompts_keep_to_the_rows_of_logits(model: localllm.Model) -> None:
    engine = Watched(model.engine, rows=64, logit_rows=10)
    prompt = text(6, 75)
    with Stepped(engine) as it:
        _, answer = it.ask(wanted(prompt, 2, prompt_logprobs=True))
        it.ask(wanted(text(7, 40), 20))
        it.finish()
    told = [event for event in answer.events if isinstance(event, Prefilled)]
    assert [logprob.token for event in told for logprob in event.logprobs] == prompt[1:]
    assert [event.evaluated for event in told] == sorted({event.evaluated for event in told})
    assert told[-1].evaluated == 75


class Bold(Drafts):
    """Drafts the same 15 tokens for every request. All of them are verified."""

    def propose(self, writing: object, limits: Limits) -> None:
        for one in writing:  # type: ignore[attr-defined]
            one.drafts, one.verified = [DraftToken(5, 0)] * 15, 15


def test_more_drafts_than_a_step_takes_are_not_verified(model: localllm.Model) -> None:
    engine = Watched(model.engine, rows=32, logit_rows=32)
    requests = [wanted(text(seed, 20), 20 + 10 * seed) for seed in range(3)]
    with Stepped(engine, Bold(Free({1: 1e-3, 64: 1e-3}), 15), parallel=3) as it:
        answers = [it.ask(request)[1] for request in requests]
        it.finish()
    assert [answer.tokens for answer in answers] == each_alone(model, requests)
    assert {tuple(counts(step)) for step in engine.stepped} >= {(1, 1, 1), (16, 16), (16,)}


def test_chunks_of_a_card_do_not_depend_on_the_load(model: localllm.Model) -> None:
    def chunks(company: int) -> list[int]:
        engine = Watched(model.engine)
        with Stepped(engine, parallel=4, aligned=64, itl_target=1e-9) as it:
            for seed in range(company):
                it.ask(wanted(text(seed, 20), 40))
            it.turn(4)
            one, _ = it.ask(wanted(text(9, 250), 2, reuse=False))
            it.turn()
            sequence = one.sequence
            it.turn(8)
            found = [len(rows.tokens) for step in engine.stepped for rows in step if rows.sequence is sequence]
            it.finish()
        return found[:4]

    assert chunks(0) == chunks(3) == [64, 64, 64, 58]


# -- windows and states ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["experts and windows", "delta net", "Mamba-2", "lightning attention", "blends of earlier sums"]
)
def test_layers_that_forget_give_the_same_tokens_in_company(kind: str) -> None:
    """There are so few blocks that checkpoints of sliding-window and recurrent layers become outdated and are
    evicted.
    """
    backend = CpuBackend(1)
    plan = {**ATTENDING, **RECURRENT}[kind]()
    limits = Limits(rows=128, logit_rows=16, blocks=50, positions=10 * BLOCK, window_blocks=14)
    engine = engine_of(backend, plan, limits)
    beginnings = [text(seed, 3 * BLOCK + 20 * seed) for seed in range(2)]
    requests = [
        Request(
            [*beginnings[seed % 2], *text(seed, 20 + 60 * (seed % 5))],
            SamplingOptions(temperature=0.7 * (seed % 2), seed=seed),
            40,
            ignore_eos=True,
        )
        for seed in range(8)
    ]
    alone = []
    for request in requests:
        with Stepped(engine) as it:
            alone.append(it.ask(request)[1])
            it.finish()
    with Stepped(engine, parallel=3) as it:
        for _ in range(2):
            company = [it.ask(request)[1] for request in requests]
            it.finish()
            assert [answer.tokens for answer in company] == [answer.tokens for answer in alone]
        assert any(answer.reused for answer in company)
    assert engine.free_blocks == min(pool.blocks for pool in engine.pool.pools)
    backend.close()


# -- results ---------------------------------------------------------------------------------------------------------


class Broken(Engine):
    """An engine that fails in a step with a certain token."""

    def submit(self, rows: object) -> Pending:
        if any(27 in part.tokens for part in rows):  # type: ignore[attr-defined]
            raise BackendError("the card has vanished")
        return super().submit(rows)  # type: ignore[arg-type]


def test_a_step_that_fails_ends_its_requests_and_no_others(model: localllm.Model) -> None:
    engine = Broken(model.engine.executable, model.engine.pool, model.engine.limits)
    free = model.pool.free_blocks
    with Stepped(engine) as it:
        _, good = it.ask(wanted([1, 2, 3], 3))
        it.finish()
        _, bad = it.ask(wanted([1, 2, 27], 3))
        it.finish()
        _, fine = it.ask(wanted([1, 2, 3], 3))
        it.finish()
    assert str(bad.error().error) == "the card has vanished"
    assert fine.tokens == good.tokens
    assert it.ended == 3
    assert model.pool.free_blocks == free


@pytest.mark.parametrize("written", [0, 5])
def test_a_request_that_fills_the_cache_alone_ends(model: localllm.Model, written: int) -> None:
    """A request that has generated tokens ends as a complete answer, and any other with an error."""
    with localllm.load("demo", backend="cpu", threads=1, ctx_size=4 * BLOCK, sequences=1) as small:
        held = small.engine.add()
        small.engine.step([SequenceRows(held, [3] * 2 * BLOCK)])  # another owner holds these blocks
        free = small.pool.free_blocks * BLOCK
        with Stepped(small) as it:
            _, answer = it.ask(wanted(text(1, free + 1 - written), 50))
            it.finish()
            if written:
                assert answer.result().reason == "context"
                assert len(answer.tokens) == written
            else:
                assert isinstance(answer.error().error, CacheFull)
        small.engine.release(held)


def test_the_answer_has_as_many_tokens_as_asked_for(model: localllm.Model) -> None:
    for most in (1, 2, 7):
        with Stepped(model) as it:
            _, answer = it.ask(wanted(text(1, 20), most))
            it.finish()
        assert answer.result().reason == "length"
        assert len([event for event in answer.events if isinstance(event, Token)]) == most

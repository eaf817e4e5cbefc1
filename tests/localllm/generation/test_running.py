"""Running requests: order of admission, reuse of evaluated tokens, kept prefixes, and preemption when the KV
cache is full.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

import pytest

import localllm
from localllm.backends.base import Limits
from localllm.backends.cpu.backend import CpuBackend
from localllm.engine import Engine
from localllm.engine.prefix import same
from localllm.generation import running
from localllm.generation.errors import Stopped
from localllm.generation.request import Prefilled, Request
from localllm.generation.speculation.drafts import Drafts
from localllm.options import SamplingOptions
from localllm.plan import BLOCK
from tests.localllm.engine.support import ATTENDING, engine_of
from tests.localllm.generation.support import Stepped
from tests.localllm.generation.test_scheduler import Free, each_alone

VOCABULARY = 28  # size of the smallest model's vocabulary
GREEDY = SamplingOptions(temperature=0.0)


@pytest.fixture(scope="module")
def model() -> Iterator[localllm.Model]:
    with localllm.load("demo", backend="cpu", threads=1, sequences=3) as model:
        yield model


@pytest.fixture
def small() -> Iterator[localllm.Model]:
    """Provide a model with a KV cache of five blocks."""
    with localllm.load("demo", backend="cpu", threads=1, ctx_size=4 * BLOCK, sequences=1) as model:
        assert model.pool.blocks == 5
        yield model


@pytest.fixture(params=[9, 11])
def windows(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Provide an engine with sliding-window layers and few blocks, so that old blocks are soon freed."""
    backend = CpuBackend(1)
    limits = Limits(rows=128, logit_rows=16, blocks=60, positions=16 * BLOCK, window_blocks=request.param)
    yield engine_of(backend, ATTENDING["experts and windows"](), limits)
    backend.close()


def text(seed: int, count: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(VOCABULARY) for _ in range(count)]


def wanted(prompt: list[int], most: int = 8, **more: object) -> Request:
    return Request(prompt, GREEDY, most, ignore_eos=True, **more)  # type: ignore[arg-type]


# -- order -----------------------------------------------------------------------------------------------------------


def test_priority_then_the_client_with_fewer_then_age(model: localllm.Model) -> None:
    with Stepped(model, parallel=3) as it:
        names = {}
        for name, client, priority in (
            ("first", "a", 0), ("second", "a", 0), ("third", "a", 0), ("other", "b", 0), ("high", "a", 1),
        ):  # fmt: skip
            names[it.ask(wanted(text(len(names), 5), client=client, priority=priority))[0]] = name
        it.running.admit()
        assert [names[one] for one in it.running.active] == ["high", "other", "first"]
        assert [names[one] for one in it.running.waiting] == ["second", "third"]


def test_a_client_runs_as_many_as_it_may_whatever_users_it_names(model: localllm.Model) -> None:
    with Stepped(model, parallel=4, client_parallel=2) as stepped:
        clients = ["a/1", "a/2", "a/3", "a", "b"]
        asked = [stepped.ask(wanted(text(n, 3), most=4, client=client))[0] for n, client in enumerate(clients)]
        stepped.turn()
        assert [one.request.client for one in stepped.running.active] == ["a/1", "b", "a/2"]
        stepped.finish()
    assert all(one.ended == "length" for one in asked)


def test_cancelled_requests_end_at_the_next_step_running_or_waiting(model: localllm.Model) -> None:
    with Stepped(model, parallel=1) as it:
        first, waiting, last = (it.ask(wanted(text(number, 9), 30)) for number in range(3))
        it.turn(5)
        waiting[0].ticket.cancel()
        it.turn()
        assert waiting[1].result().reason == "cancelled"
        assert it.running.active == [first[0]]
        first[0].ticket.cancel()
        it.turn()
        assert first[1].result().reason == "cancelled"
        assert it.running.active == [last[0]]
        assert len(first[1].tokens) < 30
        assert it.ended == 2


# -- reuse -----------------------------------------------------------------------------------------------------------


def test_all_but_the_last_token_of_the_same_prompt_is_reused(model: localllm.Model) -> None:
    prompt = text(1, 100)
    with Stepped(model) as it:
        _, first = it.ask(wanted(prompt))
        it.finish()
        _, second = it.ask(wanted(prompt))
        it.finish()
    assert (first.reused, second.reused) == (0, 99)
    assert first.tokens == second.tokens


def test_a_running_answer_is_reused_while_it_is_written(model: localllm.Model) -> None:
    prompt = text(2, 70)
    with Stepped(model) as it:
        _, first = it.ask(wanted(prompt, 40))
        it.turn(20)
        written = first.tokens
        _, second = it.ask(wanted([*prompt, *written[:10], 5]))
        it.turn()
        assert second.reused == len(prompt) + 10
        it.finish()


def test_a_request_without_reuse_leaves_nothing_and_takes_nothing(model: localllm.Model) -> None:
    prompt = text(3, 90)
    with Stepped(model) as it:
        it.ask(wanted(prompt, reuse=False))
        it.finish()
        assert len(it.running.prefixes) == 0
        assert model.pool.free_blocks == model.pool.blocks
        it.ask(wanted(prompt))
        it.finish()
        assert len(it.running.prefixes) == 1
        _, third = it.ask(wanted(prompt, reuse=False))
        it.finish()
    assert third.reused == 0


def test_log_probabilities_of_a_prompt_are_those_of_all_its_tokens(model: localllm.Model) -> None:
    prompt = text(4, 90)
    with Stepped(model) as it:
        _, plain = it.ask(wanted(prompt))
        it.finish()
        _, again = it.ask(wanted(prompt, prompt_logprobs=True, logprobs=0))
        it.finish()
    found = [logprob.token for event in again.events if isinstance(event, Prefilled) for logprob in event.logprobs]
    assert found == prompt[1:]
    assert again.reused == 0
    assert again.tokens == plain.tokens


def test_a_text_that_goes_on_is_kept_once(model: localllm.Model) -> None:
    with Stepped(model) as it:
        prompt = text(5, 80)
        for _ in range(3):
            _, answer = it.ask(wanted(prompt))
            it.finish()
            prompt = [*prompt, *answer.tokens, 9, 8, 7]
        assert [sequence.length for sequence in it.running.prefixes] == [80 + 2 * 11 + 8 - 1]
        it.ask(wanted(text(6, 20)))
        it.finish()
        assert len(it.running.prefixes) == 2


def test_cards_reuse_whole_chunks(model: localllm.Model) -> None:
    prompt = text(7, 100)
    with Stepped(model, aligned=64) as it:
        it.ask(wanted(prompt))
        it.finish()
        _, again = it.ask(wanted(prompt))
        it.finish()
    assert again.reused == 64


def test_copies_stay_where_prompts_part_and_where_answers_begin(windows: Engine) -> None:
    beginning = text(8, 3 * BLOCK + 10)
    with Stepped(windows) as it:
        it.ask(wanted([*beginning, *text(9, 11 * BLOCK)]))
        it.finish()
        one, parted = it.ask(wanted([*beginning, *text(10, 11 * BLOCK)]))
        it.running.admit()
        assert parted.reused == 0  # the window has moved past these tokens
        assert one.checkpoints == [3 * BLOCK, 14 * BLOCK]
        it.finish()
        third, answer = it.ask(wanted([*beginning, *text(11, 11 * BLOCK)]))
        it.running.admit()
        assert answer.reused == 3 * BLOCK
        assert third.checkpoints == [14 * BLOCK]
        it.finish()
        newest = [sequence.length for sequence in it.running.prefixes][-2:]
        assert newest == [14 * BLOCK, len(beginning) + 11 * BLOCK + 8 - 1]


def test_a_copy_stays_where_a_prompt_parts_from_a_running_one(windows: Engine) -> None:
    with Stepped(windows, itl_target=100.0) as it:
        it.ask(wanted(text(13, 20), 200))
        it.turn(3 * BLOCK)
        shared = it.running.active[0].tokens[: 2 * BLOCK + 5]
        one, answer = it.ask(wanted([*shared, *text(14, 3 * BLOCK)]))
        it.running.admit()
        assert answer.reused == 2 * BLOCK + 5
        assert one.checkpoints == [5 * BLOCK]
        it.finish()


def test_if_the_window_of_a_running_one_has_moved_all_is_evaluated_again(windows: Engine) -> None:
    """All tokens are evaluated again, and a checkpoint is kept at the point of divergence."""
    with Stepped(windows, itl_target=100.0) as it:
        it.ask(wanted(text(13, 20), 14 * BLOCK))
        it.turn(13 * BLOCK)
        shared = it.running.active[0].tokens[: 2 * BLOCK + 5]
        one, answer = it.ask(wanted([*shared, *text(14, 3 * BLOCK)]))
        it.running.admit()
        assert answer.reused == 0
        assert one.checkpoints == [2 * BLOCK, 5 * BLOCK]
        it.finish()


# -- what is logged --------------------------------------------------------------------------------------------------


def test_the_log_says_at_which_token_a_prompt_parts(
    model: localllm.Model, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "MOST_CLIENTS", 2)
    prompt = text(15, 100)
    with Stepped(model) as it, caplog.at_level(logging.INFO, "localllm.generation"):
        for changed, client in ((prompt, "a"), ([*prompt, 1, 2], "a"), ([*prompt[:40], 0, *prompt[41:]], "a")):
            it.ask(wanted(changed, client=client))
            it.finish()
        assert len(caplog.records) == 1
        expected = "client a: prompt of 100 tokens differs from an earlier one at token 40; 40 are reused"
        assert caplog.messages == [expected]
        for client in ("b", "c"):  # after these, the requests of client a are forgotten
            it.ask(wanted(text(16, 90), client=client))
            it.finish()
        it.ask(wanted(text(17, 80), client="a"))
        it.finish()
        assert len(caplog.records) == 1


def test_a_user_cannot_write_a_line_of_the_log(model: localllm.Model, caplog: pytest.LogCaptureFixture) -> None:
    prompt = text(18, 60)
    user = "a/u\n22:10:10 POST /v1/chat/completions 200 FORGED\x1b[31m \u202e"
    with Stepped(model) as it, caplog.at_level(logging.INFO, "localllm.generation"):
        for changed in (prompt, [*prompt[:20], 0, *prompt[21:]]):
            it.ask(wanted(changed, client=user))
            it.finish()
    [message] = caplog.messages
    assert message.isprintable()
    assert "FORGED" in message


# -- a full cache ----------------------------------------------------------------------------------------------------


def test_kept_sequences_make_room_for_a_request_beside_others(small: localllm.Model) -> None:
    with Stepped(small, parallel=2) as it:
        for seed in (1, 2):
            it.ask(wanted(text(seed, 100), 2))
            it.finish()
        assert small.pool.free_blocks == 1
        it.ask(wanted(text(3, 20), 20))
        it.ask(wanted(text(4, 80), 20))
        it.running.admit()
        assert len(it.running.active) == 2
        assert len(it.running.prefixes) == 1  # the older prefix was evicted
        [left] = it.running.prefixes
        assert same(left.tokens, text(2, 100)) == 100
        it.finish()


def test_a_prompt_that_does_not_fit_beside_others_waits(small: localllm.Model) -> None:
    with Stepped(small, parallel=2) as it:
        it.ask(wanted(text(1, 2 * BLOCK - 10), 5))
        it.turn()
        long, _ = it.ask(wanted(text(2, 3 * BLOCK + 5), 5))
        it.turn()
        assert it.running.waiting == [long]
        assert long.sequence is None
        it.finish()
        assert long.answer_tokens == 5


def test_shared_blocks_count_once(small: localllm.Model) -> None:
    prompt = text(5, 4 * BLOCK - 20)
    with Stepped(small, parallel=2) as it:
        it.ask(wanted([*prompt, 1], 10))
        it.turn(3)
        assert small.pool.free_blocks == 1
        second, answer = it.ask(wanted([*prompt, 2], 10))
        it.turn()
        assert second in it.running.active
        assert answer.reused == len(prompt)
        it.finish()


def test_kept_sequences_go_before_running_ones_are_stopped(small: localllm.Model) -> None:
    with Stepped(small, parallel=2) as it:
        it.ask(wanted(text(1, 60), 2))
        it.finish()
        assert len(it.running.prefixes) == 1
        pair = [it.ask(wanted(text(seed, BLOCK - 4), 80))[0] for seed in (2, 3)]
        while pair[0].sequence is None or pair[0].sequence.length < 2 * BLOCK + 1:
            it.turn()
            assert it.running.active == pair or not len(it.running.prefixes)
        it.finish()


@pytest.mark.parametrize(("priorities", "stopped"), [((0, 0), 1), ((0, 1), 0)])
def test_the_newest_of_the_lowest_priority_is_stopped_and_loses_nothing(
    small: localllm.Model, priorities: tuple[int, int], stopped: int
) -> None:
    hot = SamplingOptions(temperature=0.8, repeat_penalty=1.3, seed=5)  # sampling that depends on the history
    requests = [
        Request(text(seed, 2 * BLOCK - 20), hot, 100, ignore_eos=True, priority=priorities[seed]) for seed in (0, 1)
    ]
    expected = each_alone(small, requests)
    with Stepped(small, parallel=2) as it:
        asked = [it.ask(request) for request in requests]
        while len(it.running.active) + len(it.running.waiting) == 2 and not it.ended:
            it.turn()
            if any(one.sequence is None for one, _ in asked):
                break
        assert [one.sequence is None for one, _ in asked].index(True) == stopped
        victim = asked[stopped][0]
        assert (victim.drafts, victim.verified) == ([], 0)
        it.finish()
    assert [answer.tokens for _, answer in asked] == expected
    assert small.pool.free_blocks == small.pool.blocks


def test_drafts_of_a_stopped_request_are_forgotten(small: localllm.Model) -> None:
    phrase = text(1, 12)
    requests = [Request([*phrase * 8, number], GREEDY, 120, ignore_eos=True) for number in range(2)]
    expected = each_alone(small, requests)
    drafts = Drafts(Free({1: 1e-3, 16: 1e-3}), 5)
    with Stepped(small, drafts, parallel=2) as it:
        asked = [it.ask(request) for request in requests]
        answers = [answer for _, answer in asked]
        victim = asked[1][0]
        while not victim.verified:
            it.turn()
            drafts.propose([one for one in it.running.active if not one.prefilling], small.engine.limits)
        it.running.free_some()
        assert (victim.drafts, victim.verified, victim.sequence) == ([], 0, None)
        stopped = 0
        while it.running.active or it.running.waiting:
            before = list(it.running.active)
            it.turn()
            stopped += any(one in it.running.waiting for one in before)
        assert stopped
    assert [answer.tokens for answer in answers] == expected


# -- the end ---------------------------------------------------------------------------------------------------------


def test_the_end_is_told_to_everyone_and_frees_everything(model: localllm.Model) -> None:
    it = Stepped(model, parallel=2)
    it.ask(wanted(text(1, 20), 2))
    it.finish()
    answers = [it.ask(wanted(text(number, 20), 500)) for number in range(4)]
    it.turn(3)
    answers[0][0].ticket.cancel()
    answers[3][0].ticket.cancel()
    it.running.end(Stopped("over"))
    assert [answer.result().reason for _, answer in (answers[0], answers[3])] == ["cancelled", "cancelled"]
    assert [str(answer.error().error) for _, answer in answers[1:3]] == ["over", "over"]
    assert it.ended == 5
    assert model.pool.free_blocks == model.pool.blocks

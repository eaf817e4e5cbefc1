"""The state of one request: how the answer ends, the events that the listener gets, and the usage statistics."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import localllm
from localllm.generation.request import Event, Finished, Prefilled, Request, Started, Token
from localllm.options import SamplingOptions
from tests.localllm.generation.support import Stepped
from tests.localllm.generation.test_running import text
from tests.localllm.generation.test_scheduler import each_alone

GREEDY = SamplingOptions(temperature=0.0)
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def model() -> Iterator[localllm.Model]:
    with localllm.load("demo", backend="cpu", threads=1, sequences=3) as model:
        yield model


def answered(model: localllm.Model, request: Request) -> list[Event]:
    with Stepped(model) as it:
        _, answer = it.ask(request)
        it.finish()
    return answer.events


def test_events_come_in_order_and_the_end_comes_once(model: localllm.Model) -> None:
    ids = model.prompt_ids(PROMPT)
    events = answered(model, Request(ids, GREEDY, 5, ignore_eos=True))
    kinds = [type(event) for event in events]
    assert kinds == [Started, Prefilled, *[Token] * 5, Finished]
    assert events[0] == Started(len(ids), 0)
    assert events[1] == Prefilled(len(ids))
    last = events[-1]
    assert isinstance(last, Finished)
    usage = last.usage
    assert (usage.prompt_tokens, usage.reused_tokens, usage.answer_tokens, usage.drafted) == (len(ids), 0, 5, 0)
    assert 0 < usage.queued_seconds < usage.first_token_seconds
    assert usage.prompt_seconds > 0
    assert usage.decode_seconds > 0


def test_a_cached_prompt_is_reported_from_where_it_is_evaluated(model: localllm.Model) -> None:
    prompt = text(1, 90)
    with Stepped(model) as it:
        it.ask(Request(prompt, GREEDY, 2, ignore_eos=True))
        it.finish()
        _, answer = it.ask(Request([*prompt[:60], 1, 2, 3], GREEDY, 2, ignore_eos=True))
        it.finish()
    assert [event.evaluated for event in answer.events if isinstance(event, Prefilled)] == [63]
    assert answer.result().usage.reused_tokens == 60


def test_a_stop_string_ends_the_answer_and_is_no_part_of_it(model: localllm.Model) -> None:
    ids = model.prompt_ids(PROMPT)
    whole = "".join(
        event.text for event in answered(model, Request(ids, GREEDY, 40, ignore_eos=True)) if isinstance(event, Token)
    )
    stop = whole[20:24]
    events = answered(model, Request(ids, GREEDY, 40, stops=(stop,), ignore_eos=True))
    last = events[-1]
    assert isinstance(last, Finished)
    assert (last.reason, last.stop) == ("stop", stop)
    shown = "".join(event.text for event in events if isinstance(event, Token | Finished))
    assert shown == whole[: whole.index(stop)]


def ending(model: localllm.Model) -> SamplingOptions:
    """Bias every token towards the end of the text."""
    return SamplingOptions(temperature=0.0, logit_bias={min(model.tokenizer.eog): 1000.0})


def test_an_end_token_ends_the_answer_and_is_not_shown(model: localllm.Model) -> None:
    events = answered(model, Request([1, 2, 3], ending(model), 9, logprobs=2))
    assert [type(event) for event in events] == [Started, Prefilled, Finished]
    assert isinstance(events[-1], Finished)
    assert events[-1].reason == "end"
    assert events[-1].usage.answer_tokens == 0


def test_an_end_token_that_is_ignored_is_a_token_like_others(model: localllm.Model) -> None:
    events = answered(model, Request([1, 2, 3], ending(model), 9, ignore_eos=True))
    assert len([event for event in events if isinstance(event, Token)]) == 9


def test_a_listener_that_fails_ends_its_request(model: localllm.Model) -> None:
    with Stepped(model) as it:
        one, _ = it.ask(Request([1, 2, 3], GREEDY, 500, ignore_eos=True))
        heard: list[Event] = []

        def broken(event: Event) -> None:
            heard.append(event)
            if isinstance(event, Token):
                raise RuntimeError("not ours")

        one.ticket.listener = broken
        it.finish()
    assert [type(event) for event in heard[-2:]] == [Token, Finished]
    assert len([event for event in heard if isinstance(event, Token)]) == 1


def test_penalties_see_every_token_once(model: localllm.Model) -> None:
    """Penalties count every token once, even if the prompt comes from the KV cache."""
    hot = SamplingOptions(temperature=0.9, frequency_penalty=0.7, repeat_last_n=200, seed=4)
    prompt = text(2, 80)
    requests = [Request(prompt, hot, 40, ignore_eos=True), Request([*prompt, 4, 4], hot, 40, ignore_eos=True)]
    expected = each_alone(model, requests)
    with Stepped(model, parallel=1) as it:
        for request, tokens in zip(requests, expected, strict=True):
            _, answer = it.ask(request)
            it.finish()
            assert answer.tokens == tokens


@pytest.mark.parametrize("top", [0, 3])
def test_log_probabilities_need_all_logits(model: localllm.Model, top: int) -> None:
    usual = SamplingOptions(temperature=0.8, top_k=5, seed=1)
    with_logprobs = answered(model, Request([1, 2, 3], usual, 10, logprobs=top, ignore_eos=True))
    plain = answered(model, Request([1, 2, 3], usual, 10, ignore_eos=True))
    tokens = [[event.token for event in events if isinstance(event, Token)] for events in (with_logprobs, plain)]
    assert tokens[0] == tokens[1]
    for event in with_logprobs:
        if isinstance(event, Token):
            assert event.logprob is not None
            assert len(event.logprob.top) == top
            assert event.logprob.token == event.token


@pytest.mark.parametrize("sampled", [False, True])
def test_log_probabilities_have_the_bytes_of_their_tokens(model: localllm.Model, sampled: bool) -> None:
    asked = Request(model.prompt_ids(PROMPT), SamplingOptions(seed=1), 6, ignore_eos=True, logprobs=3, sampled=sampled)
    events = answered(model, asked)
    found = [event.logprob for event in events if isinstance(event, Token)]
    assert len(found) == 6
    for one in found:
        assert one is not None
        for each in (one, *one.alternatives):
            assert each.data == model.tokenizer.piece(each.token)
            assert each.text == each.data.decode("utf-8", "replace")
        assert [(each.token, each.logprob) for each in one.alternatives] == list(one.top)


def test_all_events_of_an_answer_have_its_number(model: localllm.Model) -> None:
    events = answered(model, Request(model.prompt_ids(PROMPT), GREEDY, 3, choice=4))
    assert {event.choice for event in events} == {4}

"""The front's scheduler with replicas in this process: events, cancellation and limits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import localllm
from localllm.base.errors import LocalLLMError
from localllm.generation.errors import QueueFull, Stopped
from localllm.generation.request import Failed, Finished, Prefilled, Request, Started, Token
from localllm.options import SamplingOptions
from tests.localllm.generation.support import Answer
from tests.localllm.generation.test_known import told

pytest.importorskip("zmq", reason="replicas send events through pyzmq")
from tests.localllm.distributed.local_replicas import (
    LIMITS,
    Front,
    LocalReplica,
    request_of,
    undisturbed,
    until,
)


def test_events_are_those_of_a_scheduler_here(models: list[localllm.Model], front: Callable[..., Front]) -> None:
    request = request_of(models[2], logprobs=2, prompt_logprobs=True, stops=("zzz",))
    expected = undisturbed(models[2], request)
    answer = front().ask(request)
    answer.result()
    assert told(answer.events) == told(expected)
    assert [e for e in answer.events if isinstance(e, Started | Prefilled)] == [
        e for e in expected if isinstance(e, Started | Prefilled)
    ]


def test_events_travel_directly_and_through_ray_without_a_connection(
    models: list[localllm.Model], front: Callable[..., Front], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_of(models[2], 200, logprobs=2, prompt_logprobs=True)
    expected = told(undisturbed(models[2], request))
    here = front(1)
    (sender,) = until(lambda: here.wire.replicas["replica0"].senders)
    for _ in range(2):
        answer = here.ask(request)
        answer.result()
        assert told(answer.events) == expected
    assert sender.sent > 200  # at first, there was no connection
    monkeypatch.setattr(LocalReplica, "_direct", lambda replica, key: None)
    other = front(1)
    answer = other.ask(request)
    answer.result()
    assert told(answer.events) == expected
    assert other.wire.replicas["replica0"].senders == []


def test_a_later_replica_takes_over_requests_that_wait(
    models: list[localllm.Model], front: Callable[..., Front]
) -> None:
    here = front(1)
    answers = [here.ask(request_of(models[2], 450)) for _ in range(8)]
    until(lambda: sum(bool(answer.tokens) for answer in answers) == LIMITS.parallel)
    assert len(here.fleet.having("replica0")) == 8
    here.start(1)
    until(lambda: len(here.fleet.having("replica1")) == 4)
    until(lambda: sum(bool(answer.tokens) for answer in answers) >= 2 * LIMITS.parallel)
    assert all(answer.tokens for answer in answers[: LIMITS.parallel])  # running requests were not moved
    expected = undisturbed(models[2], request_of(models[2], 450))
    for answer in answers:
        answer.result()
        assert told(answer.events) == told(expected)


def test_hidden_states_come_once_the_replica_has_them(
    models: list[localllm.Model], front: Callable[..., Front]
) -> None:
    rows, expected = np.zeros((2, 4, models[0].config.width), np.float32)  # type: ignore[union-attr]

    def into(target: Any) -> Callable[[int, Any], None]:
        return lambda start, some: target.__setitem__(slice(start, start + len(some)), some)

    ids = list(range(5, 9))
    undisturbed(models[2], Request(ids, SamplingOptions(), 0, reuse=False, states=into(expected)))
    front().ask(Request(ids, SamplingOptions(), 0, reuse=False, states=into(rows))).result()
    assert rows.any()
    assert np.array_equal(rows, expected)


def test_a_client_that_leaves_ends_its_answer(models: list[localllm.Model], front: Callable[..., Front]) -> None:
    here = front(1)
    answer = here.ask(request_of(models[2], 480))
    until(lambda: len(answer.tokens) > 5)
    assert answer.ticket is not None
    answer.ticket.cancel()
    assert answer.result().reason == "cancelled"
    scheduler = here.wire.replicas["replica0"]._scheduler
    until(lambda: not scheduler.load().running, 1)
    assert here.scheduler._open.count == 0
    assert not here.scheduler._answers


def test_errors_of_a_request_come_to_its_client_only(models: list[localllm.Model], front: Callable[..., Front]) -> None:
    here = front(2)
    with pytest.raises(LocalLLMError, match="no tokens"):
        here.scheduler.submit(Request([], SamplingOptions()), Answer())
    failed = here.ask(Request([1] * 600, SamplingOptions())).error().error
    assert "the context holds 512" in str(failed)
    here.ask(request_of(models[2], 3)).result()
    assert here.scheduler.moved == 0


def test_the_queue_is_limited_by_account(models: list[localllm.Model], front: Callable[..., Front]) -> None:
    here = front(1, parallel=2, waiting=4)
    answers = [here.ask(replace(request_of(models[2], 400), client="one")) for _ in range(4)]
    with pytest.raises(QueueFull):
        here.ask(replace(request_of(models[2]), client="one"))
    here.ask(replace(request_of(models[2], 2), client="two")).result()
    for answer in answers:
        assert answer.ticket is not None
        answer.ticket.cancel()
        answer.result()


def test_closing_ends_all_requests(models: list[localllm.Model], front: Callable[..., Front]) -> None:
    here = front(1)
    answer = here.ask(request_of(models[2], 480))
    until(lambda: answer.tokens)
    here.scheduler.close()
    assert isinstance(answer.error().error, Stopped)
    with pytest.raises(Stopped):
        here.ask(request_of(models[2]))


def test_the_load_is_that_of_all_replicas(models: list[localllm.Model], front: Callable[..., Front]) -> None:
    here = front(2)
    until(lambda: here.scheduler.load().blocks == sum(model.pool.blocks for model in models[:2]))
    answers = [here.ask(request_of(models[2], 400)) for _ in range(4)]
    until(lambda: len(here.scheduler.load().running) == 4)
    for answer in answers:
        assert answer.ticket is not None
        answer.ticket.cancel()
    until(lambda: not here.scheduler.load().running)


def test_slots_are_refused(models: list[localllm.Model], front: Callable[..., Front]) -> None:
    with pytest.raises(LocalLLMError, match="slots of replicas"):
        front(1).scheduler.between(lambda slots: slots.erase(0))


def test_every_thread_may_submit(models: list[localllm.Model], front: Callable[..., Front]) -> None:
    here = front(2)
    request = request_of(models[2], 30)
    expected = told(undisturbed(models[2], request))
    answers: list[Answer] = []
    threads = [threading.Thread(target=lambda: answers.append(here.ask(request))) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for answer in answers:
        answer.result()
        assert told(answer.events) == expected
    assert not any(isinstance(event, Failed | Finished) for event in answer.events[:-1])
    assert isinstance(answer.events[-2], Token)

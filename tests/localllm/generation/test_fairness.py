"""Accounts share the slots and the queue fairly, for any users, priorities, and numbers of answers per request."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import localllm
from localllm.generation.errors import QueueFull
from localllm.generation.request import Request
from localllm.options import SamplingOptions
from tests.localllm.generation.support import Answer, Stepped, ask, scheduled

GREEDY = SamplingOptions(temperature=0)


@pytest.fixture(scope="module")
def model() -> Iterator[localllm.Model]:
    with localllm.load("demo", backend="cpu", threads=1, ctx_size=256, sequences=4) as found:
        yield found


def wanted(first: int, client: str, most: int = 30) -> Request:
    return Request([first, 5, 9], GREEDY, most, ignore_eos=True, client=client)


def clients(stepped: Stepped) -> list[str]:
    return [one.request.client for one in stepped.running.active]


def test_users_of_one_account_share_its_turn(model: localllm.Model) -> None:
    with Stepped(model, parallel=2) as it:
        for number in range(6):
            it.ask(wanted(number, f"a/user {number}"))
        it.ask(wanted(9, "b"))
        it.turn()
        assert clients(it) == ["a/user 0", "b"]


def test_of_accounts_with_nothing_running_the_one_that_had_no_turn_comes_first(model: localllm.Model) -> None:
    with Stepped(model, parallel=1) as it:
        for number in range(3):
            it.ask(wanted(number, "a", 2))
        it.turn()
        it.ask(wanted(8, "b", 2))
        order = clients(it)
        while it.running.active or it.running.waiting:
            it.turn()
            order += [client for client in clients(it) if client != order[-1]]
        assert order == ["a", "b", "a"]


def test_users_within_an_account_take_turns(model: localllm.Model) -> None:
    with Stepped(model, parallel=2) as it:
        for user in ("x", "x", "y"):
            it.ask(wanted(len(user), f"a/{user}"))
        it.turn()
        assert clients(it) == ["a/x", "a/y"]


def test_an_account_with_all_places_gives_one_to_another_and_loses_nothing(model: localllm.Model) -> None:
    requests = [wanted(number, f"a/{number}") for number in range(5)]
    with Stepped(model, parallel=3) as it:
        alone = []
        for request in requests:
            alone.append(it.ask(request)[1])
            it.finish()
    with Stepped(model, parallel=3) as it:
        asked = [it.ask(request) for request in requests]
        it.turn(8)
        assert clients(it) == ["a/0", "a/1", "a/2"]
        other, _ = it.ask(wanted(50, "b", 4))
        it.turn()
        assert clients(it) == ["a/0", "a/1", "b"]  # the newest request of a waits
        it.turn(5)
        assert other.ended == "length"
        it.finish()
    assert [answer.tokens for _, answer in asked] == [answer.tokens for answer in alone]
    assert asked[2][1].reused < 3 + 8  # as at its first start; after the preemption, no token was evaluated again


def test_accounts_with_as_many_places_keep_them(model: localllm.Model) -> None:
    with Stepped(model, parallel=2, slice_seconds=1000) as it:
        it.ask(wanted(1, "a"))
        it.ask(wanted(2, "b"))
        it.turn(3)
        it.ask(wanted(3, "c"))
        it.turn(3)
        assert clients(it) == ["a", "b"]


def test_with_one_place_accounts_write_in_turn(model: localllm.Model) -> None:
    first, second = wanted(1, "a", 40), wanted(2, "b", 4)
    with Stepped(model, parallel=1) as it:
        alone, _ = it.ask(first)[1], it.finish()
    with Stepped(model, parallel=1, slice_seconds=0) as it:
        long, answer = it.ask(first)
        it.turn(30)
        short, _ = it.ask(second)
        it.finish()
        assert short.ended == long.ended == "length"
    assert answer.tokens == alone.tokens


def test_a_waiting_request_of_low_priority_stops_nobody(model: localllm.Model) -> None:
    with Stepped(model, parallel=2) as it:
        for number in range(2):
            it.ask(Request([number, 5], GREEDY, 30, ignore_eos=True, client="a", priority=1))
        it.turn()
        it.ask(wanted(3, "b"))
        it.turn()
        assert clients(it) == ["a", "a"]


def test_one_account_cannot_fill_the_queue(model: localllm.Model) -> None:
    with scheduled(model, parallel=1, waiting=7) as scheduler:
        for number in range(5):  # one more than half of the 8 slots
            ask(scheduler, wanted(number, f"a/{number}", 200))
        with pytest.raises(QueueFull, match="5 of your answers are running or waiting"):
            scheduler.submit(wanted(6, "a/another user"), Answer())
        for number in range(2):
            ask(scheduler, wanted(number, "b", 200))
        with pytest.raises(QueueFull, match="2 of your answers"):
            scheduler.submit(wanted(6, "b"), Answer())
        last = ask(scheduler, wanted(7, "c", 2))
        with pytest.raises(QueueFull, match="8 answers are running or waiting"):
            scheduler.submit(wanted(6, "d"), Answer())
        last.result()


def test_places_of_the_queue_come_back(model: localllm.Model) -> None:
    with scheduled(model, parallel=1, waiting=2) as scheduler:
        for _ in range(3):
            for answer in [ask(scheduler, wanted(number, "a", 2)) for number in range(2)]:
                answer.result()
            while scheduler.load().waiting or scheduler.load().running:
                pass

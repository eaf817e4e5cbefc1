"""Pictures for replicas: another thread packs them within the room, and clients take turns."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from localllm.distributed import packing
from localllm.distributed.answer import Answer as Open
from localllm.distributed.media import MOST_BYTES
from localllm.distributed.remote import RemoteScheduler
from localllm.engine import MediaSpan
from localllm.generation.errors import Stopped
from localllm.generation.request import Request
from localllm.generation.request_state import Ticket
from localllm.options import SamplingOptions
from tests.localllm.generation.support import Answer

pytest.importorskip("zmq", reason="replicas send events through pyzmq")
from tests.localllm.distributed.local_replicas import until


def picture(size: int) -> MediaSpan:
    """Return a picture whose prepared tensor has `size` bytes."""
    source = SimpleNamespace(nbytes=size), 0
    return MediaSpan(b"key of it", 9, np.arange(9, dtype=np.int32), 9, True, lambda: None, source)  # type: ignore[arg-type, return-value]


def test_packing_a_picture_delays_no_other_client(unanswered: RemoteScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    go, packs = threading.Event(), list[int]()

    def packed(prompt: Any) -> Any:
        packs.append(len(prompt))
        assert go.wait(20)
        return ((1, b"packed"),)

    monkeypatch.setattr(packing, "packed", packed)
    asks = unanswered._wire.asks  # type: ignore[attr-defined]
    answers = [Answer() for _ in range(4)]
    tickets = [unanswered.submit(Request([1, picture(9)], SamplingOptions()), each) for each in answers[:3]]
    unanswered.submit(Request([1, 2], SamplingOptions()), answers[3])
    until(lambda: len(asks) == 1)
    assert asks[0].tokens == 2
    tickets[0].cancel()
    assert answers[0].result().reason == "cancelled"
    go.set()
    until(lambda: len(asks) == 3)
    assert [(ask.media, ask.tokens) for ask in asks[1:]] == [(((1, b"packed"),), 10)] * 2
    unanswered._soon(unanswered._move, asks[1].number)
    until(lambda: len(asks) == 4)
    assert asks[3].media == asks[1].media
    assert packs == [2, 2, 2]  # and not again
    unanswered.close()
    assert isinstance(answers[1].error().error, Stopped)


def test_pictures_wait_for_room_in_the_shared_memory(
    unanswered: RemoteScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "packed", lambda prompt: ((len(prompt), b""),))
    asks = unanswered._wire.asks  # type: ignore[attr-defined]
    large, small = MOST_BYTES // 2 + 1, MOST_BYTES // 4
    prompts = [[1, picture(size)] for size in (large, large, small, small)]
    answers = [Answer() for _ in prompts]
    tickets = [
        unanswered.submit(Request(prompt, SamplingOptions()), each)
        for prompt, each in zip(prompts, answers, strict=True)
    ]
    unanswered.submit(Request([1, 2], SamplingOptions()), Answer())  # takes no room
    until(lambda: len(asks) == 2)
    time.sleep(0.1)
    assert len(asks) == 2
    tickets[2].cancel()  # a waiting one
    assert answers[2].result().reason == "cancelled"
    tickets[0].cancel()
    until(lambda: len(asks) == 4)  # the next large one, and the last one


def test_the_pictures_of_one_client_do_not_wait_behind_many_of_another(
    unanswered: RemoteScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "packed", lambda prompt: ((len(prompt), b""),))
    asks = unanswered._wire.asks  # type: ignore[attr-defined]
    requests = [Request([1, picture(MOST_BYTES // 2)], SamplingOptions(), client="greedy") for _ in range(4)]
    requests.append(Request([1, 2, picture(MOST_BYTES // 2)], SamplingOptions(), client="other"))
    tickets = [unanswered.submit(request, Answer()) for request in requests]
    until(lambda: len(asks) == 2)
    tickets[0].cancel()
    until(lambda: len(asks) == 3)
    assert asks[2].request.account == "other"


@pytest.fixture
def submit(unanswered: RemoteScheduler, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ticket]:
    """Submit a request of a client with one picture, whose packing takes no time."""
    monkeypatch.setattr(packing, "packed", lambda prompt: ((len(prompt), b""),))

    def send(client: str, size: int = MOST_BYTES) -> Ticket:
        return unanswered.submit(Request([1, picture(size)], SamplingOptions(), client=client), Answer())

    return send


def test_clients_take_turns(unanswered: RemoteScheduler, submit: Callable[..., Ticket]) -> None:
    """Each picture takes all the room, so every client holds nothing when the next one is chosen."""
    asks = unanswered._wire.asks  # type: ignore[attr-defined]
    tickets = [(client, submit(client)) for client in ("greedy", "greedy", "greedy", "greedy", "other", "other")]
    for number in range(1, 7):
        until(lambda: len(asks) == number)  # noqa: B023
        client = asks[-1].request.account
        if number == 2:  # new and returning clients go behind the waiting ones
            tickets += [("late", submit("late")), ("greedy", submit("greedy"))]
        tickets.remove(mine := next(each for each in tickets if each[0] == client))
        mine[1].cancel()
    assert [ask.request.account for ask in asks[:6]] == ["greedy", "other", "greedy", "late", "other", "greedy"]
    until(lambda: len(asks) == 7)
    until(lambda: [*unanswered._packing._turns] == ["greedy"])
    for _, ticket in tickets:
        ticket.cancel()
    until(lambda: not unanswered._answers)
    unanswered._soon(unanswered._packing.advance)
    until(lambda: not unanswered._packing._turns)  # accounts that have left are forgotten


def test_a_client_that_leaves_while_its_picture_is_packed_frees_the_room_afterwards(
    unanswered: RemoteScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise one client could fill the memory: the thread that packs cannot be stopped."""
    go, packs = threading.Event(), list[Any]()

    def packed(prompt: Any) -> Any:
        packs.append(prompt)
        assert go.wait(20)
        if len(packs) == 2:
            raise MemoryError
        return ((1, b"packed"),)

    monkeypatch.setattr(packing, "packed", packed)
    requests = [Request([1, picture(MOST_BYTES)], SamplingOptions()) for _ in range(3)]
    tickets = [unanswered.submit(request, Answer()) for request in requests]
    until(lambda: packs)
    [left, *_] = unanswered._answers.values()
    tickets[0].cancel()
    until(lambda: left.over)
    time.sleep(0.1)
    assert len(packs) == 1
    tickets[1].cancel()
    go.set()
    until(lambda: len(unanswered._wire.asks) == 1 or len(packs) == 2)  # type: ignore[attr-defined]
    until(lambda: not unanswered._answers)  # the third one failed
    assert len(packs) == 2
    assert left.media == ()


@pytest.mark.parametrize("seed", range(5))
def test_the_room_is_kept_and_everyone_is_served(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of any size come, leave, fail and end in any order."""
    chance, opened, sent, failed = random.Random(seed), list[Open](), list[Open](), list[Open]()
    threads = list[tuple[Open, asyncio.Future[Any]]]()

    async def in_daemon(call: Any, unwanted: Any) -> Any:
        [answer] = [each for each in [*opened, *left] if each.request.prompt is call.args[0]]
        threads.append((answer, asyncio.get_running_loop().create_future()))
        return await threads[-1][1]

    left, tasks = list[Open](), set[asyncio.Task[None]]()
    monkeypatch.setattr(packing, "in_daemon", in_daemon)

    def end(answer: Open) -> None:
        answer.over = True
        opened.remove(answer)
        left.append(answer)
        packs.advance()

    def fail(answer: Open, error: Exception) -> None:
        failed.append(answer)
        end(answer)

    def start(work: Any) -> None:
        tasks.add(asyncio.get_running_loop().create_task(work))

    packs = packing.Packing(lambda: opened, start, sent.append, fail)

    async def run() -> None:
        for step in range(600):
            if step < 300 and chance.random() < 0.5:
                size = chance.choice((1, MOST_BYTES // 9, MOST_BYTES // 2, MOST_BYTES))
                request = Request([step, picture(size)], SamplingOptions(), client=chance.choice("abc"))
                opened.append(Open(request, lambda event: None))
                packs.add(opened[-1])
            elif threads and chance.random() < 0.6:
                _, future = threads.pop(chance.randrange(len(threads)))
                future.set_exception(MemoryError()) if chance.random() < 0.1 else future.set_result(((0, b"x"),))
            elif opened:
                end(
                    chance.choice(
                        opened if step < 300 and chance.random() < 0.3 else [*set(opened) & set(sent)] or opened
                    )
                )
            for _ in range(4):
                await asyncio.sleep(0)
            held = [each for each in opened if each.held] + [each for each, _ in threads if each.over]
            assert sum(each.held for each in held) <= MOST_BYTES
        assert not opened
        assert not packs._waiting
        assert not packs._busy
        assert all(not each.media for each in left if each not in sent)
        await asyncio.gather(*tasks)

    asyncio.run(run())
    assert len(sent) > 50
    assert failed


def test_a_request_that_ray_does_not_take_is_sent_again(
    unanswered: RemoteScheduler, submit: Callable[..., Ticket], monkeypatch: pytest.MonkeyPatch
) -> None:
    wire, refused = unanswered._wire, list[Any]()
    ask = wire.ask

    def full(given: Any) -> Any:
        if len(refused) < 2:
            refused.append(given)
            raise RuntimeError("the object store is full")
        return ask(given)

    monkeypatch.setattr(wire, "ask", full)
    submit("one")
    until(lambda: wire.asks)  # type: ignore[attr-defined]
    assert unanswered.moved == 2


def test_a_picture_that_comes_after_the_end_is_not_packed(
    unanswered: RemoteScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request was submitted just before, in another thread."""
    monkeypatch.setattr(packing, "packed", lambda prompt: pytest.fail("packed"))
    unanswered._stopped = Stopped("the server is shutting down")
    client = Answer()
    unanswered._open.enter("", 9)
    unanswered._soon(unanswered._begin, Open(Request([1, picture(9)], SamplingOptions()), client))
    assert isinstance(client.error().error, Stopped)

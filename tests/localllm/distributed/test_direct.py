"""The direct connection from a replica to its front: bytes of reports, order, slow fronts and strangers."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from time import monotonic
from typing import Any

import numpy as np
import pytest

zmq = pytest.importorskip("zmq", reason="replicas send events through pyzmq")

from localllm.base.errors import LocalLLMError  # noqa: E402
from localllm.cluster.errors import MessageError  # noqa: E402
from localllm.cluster.secured import LATE, QUEUED, Secured  # noqa: E402
from localllm.distributed.direct import QUIET, DirectReceiver, DirectSender, Reports  # noqa: E402
from localllm.distributed.messages import Report, States  # noqa: E402
from localllm.distributed.outbox import Outbox  # noqa: E402
from localllm.distributed.report_bytes import MOST_BYTES, decoded, encoded  # noqa: E402
from localllm.generation.interfaces import Load  # noqa: E402
from localllm.generation.request import Failed, Finished, Logprob, Prefilled, Started, Token  # noqa: E402
from localllm.generation.statistics import Usage  # noqa: E402

HOST = "127.0.0.1"
LOGPROB = Logprob(7, -0.1, ((7, -0.1), (9, float("-inf"))), b"\xff\x00a", (b"\xff\x00a", b""))
REPORT = Report(
    [
        (1, Started(10, 4, 2)),
        (2, Prefilled(9, (LOGPROB, replace(LOGPROB, token=8)), 1)),
        (3, Token(5, "\u00fc\u2028\ud800", None, (), 1)),
        (1 << 40, Token(7, "", LOGPROB)),
        (1, Finished("stop", "rest", Usage(10, 4, 3, 0.25, 1e-9, drafting=True), "zz", 12, choice=3)),
    ],
    steps=[(4, 1), (3, 0)],
    number=12,
)


def test_reports_with_plain_events_have_bytes() -> None:
    data = encoded(REPORT)
    assert data is not None
    assert decoded(data) == REPORT


def test_other_reports_travel_through_ray() -> None:
    for event in (Failed(LocalLLMError("no")), States(0, np.zeros((1, 2), np.float32))):
        assert encoded(Report([(1, event)])) is None
    assert encoded(Report((), Load((), 0, 0, 0, 0, 0))) is None
    assert encoded(Report([(1, Token(1, "a" * MOST_BYTES))])) is None


def test_damaged_bytes_raise_the_error_of_damage() -> None:
    data, chance = encoded(REPORT), random.Random(3)
    assert data is not None
    for _ in range(3000):
        damaged = bytearray(data)
        for _ in range(chance.randrange(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        cut = bytes(damaged[: chance.choice((len(damaged), chance.randrange(len(damaged))))])
        try:
            found = decoded(cut)
        except MessageError:
            continue
        assert isinstance(found, Report)
    with pytest.raises(MessageError):
        decoded(b"[" * 100_000)


def test_reports_are_taken_in_the_order_of_their_numbers() -> None:
    heard: list[int] = []
    taken: list[int] = []
    reports = Reports(lambda report: heard.append(report.number), lambda report: taken.append(report.number))

    def directly(number: int) -> None:
        data = encoded(Report((), number=number))
        assert data is not None
        reports._add_bytes(data)

    def by_ray(number: int, before: int = 0) -> None:
        reports.add(Report((), number=number, before=before))

    for number in (2, 3, 4):
        directly(number)
    by_ray(0)
    assert heard == [2, 3, 4, 0]
    assert taken == [0]
    assert not reports.lost  # however long it takes, Ray brings 1
    by_ray(1)
    assert taken == [0, 1, 2, 3, 4]
    by_ray(6)
    assert not reports.lost  # 5 is on its way
    directly(5)
    assert taken[-2:] == [5, 6]
    by_ray(0, before=7)
    assert not reports.lost
    directly(8)
    assert reports.lost  # 7 did not come through Ray, and 8 came after it
    directly(7)
    assert not reports.lost
    assert taken[-2:] == [7, 8]
    reports._quiet_since -= 2 * QUIET  # the replica had nothing to do
    by_ray(10)
    assert not reports.lost  # 9 is on its way
    reports._quiet_since -= 2 * QUIET
    assert reports.lost  # 9 was sent directly, but nothing comes any more
    reports.held_up(3 * QUIET)
    assert not reports.lost  # this process did not read meanwhile
    reports._add_bytes(b"damaged")
    by_ray(9)
    assert reports.lost


def test_only_the_newest_reader_gets_events() -> None:
    """A front that lost a report reads again, perhaps before Ray has ended the call before."""

    async def run() -> None:
        outbox = Outbox()
        first = outbox.turn()
        waiting = asyncio.create_task(outbox.take(first, 5.0))
        await asyncio.sleep(0)
        second = outbox.turn()
        outbox.put(1, Started(1, 0))
        assert await waiting is None
        assert await outbox.take(first, 0.0) is None
        found = await outbox.take(second, 0.0)
        assert found is not None
        assert found.events == [(1, Started(1, 0))]

    asyncio.run(run())


def connected(work: Callable[[DirectSender, DirectReceiver], Coroutine[Any, Any, None]]) -> None:
    """Run `work` with both ends."""

    async def run() -> None:
        receiver = DirectReceiver()
        sender = DirectSender(receiver.public_key, HOST)
        try:
            await work(sender, receiver)
        finally:
            sender.close()
            receiver.close()

    asyncio.run(run())


async def sent(sender: DirectSender, report: Report) -> None:
    async with asyncio.timeout(10):
        while not await sender.send(report):
            await asyncio.sleep(0.005)


def test_a_sender_that_cannot_listen_raises_the_error_for_which_ray_sends_instead() -> None:
    key, threads = zmq.curve_keypair()[0], threading.active_count()
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        for host, ports in ((HOST, (port, port + 1)), ("192.0.2.1", None)):
            with pytest.raises(OSError, match=r"^cannot listen on "):
                DirectSender(key, host, ports)
    assert threading.active_count() <= threads


def token(number: int) -> Report:
    return Report([(1, Token(number, "x" * 2000))], number=number)


def test_a_front_that_does_not_read_stops_the_sender_and_loses_nothing() -> None:
    """Then Ray takes the reports: its stream is the replica's other way."""

    async def work(sender: DirectSender, receiver: DirectReceiver) -> None:
        slow = receiver._secured.socket(zmq.PULL, beats=False)
        slow.rcvbuf = 1 << 14
        receiver._secured.connect(slow, sender.peer)
        number, found = 1, []
        try:
            await sent(sender, token(number))
            while await sender.send(token(number + 1)):
                number += 1
            await asyncio.sleep(2 * LATE)  # a front that is slow for a while is not cut off
            while slow.poll(1000):
                found.append(decoded(slow.recv()).number)
            await sent(sender, token(number + 1))
            found += [decoded(slow.recv()).number] if slow.poll(1000) else []
        finally:
            slow.close(0)
        assert QUEUED < number < 50 * QUEUED
        assert found == list(range(1, number + 2))

    connected(work)


def test_strangers_get_nothing_and_do_not_disturb() -> None:
    async def work(sender: DirectSender, receiver: DirectReceiver) -> None:
        strangers = [Secured() for _ in range(3)]
        sockets = [each.socket(zmq.PULL) for each in strangers]
        for each, socket_ in zip(strangers, sockets, strict=True):
            each.connect(socket_, sender.peer)  # with another key
        plain = zmq.Context()
        sockets.append(plain.socket(zmq.PULL))
        sockets[-1].connect(sender.peer.address)  # without encryption
        host, port = sender.peer.address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port))) as garbage:
            garbage.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(1000))
            await asyncio.sleep(0.2)
            taken: list[bytes] = []
            with receiver.connected(sender.peer, taken.append):
                for number in range(1, 300):
                    await sent(sender, token(number))
                until = monotonic() + 10
                while len(taken) < 299 and monotonic() < until:
                    await asyncio.sleep(0.01)
        got = sum(socket_.poll(0) for socket_ in sockets)
        for socket_ in sockets:
            socket_.close(0)
        for each in strangers:
            each.close()
        plain.term()
        assert got == 0
        assert [decoded(data).number for data in taken] == list(range(1, 300))

    connected(work)


def test_a_message_that_is_too_long_ends_the_connection() -> None:
    """A front takes no more bytes than a report may have."""

    async def work(sender: DirectSender, receiver: DirectReceiver) -> None:
        taken: list[bytes] = []
        with receiver.connected(sender.peer, taken.append):
            await sent(sender, token(1))
            sender._socket.send(bytes(2 * MOST_BYTES))
            await asyncio.sleep(0.3)
        assert [len(data) for data in taken if len(data) > MOST_BYTES] == []

    connected(work)

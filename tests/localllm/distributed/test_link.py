"""A link sends and receives in turn, so that neither end waits for a long queue: not to read, nor to close."""

from __future__ import annotations

import threading
from time import monotonic

import numpy as np
import pytest

pytest.importorskip("zmq", reason="links use pyzmq")

from localllm.cluster.wire import Kind, Message, encode
from localllm.cluster.zeromq import Endpoint
from localllm.distributed.link import Link
from tests.localllm.distributed.test_prompts import endpoints, until

COUNT = 1000  # messages, far more than ZeroMQ and the kernel take
CONTENT = np.zeros(1 << 16, np.uint8)


def pieces(number: int, count: int) -> list[Message]:
    return [Message(Kind.RESULT, number, (at, count), (CONTENT,)) for at in range(count)]


class End:
    def __init__(self, endpoint: Endpoint) -> None:
        self.taken: list[tuple[int, int]] = []
        self.lost = threading.Event()
        self.link = Link(endpoint, self._take, lambda reason: self.lost.set())

    def _take(self, message: Message) -> None:
        self.taken.append((message.number, message.integers[0] if message.integers else -1))


def test_long_queues_at_both_ends_arrive_in_order() -> None:
    one, other = map(End, endpoints())
    for end in (one, other):
        end.link.send(*pieces(1, COUNT))
    for end in (one, other):
        end.link.start()
    until(lambda: len(one.taken) == len(other.taken) == COUNT)
    assert one.taken == other.taken == [(1, at) for at in range(COUNT)]
    assert not one.link.queued
    for end in (one, other):
        end.link.close()


def test_withdrawn_messages_are_not_sent() -> None:
    mine, theirs = endpoints()
    one = End(mine)
    one.link.start()
    one.link.send(*pieces(1, COUNT), *pieces(2, 3))
    theirs.send(encode(Message(Kind.DROP, 1)))
    until(lambda: one.taken == [(1, -1)])  # although the other end takes nothing
    one.link.withdraw(1)
    assert one.link.queued == 3 * CONTENT.nbytes
    other = End(theirs)
    other.link.start()
    until(lambda: other.taken[-3:] == [(2, 0), (2, 1), (2, 2)])
    assert len(other.taken) < COUNT
    for end in (one, other):
        end.link.close()


def test_a_link_that_has_ended_keeps_nothing() -> None:
    mine, theirs = endpoints()
    one = End(mine)
    one.link.start()
    one.link.send(*pieces(1, COUNT))
    began = monotonic()
    one.link.close()  # although the other end takes nothing
    assert monotonic() - began < 4  # its patience is 5 s
    assert one.lost.is_set()
    one.link.send(*pieces(2, 1))
    assert one.link.queued == 0
    theirs.close()

"""Direct connections from replicas to their front, for events. Ray's own stream costs a millisecond of CPU per report.

A replica listens for its front (`DirectSender`), which learns address and key from the first report, through Ray. The
front connects (`DirectReceiver`). Reports that have no bytes (report_bytes.py), and all reports while there is no
connection, travel through Ray. They are numbered, and the front puts them in order (`Reports`).

Importing this module imports pyzmq.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from time import monotonic
from typing import Any

import zmq

from localllm.cluster.errors import MessageError
from localllm.cluster.secured import Peer, Secured
from localllm.distributed.messages import Report
from localllm.distributed.report_bytes import MOST_BYTES, decoded, encoded

WAIT, WAITED = 0.005, 0.25  # seconds between tries to send if the front reads too slowly, and until Ray sends instead
AT_ONCE = 0.02  # seconds for which a front reads before its event loop does other work
QUIET = 1.0  # seconds without a report on a direct connection, after which it has lost a report that Ray knows


class DirectSender:
    """A replica's end of the connection to one front."""

    def __init__(self, front_key: bytes, host: str, ports: tuple[int, int] | None = None) -> None:
        """Listen on this interface for the front with this public key. Raises OSError if no port is free."""
        self._secured, self._connected = Secured(), False
        self._secured.accept(front_key)
        self._socket = self._secured.socket(zmq.PUSH, beats=False)
        self._socket.linger = 0  # a front that has left needs nothing
        try:
            self.peer = self._secured.listen(self._socket, host, ports)
        except OSError:
            self.close()
            raise

    async def send(self, report: Report) -> bool:
        """Send a report; return whether that was possible. If the front is slow, wait: the outbox collects events."""
        data = encoded(report)
        if data is None:
            return False
        until = monotonic() + WAITED if self._connected else 0.0
        while True:
            try:
                self._socket.send(data, zmq.NOBLOCK)
                self._connected = True
                return True
            except zmq.Again:
                if monotonic() >= until:
                    self._connected = False
                    return False
                await asyncio.sleep(WAIT)

    def close(self) -> None:
        self._socket.close()
        self._secured.close()


class DirectReceiver:
    """A front's ends of the connections to its replicas. Used on one event loop."""

    def __init__(self) -> None:
        self._secured = Secured()
        self.public_key = self._secured.public_key

    @contextmanager
    def connected(self, peer: Peer, take: Callable[[bytes], None]) -> Iterator[None]:
        """Within the block, call `take` with each message of a replica."""
        loop = asyncio.get_running_loop()
        socket = self._secured.socket(zmq.PULL, MOST_BYTES, beats=False)
        self._secured.connect(socket, peer)
        loop.add_reader(socket.FD, partial(_read, loop, socket, take))
        try:
            yield
        finally:
            loop.remove_reader(socket.FD)
            socket.close(0)

    def close(self) -> None:
        """End, after all connections have ended."""
        self._secured.close()


def _read(loop: asyncio.AbstractEventLoop, socket: zmq.Socket[bytes], take: Callable[[bytes], None]) -> None:
    """Read what has arrived. The descriptor shows only changes, so this reads until nothing is left."""
    with suppress(zmq.Again):
        until = monotonic() + AT_ONCE
        while monotonic() < until:
            if socket.closed:
                return
            take(socket.recv(zmq.NOBLOCK))
        loop.call_soon(_read, loop, socket, take)


class Reports:
    """The reports of one replica: through Ray and on a direct connection, in the order of their numbers."""

    def __init__(self, heard: Callable[[Report], None], take: Callable[[Report], None]) -> None:
        """`heard` is called as soon as a report arrives, `take` once those before it have been taken."""
        self._heard, self._take, self._next = heard, take, 1
        self._early: dict[int, Report] = {}
        self._by_ray = self._directly = 0  # number of the newest report on each way; each way keeps the order
        self._quiet_since = monotonic()  # one is missing, and none came on the direct connection
        self._damaged = False

    async def read(self, stream: Any, receiver: DirectReceiver) -> None:
        """Read until Ray's stream ends. It raises Ray's errors."""
        with ExitStack() as connections:
            async for report in stream:
                self.add(report)
                if report.origin is not None and report.origin.peer is not None:
                    connections.enter_context(receiver.connected(report.origin.peer, self._add_bytes))

    def _add_bytes(self, data: bytes) -> None:
        try:
            report = decoded(data)
        except MessageError:
            self._damaged = True
            return
        self._directly, self._quiet_since = report.number, monotonic()
        self._put(report)

    def add(self, report: Report) -> None:
        """Take a report that came through Ray."""
        complete = self._by_ray < self._next
        self._by_ray = max(self._by_ray, report.number, report.before)
        self._put(report)
        if complete and self._by_ray >= self._next:  # after a pause, the direct connection begins to be late only now
            self._quiet_since = monotonic()

    def held_up(self, seconds: float) -> None:
        """Allow for a time in which this process did not read."""
        self._quiet_since += seconds

    def _put(self, report: Report) -> None:
        self._heard(report)
        if not report.number:
            self._take(report)
            return
        self._early[report.number] = report
        while (found := self._early.pop(self._next, None)) is not None:
            self._next += 1
            self._take(found)

    @property
    def lost(self) -> bool:
        """Whether the next report never comes: it was sent directly, and the direct connection lost it."""
        if self._by_ray < self._next:  # Ray may bring it
            return self._damaged
        quiet = monotonic() - self._quiet_since > QUIET
        return self._damaged or self._directly > self._next or quiet

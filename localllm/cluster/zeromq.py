"""Stages in other processes, over ZeroMQ with CURVE: every connection is encrypted, and both sides prove their keys.

Each process of a ring has an `Endpoint`: it listens for the previous process and connects to the next. The starter of
the processes passes addresses and public keys on: first each accepts the previous one, then each connects. A connection
that ends is noticed at once, and a machine that no longer answers within `secured.LATE` seconds. A stage then reports
it to the front, through the stages after it.

Importing this module imports pyzmq.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from time import monotonic
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from localllm.cluster.errors import ClusterError, MessageError, StageLost
from localllm.cluster.secured import Peer, Secured
from localllm.cluster.stage import Stage
from localllm.cluster.watchdog import Watchdog
from localllm.cluster.wire import Kind, Message, decode, encode, text_array

_PREVIOUS = "the connection from the previous stage ended; its process or machine is gone"
_NEXT = "the connection to the next stage ended; its process or machine is gone"
_OPENED = zmq.Event.ACCEPTED | zmq.Event.CONNECTED


class Endpoint:
    """The place of one process in a ring. Use it in one thread at a time."""

    def __init__(
        self, most_bytes: int, host: str = "127.0.0.1", patience: float = 60.0, ports: tuple[int, int] | None = None
    ) -> None:
        """`most_bytes` is the size of the largest message to accept; `host` is the interface to listen on.

        `patience` is the number of seconds that a message may wait until the next process takes it. `ports` are the
        first port to listen on and the one after the last; None: any. Raises ClusterError if none is free.
        """
        self._secured = Secured()
        self._pull, self._push = self._secured.socket(zmq.PULL, most_bytes), self._secured.socket(zmq.PUSH)
        self._push.immediate = True  # without a connection, sending waits and then fails
        self._patience = patience
        self._monitors = {self._pull: _Monitor(self._pull), self._push: _Monitor(self._push)}
        self._poller, self._ready = zmq.Poller(), dict[Any, int]()
        for pollable in (self._pull, *[monitor.socket for monitor in self._monitors.values()]):
            self._poller.register(pollable, zmq.POLLIN)
        try:
            self.peer = self._secured.listen(self._pull, host, ports)
        except OSError as error:
            self.close()
            raise ClusterError(str(error)) from None

    def accept(self, previous_key: bytes) -> None:
        """Accept messages from the process with this public key, which may connect afterwards."""
        self._secured.accept(previous_key)

    def connect(self, following: Peer) -> None:
        """Connect to the next process, which has accepted this one."""
        self._secured.connect(self._push, following)

    def send(self, data: bytes) -> None:
        """Send to the next process. Raises StageLost if its connection ended, or if it does not take messages."""
        if self.try_send(data):
            return
        until = monotonic() + self._patience
        monitor = self._monitors[self._push]
        waiting = zmq.Poller()
        waiting.register(self._push, zmq.POLLOUT)
        waiting.register(monitor.socket, zmq.POLLIN)
        while (left := until - monotonic()) > 0:
            if monitor.lost():
                raise StageLost(_NEXT)
            if self._push in dict(waiting.poll(round(1000 * left))):
                self._push.send(data)
                return
        raise self._stalled()

    def try_send(self, data: bytes) -> bool:
        """Send to the next process without waiting; return whether that was possible."""
        try:
            self._push.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _stalled(self) -> StageLost:
        return StageLost(f"the next stage takes no messages for {self._patience:g} s; it hangs, or was not started")

    def receive(self, patience: float | None = None) -> bytes:
        """Return the next message. Raises StageLost if a connection ends, or after `patience` seconds (None: never)."""
        until = None if patience is None else monotonic() + patience
        while True:
            timeout = None if until is None else max(0, round(1000 * (until - monotonic())))
            if (found := self._poll(timeout)) is not None:
                return found
            if until is not None and monotonic() >= until:
                raise StageLost(f"no answer within {patience:g} s; a stage hangs, or its network is too slow")

    def receive_or_wake(self, waker: int, sending: bool = False) -> bytes | None:
        """Return the next message; None once the socket with the file descriptor `waker` has data or, with `sending`,
        the next process takes a message. Raises StageLost if it takes none, or if a connection ends.
        """
        self._poller.register(waker, zmq.POLLIN)
        self._poller.register(self._push, zmq.POLLOUT if sending else 0)  # 0: not at all
        until = monotonic() + self._patience
        while True:
            timeout = max(0, round(1000 * (until - monotonic()))) if sending else None
            if (found := self._poll(timeout)) is not None:
                return found
            if waker in self._ready or self._push in self._ready:
                return None
            if sending and monotonic() >= until:
                raise self._stalled()

    def _poll(self, timeout: int | None) -> bytes | None:
        """Wait for an event, and return a message if there is one. Raises StageLost if a connection has ended."""
        self._ready = dict(self._poller.poll(timeout))
        if self._pull in self._ready:
            with suppress(zmq.Again):  # polls sometimes announce a message that is not there
                return self._pull.recv(zmq.NOBLOCK)
        if self._monitors[self._pull].lost():
            raise StageLost(_PREVIOUS)
        if self._monitors[self._push].lost():
            raise StageLost(_NEXT)
        return None

    def close(self) -> None:
        for socket, monitor in self._monitors.items():
            socket.disable_monitor()
            monitor.socket.close(0)
            socket.close()
        self._secured.close()


class _Monitor:
    """Finds out whether the connection of a socket ended, from ZeroMQ's events. Connections of strangers do not count:
    they open one, send garbage and close it.

    Events have the number of their connection, except a successful handshake. Until then, each open connection may be
    the authentic one. Strangers are turned away after a few seconds.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        address = f"inproc://monitor-{id(socket)}"
        socket.monitor(address, _OPENED | zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED)
        self.socket = socket.context.socket(zmq.PAIR)
        self.socket.rcvhwm = 0  # otherwise many strangers fill it, and ZeroMQ's thread waits
        self.socket.connect(address)
        self._open: set[int] = set()
        self._authentic: set[int] | None = None  # it is among these; None: before the handshake

    def lost(self) -> bool:
        while self._authentic != set() and self.socket.poll(0):
            message = recv_monitor_message(self.socket)
            event, connection = message["event"], int(message["value"])
            if event & _OPENED:
                self._open.add(connection)
            elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._authentic = self._authentic or set(self._open)
            else:
                self._open.discard(connection)
                if self._authentic is not None:
                    self._authentic.discard(connection)
        return self._authentic == set()


class ZmqRing:
    """The other stages, in processes that `serve`."""

    def __init__(self, endpoint: Endpoint, patience: float = 60.0, closing: Callable[[], None] = lambda: None) -> None:
        """`patience` is the number of seconds to wait for an answer. `closing` is called after the connections end."""
        self._endpoint, self._patience, self._closing = endpoint, patience, closing

    def send(self, message: Message) -> None:
        self._endpoint.send(encode(message))

    def receive(self) -> Message:
        try:
            return decode(self._endpoint.receive(self._patience))
        except MessageError as error:
            raise StageLost(str(error)) from None

    def close(self) -> None:
        self._endpoint.close()
        self._closing()


def serve(stage: Stage, endpoint: Endpoint, watchdog: Watchdog | None = None) -> StageLost:
    """Handle messages until a connection ends, and report it to the next process. Return the reason.

    The stage keeps its weights: it can serve again in another ring. A process that hangs cannot tell it, so its
    `watchdog` should end it.
    """
    watched = watchdog.handling if watchdog is not None else nullcontext
    while True:
        try:
            message = decode(endpoint.receive())
            with watched():
                answer = stage.handle(message)
            if answer is not None:
                endpoint.send(encode(answer))
        except MessageError as error:  # the sender is authentic, so it is another version, or broken
            _tell(endpoint, stage.number, f"stage {stage.number}: {error}")
        except StageLost as error:
            _tell(endpoint, stage.number, f"stage {stage.number}: {error}")
            return error


def _tell(endpoint: Endpoint, stage: int, text: str) -> None:
    """Send a message with number 0, on which the front gives up the ring."""
    with suppress(StageLost):
        endpoint.send(encode(Message(Kind.ERROR, 0, (stage, 0), (text_array(text),))))

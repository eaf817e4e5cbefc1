"""A connection between two processes that both send and receive at any time. A thread uses its endpoint.

`prompts.py` connects replicas with it.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from localllm.base.closing import Closing
from localllm.cluster.errors import MessageError, StageLost
from localllm.cluster.wire import Message, decode, encode

if TYPE_CHECKING:
    from localllm.cluster.zeromq import Endpoint


class Link(Closing):
    """Sends messages in the order of `send`. Its thread calls `take` with each message that arrives, and `lost` with
    the reason when the connection has ended.
    """

    def __init__(self, endpoint: Endpoint, take: Callable[[Message], None], lost: Callable[[str], None]) -> None:
        """Take over a connected endpoint. `take` may raise MessageError, which ends the connection."""
        self._endpoint, self._take, self._lost = endpoint, take, lost
        self._lock = threading.Lock()
        self._waiting: deque[Message] = deque()
        self._waker, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, *messages: Message) -> None:
        """Send messages after those before. May be called from any thread."""
        with self._lock:
            if self._closing:  # nothing would take them out again
                return
            self._waiting.extend(messages)
        self._rouse()

    def withdraw(self, number: int) -> None:
        """Do not send the messages with this number that still wait."""
        with self._lock:
            self._waiting = deque(message for message in self._waiting if message.number != number)

    def _rouse(self) -> None:
        with suppress(OSError):  # the thread is about to look anyway, or has ended
            self._wake.send(b"\0")

    @property
    def queued(self) -> int:
        """Bytes of the messages that were not sent yet."""
        with self._lock:
            return sum(array.nbytes for message in self._waiting for array in message.arrays)

    def close(self) -> None:
        self._closing = True
        self._rouse()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _next(self) -> bytes:
        """Return the next message to send; empty without one."""
        with self._lock:
            message = self._waiting.popleft() if self._waiting else None
        return encode(message) if message is not None else b""

    def _run(self) -> None:
        """Send and receive in turn, so that neither waits for a long queue of the other, here or at the other end."""
        reason, data = "the connection was closed", b""
        try:
            while not self._closing:
                data = data or self._next()
                if data and self._endpoint.try_send(data):
                    data = b""
                found = self._endpoint.receive_or_wake(self._waker.fileno(), bool(data or self._waiting))
                if found is not None:
                    self._take(decode(found))
                    continue
                with suppress(BlockingIOError):  # the other end takes messages again
                    self._waker.recv(4096)
        except (StageLost, MessageError) as error:
            reason = str(error)
        finally:
            with self._lock:
                self._closing = True
                self._waiting.clear()
            try:
                self._endpoint.close()
                self._waker.close()
                self._wake.close()
            finally:
                self._lost(reason)

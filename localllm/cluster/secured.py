"""Sockets of ZeroMQ with CURVE: encrypted, both sides prove their keys, and a machine that is gone is noticed.

zeromq.py uses them between stages, `localllm/distributed` for the events of replicas. Importing this module imports
pyzmq.
"""

from __future__ import annotations

from typing import NamedTuple

import zmq
from zmq.auth.thread import ThreadAuthenticator

LATE = 1.2  # seconds without a sign of life until a connection counts as lost
QUEUED = 64  # messages that may wait on each side of a connection
HANDSHAKE = 5.0  # seconds for a stranger to prove its key
_BEAT = 0.3  # seconds between signs of life
_LINGER = 500  # milliseconds for which a closing process still sends its last message
_ENCRYPTION = 64  # bytes that CURVE adds to a message, rounded up


class Peer(NamedTuple):
    """Where a process listens, and its public key."""

    address: str  # tcp://HOST:PORT
    public_key: bytes


class Secured:
    """The keys of this process in some connections, and its sockets."""

    def __init__(self) -> None:
        self.public_key, self._secret = zmq.curve_keypair()
        self._context = zmq.Context()
        self._allowed: set[bytes] = set()  # keys of the processes that may connect
        self._authenticator: ThreadAuthenticator | None = None

    def socket(self, kind: int, most_bytes: int = -1, beats: bool = True) -> zmq.Socket[bytes]:
        """Return a new socket. `most_bytes` is the size of the largest message to accept; -1: any.

        `beats`: whether a connection without a sign of life ends. A process that reads too slowly gives none.
        """
        made = self._context.socket(kind)
        made.linger = _LINGER
        made.hwm = QUEUED
        made.handshake_ivl = round(1000 * HANDSHAKE)
        if beats:
            made.heartbeat_ivl = round(1000 * _BEAT)
            made.heartbeat_timeout = round(1000 * (LATE - _BEAT))
        made.curve_secretkey, made.curve_publickey = self._secret, self.public_key
        made.maxmsgsize = most_bytes + _ENCRYPTION if most_bytes >= 0 else -1
        return made

    def listen(self, socket: zmq.Socket[bytes], host: str, ports: tuple[int, int] | None = None) -> Peer:
        """Accept connections of allowed processes. `host` is the interface to listen on; `ports` are the first port to
        try and the one after the last, None: any. Raises OSError if none is free.
        """
        if self._authenticator is None:
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback("*", self)
        socket.curve_server = True
        try:
            port = socket.bind_to_random_port(f"tcp://{host}", *(ports or ()))
        except (zmq.ZMQError, zmq.ZMQBindError) as error:
            where = f"ports {ports[0]} to {ports[1] - 1}" if ports is not None else "any port"
            raise OSError(f"cannot listen on {where} of {host}: {error}") from None
        return Peer(f"tcp://{host}:{port}", self.public_key)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a process with this public key may connect. pyzmq's authenticator calls this."""
        return key in self._allowed

    def accept(self, key: bytes) -> None:
        """Allow the process with this public key. It may connect only afterwards: ZeroMQ does not try again once it was
        turned away.
        """
        self._allowed.add(key)

    def connect(self, socket: zmq.Socket[bytes], peer: Peer) -> None:
        """Connect to a process that has accepted this one."""
        socket.curve_serverkey = peer.public_key
        socket.connect(peer.address)

    def close(self) -> None:
        """End, after the owner has closed all sockets. This waits for their last messages."""
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()

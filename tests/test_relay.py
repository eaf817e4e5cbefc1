"""benchmarks/relay.py: bytes arrive unchanged, after the delay, and at the bandwidth, in both directions."""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from random import Random
from time import perf_counter, sleep

import pytest

from benchmarks.relay import Relays, relays

DELAY, BANDWIDTH = 0.08, 2e6  # seconds, bytes per second
LATE = 10.0  # factor for a busy machine, where only a lower limit is certain


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Return what comes until the sender ends, after the first byte at once: its hash and its size."""

    def serve(one: socket.socket) -> None:
        with one:
            one.sendall(one.recv(1))
            digest, size = hashlib.sha256(), 0
            while data := one.recv(1 << 16):
                digest.update(data)
                size += len(data)
            one.sendall(digest.digest() + size.to_bytes(8, "little") + bytes(size))

    def accept() -> None:
        while True:
            try:
                one, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(one,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


def connected(made: Relays, server: str) -> socket.socket:
    host, port = made.to(server).split(":")
    one = socket.create_connection((host, int(port)), timeout=30)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one


def received(one: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        data = one.recv(count - len(found))
        assert data, f"{len(found)} of {count} bytes arrived"
        found += data
    return found


@pytest.mark.parametrize(("delay", "bandwidth"), [(0.0, 0.0), (DELAY, 0.0), (0.0, BANDWIDTH), (DELAY, BANDWIDTH)])
def test_bytes_arrive_unchanged_and_late(server: str, delay: float, bandwidth: float) -> None:
    data = Random(3).randbytes(300_000)
    with relays(delay, bandwidth) as made, closing(connected(made, server)) as one:
        began = perf_counter()
        one.sendall(b"x")
        assert one.recv(1) == b"x"
        trip = perf_counter() - began
        assert 2 * delay <= trip < LATE * (2 * delay + 0.05)
        began = perf_counter()
        one.sendall(data)
        one.shutdown(socket.SHUT_WR)
        expected = hashlib.sha256(data).digest() + len(data).to_bytes(8, "little") + bytes(len(data))
        assert received(one, len(expected)) == expected
        assert one.recv(1) == b""  # the end of the connection is passed on
        transfer = 2 * len(data) / bandwidth if bandwidth else 0.0
        assert 2 * delay + 0.99 * transfer <= perf_counter() - began < LATE * (2 * delay + transfer + 0.05)


def test_packets_are_on_their_way_at_once(server: str) -> None:
    """The delay is not added per packet: twenty packets take one delay each way."""
    delay = 0.3
    with relays(delay) as made, closing(connected(made, server)) as one:
        one.sendall(b"x")
        one.recv(1)
        began = perf_counter()
        for _ in range(20):
            one.sendall(b"packet")
            sleep(0.01)
        one.shutdown(socket.SHUT_WR)
        received(one, 32 + 8 + 120)
        assert perf_counter() - began < 10 * delay


def test_the_relay_ends_with_its_block_and_refuses_when_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nowhere = f"127.0.0.1:{closed.getsockname()[1]}"
    with relays(0.0) as made:
        host, port = made.to(nowhere).split(":")
        with socket.create_connection((host, int(port)), timeout=5) as one:
            assert one.recv(1) == b""
        (process,) = made._processes
    assert process.poll() is not None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=5)

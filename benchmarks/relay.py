"""A TCP relay that adds a delay and limits the bandwidth, as a network between two machines does.

    python benchmarks/relay.py 127.0.0.1:PORT [--delay MS] [--bandwidth BYTES_PER_SECOND]

Prints the port on which it listens. Every connection is passed on to the address. Data arrives DELAY after it was
sent, at BANDWIDTH in each direction; several packets are on their way at once, as in a real network. Packets are never
lost or reordered, and delays do not vary.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter, sleep

CHUNK = 64 << 10  # bytes read at a time


def pump(source: socket.socket, target: socket.socket, delay: float, bandwidth: float) -> None:
    """Pass data on from `source` to `target` until one of them ends."""
    underway: SimpleQueue[tuple[float, bytes]] = SimpleQueue()

    def write() -> None:
        with suppress(OSError):
            while (item := underway.get())[1]:
                due = item[0]
                while (left := due - perf_counter()) > 0:
                    sleep(left)
                target.sendall(item[1])
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    free = 0.0  # when the line has sent everything before
    with suppress(OSError):
        while data := source.recv(CHUNK):
            now = perf_counter()
            free = max(free, now) + (len(data) / bandwidth if bandwidth else 0.0)
            underway.put((free + delay, data))
    underway.put((0.0, b""))
    writer.join()


def relay(address: tuple[str, int], delay: float, bandwidth: float) -> None:
    """Listen on a free port, print it, and pass on every connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            near, _ = server.accept()
            try:
                far = socket.create_connection(address)
            except OSError:
                near.close()
                continue
            for one in (near, far):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=pump, args=(source, target, delay, bandwidth), daemon=True).start()


class Relays:
    """Starts a relay process for each address."""

    def __init__(self, delay: float, bandwidth: float = 0.0) -> None:
        """`delay` is in seconds; `bandwidth` in bytes per second (0: no limit)."""
        self._given = ["--delay", str(1000 * delay), "--bandwidth", str(bandwidth)]
        self._processes: list[subprocess.Popen[str]] = []

    def to(self, address: str) -> str:
        """Return the HOST:PORT of a relay to HOST:PORT."""
        command = [sys.executable, str(Path(__file__)), address, *self._given]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._processes.append(process)
        assert process.stdout is not None
        return f"127.0.0.1:{int(process.stdout.readline())}"

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


@contextmanager
def relays(delay: float, bandwidth: float = 0.0) -> Iterator[Relays]:
    made = Relays(delay, bandwidth)
    try:
        yield made
    finally:
        made.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--delay", type=float, default=0.0, help="milliseconds in each direction")
    parser.add_argument("--bandwidth", type=float, default=0.0, help="bytes per second in each direction (0: no limit)")
    given = parser.parse_args()
    host, _, port = given.address.rpartition(":")
    relay((host, int(port)), given.delay / 1000, given.bandwidth)


if __name__ == "__main__":
    main()

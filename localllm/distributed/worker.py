"""`localllm worker`: makes this machine the first one of a cluster, or joins one, for as long as the program runs.

Ray's ports are fixed, so that a firewall can let them through: `PORTS` in a row from the cluster's port on.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

from localllm.base.files.atomic import NewFile
from localllm.base.files.regular import open_regular, read_text
from localllm.base.notices import Notice, Setting
from localllm.cluster.errors import ClusterError
from localllm.distributed.machines import RING_LABEL
from localllm.distributed.membership import (
    HEAD,
    STARTING,
    Membership,
    Node,
    forget,
    membership,
    new_token,
    ray_folder,
    reachable,
    remember,
    split_address,
)
from localllm.distributed.package import check_package

PORTS = 100  # of each machine, from the cluster's port on
_SINGLE = (  # options of `ray start` with one port each, in this order after the first port
    "node-manager-port", "object-manager-port", "runtime-env-agent-port", "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port", "metrics-export-port",
)  # fmt: skip
_WORKERS, _RINGS = (10, 69), (70, 99)  # ports of Ray's worker processes, and of connections of stages and replicas
_TOKEN = "token"
WATCHING = 0.5  # seconds between looks at whether the node still runs
MOST_TOKEN = 256  # characters


@dataclass(frozen=True, slots=True)
class Member:
    """A machine that belongs to a cluster now."""

    address: str  # of the cluster
    host: str  # of this machine
    token: str
    token_file: Path | None
    node: Node

    def wait(self) -> None:
        """Wait until the node ends. Raises ClusterError with the reason."""
        while True:
            self.node.check()
            sleep(WATCHING)


@contextmanager
def started(host: str, port: int) -> Iterator[Member]:
    """Start a cluster on this machine; `host` is the address for the others, "" the one of the local network."""
    host = _own(host) if host else _local_network()
    _check_ports(host, port)
    token, place = _kept_token()
    with _member(
        f"{host}:{port}",
        host,
        token,
        place,
        port,
        [*HEAD, f"--port={port}", f"--ray-client-server-port={port + 1 + len(_SINGLE)}"],
    ) as found:
        yield found


@contextmanager
def joined(address: str, token: str, host: str, port: int) -> Iterator[Member]:
    """Make this machine part of the cluster at `address`."""
    if not reachable(address):
        raise ClusterError(
            f"nothing answers at {address}; see what `localllm worker` printed there, and its firewall "
            f"(docs/machines.md)"
        )
    host = _own(host) if host else _towards(address)
    _check_ports(host, port)
    with _member(address, host, token, None, port, [f"--address={address}"]) as found:
        yield found


def check_worker() -> None:
    """Raise ClusterError if this computer lacks Ray, or belongs to a cluster already."""
    check_package("localllm worker")
    if (known := membership()) is not None:
        raise ClusterError(
            f"this computer already belongs to the cluster at {known.address} (process {known.process}); "
            "stop that with Ctrl-C first"
        )


@contextmanager
def _member(
    address: str, host: str, token: str, token_file: Path | None, port: int, arguments: list[str]
) -> Iterator[Member]:
    single = [f"--{name}={port + 1 + number}" for number, name in enumerate(_SINGLE)]
    workers = [f"--min-worker-port={port + _WORKERS[0]}", f"--max-worker-port={port + _WORKERS[1]}"]
    rings = f"--labels={RING_LABEL}={port + _RINGS[0]}"
    with Node(token, host, [*arguments, *single, *workers, rings]) as node:
        _wait(node, address)
        remember(Membership(address, token, os.getpid()))
        try:
            yield Member(address, host, token, token_file, node)
        finally:
            forget()


def _wait(node: Node, address: str) -> None:
    """Wait until all of Ray's processes run. Raises ClusterError with a reason in one line."""
    until = monotonic() + STARTING
    while not node.started():
        ended = node.ended()
        if node.refused():
            raise ClusterError(f"the cluster at {address} does not accept this token; copy it from the first computer")
        if ended:
            node.check()
        if monotonic() > until:
            raise ClusterError(f"Ray did not start within {STARTING:g} s: {node.reason()}")
        sleep(0.1)


# -- addresses -------------------------------------------------------------------------------------------------------


def _local_network() -> str:
    """Return this machine's address in the local network. Raises ClusterError if its address is public."""
    host = _towards("192.0.2.1:9")  # an address for documentation: nothing is sent
    if not ipaddress.ip_address(host).is_private:
        problem = f"the address of this computer, {host}, is public; choose one with "
        raise ClusterError(Notice(problem, Setting("host"), ", and let a firewall protect it"))
    return host


def _towards(address: str) -> str:
    """Return the address of this machine from which another one is reached; 127.0.0.1 without a network."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found:
        found.connect(split_address(address))
        return str(found.getsockname()[0])
    return "127.0.0.1"


def _own(host: str) -> str:
    """Return the address that `host` names. Raises ClusterError if it is not an address of this machine."""
    try:
        address = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
        with socket.create_server((str(address), 0)):
            return str(address)
    except OSError:
        raise ClusterError(Notice(Setting("host", host), ": this computer has no such address")) from None


def _check_ports(host: str, port: int) -> None:
    """Raise ClusterError if another program uses one of the ports that Ray needs."""
    for number in range(port, port + 1 + len(_SINGLE)):
        try:
            with socket.create_server((host, number)):
                pass
        except OSError:
            problem = f"port {number} of this computer is in use; choose other ports with "
            raise ClusterError(Notice(problem, Setting("port"), ", or stop the program that uses it")) from None


# -- the token -------------------------------------------------------------------------------------------------------


def _kept_token() -> tuple[str, Path | None]:
    """Return the token of this user's clusters and its file, which is made the first time."""
    folder = ray_folder()
    if folder is None:
        return new_token(), None
    place = folder / _TOKEN
    with suppress(OSError, ClusterError), open_regular(place, own=True) as file:
        return checked_token(file.read(MOST_TOKEN + 2).decode("ascii", "replace"), str(place)), place
    token = new_token()
    with NewFile(place, 0o600) as new:
        new.file.write(token.encode() + b"\n")
        new.commit()
    return token, place


def checked_token(text: str, where: str) -> str:
    """Return a token without the space around it. Raises ClusterError unless it is one word."""
    token = text.strip()
    if not token or len(token) > MOST_TOKEN or not token.isascii() or any(each <= " " for each in token):
        raise ClusterError(f"{where}: not a token; it is the one word that `localllm worker` printed")
    return token


def read_token(path: str) -> str:
    """Return the token in a file."""
    return checked_token(read_text(path), path)


def ask_token(ask: Callable[[str], str]) -> str:
    """Return the token that the user types or pastes."""
    return checked_token(ask("token (from the first computer): "), "the token")

"""Starts a node of Ray on this machine, and remembers the cluster that this machine belongs to.

A node belongs to the process that started it: it ends with this process, however it ends (`supervised.py`). Every
cluster started here requires a token, because Ray runs the code of everyone who can connect.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from time import monotonic, sleep
from typing import IO

from localllm.base.closing import Closing
from localllm.base.files.atomic import NewFile
from localllm.base.files.regular import open_regular
from localllm.base.printable import printable
from localllm.cluster.errors import ClusterError
from localllm.distributed.apart import OPTION
from localllm.distributed.package import LOCAL, SETTINGS
from localllm.options.ray import is_address
from localllm.quant.codecache import default_folder, private_folder

LOOPBACK = "127.0.0.1"
OBJECTS = 128 << 20  # bytes of Ray's shared memory: ranges of files pass through it
PREFIX, _LOG = "localllm-ray-", ".log"
LONGEST_FOLDER = 40  # characters: the paths of sockets below it have a limit of 107
HEAD = ("--head", "--include-dashboard=false", "--no-monitor")  # options of the first node of a cluster
STARTING = 90.0  # seconds
REACHING = 3.0  # seconds for an address to answer


@dataclass(frozen=True, slots=True)
class Membership:
    """The cluster that this machine belongs to, through a node that `localllm worker` started."""

    address: str  # HOST:PORT
    token: str
    process: int  # of the program that started the node


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def reachable(address: str) -> bool:
    """Return whether something accepts connections at an address."""
    with suppress(OSError), socket.create_connection(split_address(address), timeout=REACHING):
        return True
    return False


def membership() -> Membership | None:
    """Return the cluster that this machine belongs to, if its node runs."""
    place = _place()
    if place is None:
        return None
    try:
        with open_regular(place, own=True) as file:
            found = Membership(**json.loads(file.read()))
        os.kill(found.process, 0)
        if not isinstance(found.address, str) or not is_address(found.address):
            return None
    except (OSError, ValueError, TypeError, OverflowError):
        return None
    return found if reachable(found.address) else None


def remember(found: Membership) -> None:
    """Store the cluster that this machine belongs to."""
    place = _place()
    if place is not None:
        with NewFile(place, 0o600) as new:
            new.file.write(json.dumps(asdict(found)).encode())
            new.commit()


def forget() -> None:
    place = _place()
    if place is not None:
        place.unlink(missing_ok=True)


def ray_folder() -> Path | None:
    """Return a folder that only this user can read; None if it cannot be made."""
    return private_folder(default_folder("ray"))


def _place() -> Path | None:
    folder = ray_folder()
    return folder / "cluster.json" if folder is not None else None


def new_token() -> str:
    return secrets.token_hex(16)


def use(token: str, host: str) -> None:
    """Make Ray use this token, in this process and in those that it starts, before it is imported. `host` is the
    address of the cluster.
    """
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token)
    if host == LOOPBACK:
        os.environ.update(LOCAL)
    os.environ.pop("RAY_AUTH_TOKEN_PATH", None)


class Node(Closing):
    """A node of Ray that runs until `close`, or until this process ends."""

    def __init__(self, token: str, host: str, arguments: Sequence[str]) -> None:
        """Start the node. `host` is the address of this machine for the others; 127.0.0.1: for this machine alone."""
        self.folder = _folder()
        self._log = self.folder + _LOG
        environment = {**os.environ, **SETTINGS, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        if host == LOOPBACK and HEAD[0] in arguments:
            environment |= LOCAL
        environment.pop("RAY_AUTH_TOKEN_PATH", None)
        environment.pop("RAY_ADDRESS", None)
        common = [
            f"--node-ip-address={host}", f"--object-store-memory={OBJECTS}", "--disable-usage-stats",
            "--include-log-monitor=false", OPTION,
        ]  # fmt: skip
        command = [sys.executable, "-m", "localllm.distributed.supervised", self.folder, *common, *arguments]
        with open(self._log, "wb") as log:
            _lock(log)  # as long as one of Ray's processes runs: they inherit the file
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def wait(self, address: str) -> None:
        """Wait until the cluster answers at `address`. Raises ClusterError with Ray's reason if the node ends."""
        until = monotonic() + STARTING
        while not reachable(address):
            self.check()
            if monotonic() > until:
                raise ClusterError(f"Ray did not start within {STARTING:g} s: {self.reason()}")
            sleep(0.05)

    def ended(self) -> bool:
        return self._process.poll() is not None

    def check(self) -> None:
        """Raise ClusterError if the node has ended."""
        if self.ended():
            raise ClusterError(f"Ray ended: {self.reason()}")

    def started(self) -> bool:
        """Return whether Ray has said that all its processes run."""
        return "Ray runtime started" in self._said()

    def refused(self) -> bool:
        """Return whether the cluster refused the token. Ray itself tries again."""
        return "InvalidAuthToken" in self._said()

    def _said(self) -> str:
        with suppress(OSError):
            return Path(self._log).read_text("utf-8", "replace")
        return ""

    def reason(self) -> str:
        """Return the last line of Ray that says something."""
        said = [line.strip() for line in self._said().splitlines() if line.strip()]
        found = next((line for line in reversed(said) if "rror" in line), said[-1] if said else "it gave no reason")
        return printable(found, 300)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(15)
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):
            os.unlink(self._log)


def _folder() -> str:
    """Create a private folder with a short path, for Ray's logs and sockets. Delete those that a crash left."""
    for parent in (tempfile.gettempdir(), "/tmp"):
        if len(parent) <= LONGEST_FOLDER - len(PREFIX) - 9:
            _sweep(Path(parent))
            return tempfile.mkdtemp(prefix=PREFIX, dir=parent)
    raise ClusterError("Ray needs a folder with a short path; set TMPDIR to one, such as /tmp")


def _sweep(parent: Path) -> None:
    """Delete this user's folders whose log is no longer locked: all their processes have ended."""
    for log in parent.glob(f"{PREFIX}*{_LOG}"):
        with suppress(OSError), open_regular(log, own=True) as file:
            if _lock(file):
                shutil.rmtree(str(log).removesuffix(_LOG), ignore_errors=True)
                log.unlink()


def _lock(file: IO[bytes]) -> bool:
    """Lock a file unless another process has locked it; return whether it is locked now. Not on Windows."""
    try:
        fcntl = import_module("fcntl")
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True


def free_port() -> int:
    """Return a port of 127.0.0.1 that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])

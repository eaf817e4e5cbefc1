"""The model's file on machines that do not have it: they fetch the parts that they need from the machine that does.

`FileServer` is an actor on that machine. `LocalCopy` is the file of a replica: the one at the front's path if it is the
same model, otherwise a copy with the parts that were needed (`parts.py`).
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from localllm.base.files.regular import open_regular
from localllm.base.units import size
from localllm.cluster.errors import ClusterError
from localllm.cluster.worker import Source
from localllm.distributed.parts import CHUNK, Needed, Range, Read, fetch, needed
from localllm.gguf import GGUFFile, open_gguf
from localllm.gguf.identity import identity
from localllm.plan import Plan
from localllm.quant.codecache import default_folder, private_folder

AHEAD = 4  # ranges of a file that are on their way at a time


class FileServer:
    """Sends ranges of a model's files to machines that do not have them."""

    def __init__(self, paths: tuple[str, ...]) -> None:
        self._paths, self._files = paths, dict[int, IO[bytes]]()

    def read(self, shard: int, start: int, stop: int) -> tuple[bytes, bytes]:
        """Return bytes of a file, and their SHA-256."""
        if not 0 <= stop - start <= CHUNK:
            raise ClusterError(f"{stop - start} bytes requested; at most {CHUNK} are sent at a time")
        if shard not in self._files:  # an error here reaches the reader, unlike one in the constructor
            self._files[shard] = open_regular(self._paths[shard])
        data = os.pread(self._files[shard].fileno(), stop - start, start)
        return data, hashlib.sha256(data).digest()


@dataclass(frozen=True, slots=True)
class Home:
    """The machine that has a model's file."""

    node: str  # Ray's id
    source: Source
    paths: tuple[str, ...]  # of all parts of a split file
    header: Needed  # what opening the file needs, without large tensors

    @classmethod
    def of(cls, file: GGUFFile, node: str) -> Home:
        known = identity(file)
        paths = tuple([os.path.abspath(path) for path in file.paths])
        return cls(node, Source(os.path.abspath(file.path), known), paths, needed(file, known, []))

    @contextmanager
    def serving(self, ray: Any) -> Iterator[Any]:
        """Run a `FileServer` there within the block."""
        server = file_server(ray, self.node, self.paths)
        try:
            yield server
        finally:
            with suppress(Exception):
                ray.kill(server)


def file_server(ray: Any, node: str, paths: tuple[str, ...]) -> Any:
    """Start a `FileServer` on a node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(FileServer).options(num_cpus=0, scheduling_strategy=there).remote(paths)


class LocalCopy:
    """The file of a model on this machine, whose home may be another one."""

    def __init__(self, ray: Any, home: Home, name: str, tell: Callable[[str], None]) -> None:
        """Fetch the header if this machine (`name`) does not have the file."""
        self.home, self._ray, self._name, self._tell = home, ray, name, tell
        self.path, self.fetched = Path(home.source.path), not has(home.source)
        if self.fetched:
            self.path = self._fetch(home.header)

    def complete(self, file: GGUFFile, plans: Iterable[Plan] | None = None) -> None:
        """Fetch what plans read, of the open file; None: all of it. The rest can then not be read."""
        if self.fetched:
            wanted = needed(file, self.home.source.identity, plans)
            self._tell(f"{self._name} needs {size(wanted.bytes)} of the model, and keeps it")
            self._fetch(wanted)
            file.forget(wanted.absent)

    def _fetch(self, wanted: Needed) -> Path:
        with self.home.serving(self._ray) as server:
            return fetch(parts_folder(), wanted, reader(server))


def has(model: Source) -> bool:
    """Return whether this machine has a file under the same path, with the same content."""
    try:
        with open_gguf(model.path) as file:
            return identity(file) == model.identity
    except Exception:  # then the file is fetched
        return False


def parts_folder() -> Path:
    """Return the folder for parts of models. Raises ClusterError if it cannot be made private."""
    folder = private_folder(default_folder("parts"))
    if folder is None:
        raise ClusterError("a part of the model needs a private folder; set XDG_CACHE_HOME to one")
    return folder


def reader(server: Any) -> Read:
    """Return a function that reads ranges through a `FileServer`, some of them in advance. It raises ClusterError."""
    import ray

    def got(coming: Any) -> tuple[bytes, bytes]:
        try:
            data, digest = ray.get(coming)
        except ray.exceptions.RayError as error:
            reason = str(getattr(error, "cause", None) or error).strip().splitlines()
            raise ClusterError(
                f"the model cannot be fetched: {reason[0] if reason else type(error).__name__}"
            ) from None
        return data, digest

    def read(shard: int, ranges: Sequence[Range]) -> Iterator[tuple[bytes, bytes]]:
        coming: deque[Any] = deque()
        for start, stop in ranges:
            coming.append(server.read.remote(shard, start, stop))
            if len(coming) == AHEAD:
                yield got(coming.popleft())
        while coming:
            yield got(coming.popleft())

    return read

"""The part of a GGUF that a stage needs, in a sparse file on its machine: the header, and the tensors of its layers.

A file `NAME.gguf` in the folder of the model's identity has the size of the original, with holes. `NAME.json` lists the
ranges whose bytes are on the disk and had the sender's hash; it is replaced after each transfer. All other ranges are
fetched again, so an interrupted transfer continues, and another cut of the same model adds only the missing ranges.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from localllm.base.files.atomic import NewFile
from localllm.base.files.regular import open_regular
from localllm.cluster.errors import ClusterError
from localllm.gguf import GGUFFile
from localllm.plan import Plan

CHUNK = 8 << 20  # bytes of a range; every range is sent, hashed and stored alone
SMALL = 1 << 20  # bytes
Range = tuple[int, int]
Read = Callable[[int, Sequence[Range]], Iterator[tuple[bytes, bytes]]]  # of a shard: the bytes and their SHA-256


@dataclass(frozen=True, slots=True)
class Needed:
    """The ranges of a model's files that a stage needs, in order, and the sizes of the files."""

    identity: str  # `gguf.identity`
    sizes: tuple[int, ...]
    ranges: tuple[tuple[Range, ...], ...]
    absent: tuple[str, ...]  # tensors that do not belong to it

    @property
    def bytes(self) -> int:
        return sum(stop - start for shard in self.ranges for start, stop in shard)


def needed(file: GGUFFile, identity: str, plans: Iterable[Plan] | None) -> Needed:
    """Return the tensors of `file` that plans read (None: all), and its headers: vocabulary, template, and everything
    before the tensors. Small tensors and tables of integers always belong to it, because recording a plan reads some.
    The name of a weight that is computed from a tensor contains the tensor's.
    """
    used = {weight.tensor for plan in plans or () for op in plan.operations for weight in (*op.matrices, *op.vectors)}
    computed = [name for name in used if name not in file.tensors]
    absent: list[str] = []
    found: list[list[Range]] = [[] for _ in file.paths]
    heads = [path.stat().st_size for path in file.paths]
    sizes = tuple(heads)
    places = {path: number for number, path in enumerate(file.paths)}
    for name, tensor in file.tensors.items():
        path, offset = tensor.place
        number = places[path]
        heads[number] = min(heads[number], offset)
        wanted = plans is None or name in used or any(name in each for each in computed)
        if wanted or tensor.nbytes <= SMALL or tensor.format == "I32":
            found[number].append((offset, offset + tensor.nbytes))
        else:
            absent.append(name)
    for number, head in enumerate(heads):
        found[number].insert(0, (0, head))
    return Needed(identity, sizes, tuple([tuple(_pieces(ranges)) for ranges in found]), tuple(absent))


def _pieces(ranges: Sequence[Range]) -> Iterator[Range]:
    """Divide ranges at multiples of CHUNK, so that two cuts of a model have the same pieces of a tensor."""
    for start, stop in ranges:
        while start < stop:
            end = min(stop, (start // CHUNK + 1) * CHUNK)
            yield start, end
            start = end


def fetch(folder: Path, wanted: Needed, read: Read, progress: Callable[[int], None] = lambda count: None) -> Path:
    """Return the path of a file with the wanted ranges; read those that are not there yet with `read`.

    Raises ClusterError for wrong bytes and for a full disk.
    """
    if not re.fullmatch(r"[0-9a-f]{8,64}", wanted.identity):
        raise ClusterError("the identity of a model is a hexadecimal number; use the same version on every machine")
    place = folder / wanted.identity
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    count = len(wanted.sizes)
    paths = []
    for number, (size, ranges) in enumerate(zip(wanted.sizes, wanted.ranges, strict=True)):
        name = f"model-{number + 1:05d}-of-{count:05d}.gguf" if count > 1 else "model.gguf"
        paths.append(place / name)
        try:
            _Part(place / name, size).fill(ranges, partial(read, number), progress)
        except OSError as error:
            problem = f"{place / name}: cannot be stored: {error.strerror or error}"
            raise ClusterError(f"{problem}; the stage needs {wanted.bytes >> 20} MiB there") from None
    return paths[0]


class _Part:
    """A sparse copy of one file, and the list of its ranges."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self._list = path, path.with_suffix(".json")
        self._size = size

    def fill(
        self,
        ranges: Sequence[Range],
        read: Callable[[Sequence[Range]], Iterator[tuple[bytes, bytes]]],
        progress: Callable[[int], None],
    ) -> None:
        present = self.present()
        missing = sorted(set(ranges) - present)
        if not missing:
            return
        if not present:
            self._list.unlink(missing_ok=True)  # it is not trusted
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
        with os.fdopen(descriptor, "r+b", buffering=0) as file:
            os.ftruncate(file.fileno(), self._size)
            done: list[Range] = []
            try:
                for (start, stop), (data, digest) in zip(missing, read(missing), strict=True):
                    if len(data) != stop - start or hashlib.sha256(data).digest() != digest:
                        problem = f"bytes {start} to {stop} arrived damaged"
                        raise ClusterError(f"{self.path}: {problem}; try again, and check the network and memory")
                    view = memoryview(data)
                    file.seek(start)
                    while view:
                        view = view[file.write(view) :]
                    done.append((start, stop))
                    progress(stop - start)
            finally:  # after an interruption too
                if done:
                    os.fsync(file.fileno())
                    self._record(done)

    def present(self) -> set[Range]:
        """Return the listed ranges; none if the file was changed since, or if anything about the list is odd."""
        try:
            with open_regular(self._list, own=True) as file:
                found = json.loads(file.read())
            facts = os.stat(self.path, follow_symlinks=False)
            if (facts.st_size, facts.st_mtime_ns) != (self._size, found["changed"]):
                return set()
            return {(int(start), int(stop)) for start, stop in found["ranges"]}
        except (OSError, ValueError, KeyError, TypeError):
            return set()

    def _record(self, done: Sequence[Range]) -> None:
        # Another stage of this machine may add ranges at the same time: at worst, some are fetched again.
        try:
            with open_regular(self._list, own=True) as file:
                known = {(int(a), int(b)) for a, b in json.loads(file.read())["ranges"]}
        except (OSError, ValueError, KeyError, TypeError):
            known = set()
        changed = os.stat(self.path).st_mtime_ns
        with NewFile(self._list, 0o600) as new:
            new.file.write(json.dumps({"changed": changed, "ranges": sorted(known | set(done))}).encode())
            new.commit()

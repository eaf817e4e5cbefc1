"""Damaged importance matrices of both formats are read, queried for the weights of tensors, and written again."""

from __future__ import annotations

import struct
from pathlib import Path
from random import Random
from typing import ClassVar

import numpy as np

from localllm.quantize.calibration import imatrix
from localllm.quantize.calibration.imatrix import Imatrix, ImatrixEntry
from localllm.quantize.jobs import metadata
from tests.fuzz import values
from tests.fuzz.case import Case, Wrong
from tests.fuzz.gguf import change_counts, change_key, change_tensor
from tests.fuzz.image import STRING, decode

_SHAPES = ((1, 64), (2, 32), (64, 1), (4, 16), (3, 64))  # experts and columns of the queried tensors


class Kind:
    together: ClassVar[int] = 300
    seconds: ClassVar[float] = 20.0

    def __init__(self, home: Path) -> None:
        sums = np.linspace(0, 9, 128, dtype=np.float32)
        entries = {"blk.0.attn_q.weight": ImatrixEntry(sums[None, :64], np.array([3], np.int64))}
        entries["blk.0.ffn_up_exps.weight"] = ImatrixEntry(sums.reshape(4, 32), np.array([3, 0, 1, 2], np.int64))
        good = Imatrix(entries, 1, 512, ("text",))
        for name in ("i.dat", "i.gguf"):
            imatrix.write_imatrix(home / name, good)
        self._dat, self._gguf = (home / "i.dat").read_bytes(), decode((home / "i.gguf").read_bytes())

    def make(self, random: Random, folder: Path) -> Case:
        path, changes = folder / "imatrix", []
        if random.random() < 0.4:
            data = self._dat
            if random.random() < 0.7:
                at = random.choice(_numbers_of(data))
                new = random.choice((-1, 0, 1, 2, 64, values.integer(random)))
                data = data[:at] + struct.pack("<I", new % 2**32) + data[at + 4 :]
                changes.append(f".dat number at {at} = {new}")
            if random.random() < 0.5 or not changes:
                data = values.damage(random, data)
                changes.append(".dat bytes")
        else:
            image = self._gguf.copy()
            for _ in range(random.choice((1, 1, 2))):
                changes.append(random.choice((change_tensor, change_tensor, change_key, change_counts))(random, image))
            if random.random() < 0.3:
                at = 4 * random.randrange(len(image.data) // 4)
                image.data = image.data[:at] + struct.pack("<f", _float32(random)) + image.data[at + 4 :]
                changes.append(f"number at {at}")
            if random.random() < 0.2:
                image.set("imatrix.datasets", STRING, b"\x1b[31m")
            data = image.encode()
            if random.random() < 0.1:
                data = values.damage(random, data)
                changes.append("bytes")
        path.write_bytes(data)
        return Case(tuple(changes), lambda: use(path))


def _numbers_of(data: bytes) -> list[int]:
    """Return the offsets of the counts and lengths in the older format, entry by entry."""
    found, at = [0], 4
    for _ in range(struct.unpack_from("<i", data)[0]):
        length = struct.unpack_from("<i", data, at)[0]
        size = struct.unpack_from("<i", data, at + 8 + length)[0]
        found += [at, at + 4 + length, at + 8 + length]
        at += 12 + length + 4 * size
    return [*found, at, at + 4]


def _float32(random: Random) -> float:
    return float(np.float32(np.clip(random.choice(values.FLOATS), -3.4e38, 3.4e38)))


def use(path: Path) -> str:
    found = imatrix.read_imatrix(path)
    for name in found.entries:
        for experts, columns in _SHAPES:
            try:
                weights = found.importance(name, experts, columns)
            except imatrix.LocalLLMError:  # an importance matrix of a different model
                continue
            if weights is None or weights.shape != (experts, columns) or not (weights >= 0).all():
                raise Wrong(f"{name!r}: weights that cannot be")
    metadata({}, 0, found, path.name)
    for suffix in (".dat", ".gguf"):
        again = path.with_name("again" + suffix)
        imatrix.write_imatrix(again, found)
        if set(imatrix.read_imatrix(again).entries) != set(found.entries):
            raise Wrong(f"written as {suffix} it has other entries")
    return "read"

"""Extend the saved state of a llama.cpp sequence by repeating its KV cells at the following positions.

A prompt of 65536 tokens takes llama.cpp hours on two cores with wide attention. The time of a step at that depth
depends on the number of cells, not on their content. So a benchmark evaluates a short prompt, saves the state, and
loads it with its cells repeated.

A state is a magic number, the sequence's number, and one part per cache. A part holds the number of streams (1), the
number of cells, and the position and the sequence of each cell. Then follow a flag for transposed values, the number of
layers, and the keys of each layer with the type and the size of a row. If a cache has values, they follow in the same
form.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
CELL = np.dtype([("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")])


class _Mismatch(Exception):
    """Raised if the bytes do not match the known format."""


@dataclass(slots=True)
class _Reader:
    data: bytes
    at: int

    def take(self, size: int) -> bytes:
        if size < 0 or self.at + size > len(self.data):
            raise _Mismatch
        self.at += size
        return self.data[self.at - size : self.at]

    def numbers(self, form: str) -> tuple[int, ...]:
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))


def repeated(state: bytes, cells: int) -> bytes:
    """Return a state of `cells` cells. Raises ValueError if the state does not have the known format."""
    for caches in (1, 2):
        for values in product((False, True), repeat=caches):
            try:
                return _repeated(state, cells, values)
            except _Mismatch:
                continue
    raise ValueError("this version of llama.cpp saves states in another form")


def _repeated(state: bytes, cells: int, values: tuple[bool, ...]) -> bytes:
    reader = _Reader(state, 0)
    parts = [reader.take(8)]
    for own in values:
        parts += _cache(reader, cells, own)
    if reader.at != len(state):
        raise _Mismatch
    return b"".join(parts)


def _cache(reader: _Reader, cells: int, values: bool) -> list[bytes]:
    streams, count = reader.numbers("II")
    found = np.frombuffer(reader.take(count * CELL.itemsize), CELL)
    if streams != 1 or not count or (found["sequences"] != 1).any() or (found["position"] != np.arange(count)).any():
        raise _Mismatch
    longer = np.zeros(cells, CELL)
    longer["position"], longer["sequences"], longer["sequence"] = np.arange(cells), 1, found["sequence"][0]
    transposed, layers = reader.numbers("II")
    parts = [struct.pack("<II", 1, cells), longer.tobytes(), struct.pack("<II", transposed, layers)]
    for _ in range(layers):
        parts += _rows(reader, count, cells)
    for _ in range(layers if values else 0):
        parts += _columns(reader, count, cells) if transposed else _rows(reader, count, cells)
    return parts


def _rows(reader: _Reader, count: int, cells: int) -> list[bytes]:
    head = reader.take(12)
    size = struct.unpack("<iQ", head)[1]
    return [head, _again(np.frombuffer(reader.take(count * size), np.uint8).reshape(count, size), cells).tobytes()]


def _columns(reader: _Reader, count: int, cells: int) -> list[bytes]:
    head = reader.take(12)
    _, size, rows = struct.unpack("<iII", head)
    found = np.frombuffer(reader.take(rows * count * size), np.uint8).reshape(rows, count, size)
    return [head, np.ascontiguousarray(_again(found.transpose(1, 0, 2), cells).transpose(1, 0, 2)).tobytes()]


def _again(rows: U8, cells: int) -> U8:
    return rows[np.arange(cells) % len(rows)]

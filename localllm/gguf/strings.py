"""Arrays of strings in GGUF metadata: a vocabulary has 10^5 to 10^6 strings, each stored as a 64-bit length and bytes.

Opening a file only determines where the strings start (`scan_strings`); they are decoded on demand. Invalid UTF-8 bytes
become lone surrogates ("surrogateescape"), so no data is lost and a copied file is byte-equal.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

_LENGTH = struct.Struct("<Q")
_WINDOW = 1 << 16  # bytes per vectorized step, whose temporaries fit in the L2 cache
_FAST = 512  # minimum number of strings per step for which guessing is worthwhile


def decode(data: bytes) -> str:
    """Decode UTF-8; each invalid byte becomes the lone surrogate U+DC00 + byte."""
    return data.decode("utf-8", "surrogateescape")


def encode(text: str) -> bytes:
    """Return the bytes that `decode` converted to the text; raise UnicodeEncodeError for any other lone surrogate."""
    return text.encode("utf-8", "surrogateescape")


def scan_strings(data: mmap.mmap | bytes, start: int, end: int, count: int) -> NDArray[np.int64] | int:
    """Return the start of each of `count` strings (length, bytes), and the end of the last: int64 (count + 1,).

    If a string extends past `end`, return its index instead. The caller has checked that `count` lengths fit, so the
    array is no larger than the file.

    Strings follow one another without an index, so walking costs 0.2 us per string in Python. But almost every length
    is below 256: one byte and seven zeros, which do not occur in text. A step therefore guesses that every run of seven
    zeros is part of a length, and keeps guesses while each string begins exactly where the previous one ends. It walks
    over the first wrong guess, and over strings that guessing misses (long strings, strings with zeros). The length of
    walks doubles while guessing is not worthwhile.
    """
    bounds = np.empty(count + 1, np.int64)
    done, position, walk = 0, start, 1
    while done < count:
        found = _guess(data, position, end, count - done)
        if len(found):
            bounds[done : done + len(found)] = found
            done += len(found)
            position = int(found[-1]) + 8 + data[int(found[-1])]
        walk = 1 if len(found) >= _FAST else min(2 * walk, 1 << 16)
        if position <= end:
            walked, position = _walk(data, position, end, min(walk, count - done))
            bounds[done : done + len(walked)] = walked
            done += len(walked)
        if position > end:
            return done - 1
    bounds[count] = position
    return bounds


def _walk(data: mmap.mmap | bytes, position: int, end: int, limit: int) -> tuple[list[int], int]:
    """Return the starts of the next `limit` strings, and the end of the last; fewer strings if one
    extends past `end`."""
    starts = []
    length = _LENGTH.unpack_from
    for _ in range(limit):
        starts.append(position)
        if position + 8 > end:
            return starts, end + 1
        position += 8 + length(data, position)[0]
        if position > end:
            break
    return starts, position


def _guess(data: mmap.mmap | bytes, start: int, end: int, limit: int) -> NDArray[np.int64]:
    """Return the starts of at most `limit` consecutive short strings from `start` on. Only the last string may extend
    past `end`.
    """
    size = min(_WINDOW, 264 * limit, end - start)
    if size < 8:
        return np.empty(0, np.int64)
    window = np.frombuffer(data, np.uint8, size, start)
    zeros = window == 0
    zeros = zeros[:-1] & zeros[1:]  # two in sequence
    zeros = zeros[:-2] & zeros[2:]  # four
    zeros = zeros[:-3] & zeros[3:]  # seven
    guesses = np.flatnonzero(zeros[1:])[:limit]  # a byte followed by seven zeros is a length
    if not len(guesses) or guesses[0] != 0:
        return guesses[:0] + start
    linked = guesses[:-1] + 8 + window[guesses[:-1]] == guesses[1:]
    good = len(guesses) if linked.all() else int(np.argmin(linked)) + 1
    return guesses[:good] + start


class StringArray(Sequence[str]):
    """A string array in a copy of the header, decoded on demand; remains usable after the file is closed."""

    __slots__ = ("_bounds", "_data")

    def __init__(self, data: mmap.mmap | bytes, bounds: NDArray[np.int64]) -> None:
        self._data = data
        self._bounds = bounds  # (strings + 1,), from `scan_strings`

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = range(len(self))[index]
        return decode(self._data[self._bounds[i] + 8 : self._bounds[i + 1]])

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_list())

    def __repr__(self) -> str:
        return f"<StringArray of {len(self)}>"

    def to_list(self) -> list[str]:
        """Decode all strings at once: replace every length with one zero byte, and split the text at zeros."""
        if not len(self):
            return []
        starts = self._bounds[:-1] - self._bounds[0]
        region = np.frombuffer(self.stored(), np.uint8)
        keep = np.ones(len(region), np.bool_)
        for i in range(1, 8):
            keep[starts + i] = False
        short = region[keep]
        short[starts - 7 * np.arange(len(self))] = 0
        strings = str(short.data, "utf-8", "surrogateescape").split("\0")[1:]
        return strings if len(strings) == len(self) else self[:]  # False if a string contains a zero

    def stored(self) -> bytes:
        """Return the strings as stored in the file, including lengths."""
        return self._data[int(self._bounds[0]) : int(self._bounds[-1])]
